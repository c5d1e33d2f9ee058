"""Products of rows with the matrix of the expert that each row is routed to (`fusion.expert_linear`): rows are sorted by expert, with one
product an expert (grouped GEMM). No weights are gathered per row, and experts without rows are not read.

Ids are untrusted data: an id of no expert held here gives a row of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.experts import EXPERT_LINEAR
from fusion.runtime.planes.products.packed import Packed, pack, padded_rows
from fusion.runtime.planes.products.packed import linear as packed_linear

Product = Callable[[torch.Tensor, int], torch.Tensor]  # (rows (n, in), expert) -> (n, out)
# Finer than for other products: each expert's rows are padded, and their number differs at every run.
ROW_COUNT_STEPS = 8


@dataclass(frozen=True)
class PackedExperts:
    """The matrices of the experts that a stage holds."""

    matrices: tuple[Packed, ...]
    out: int


def packable_experts(graph: Graph) -> dict[str, bool]:
    """The variables that are read as the matrices of `fusion.expert_linear` and as nothing else, and whether they are stored transposed."""
    transposed_uses: dict[str, set[bool | None]] = {}
    for node in graph.nodes:
        for ref in node.refs():
            only_matrix = (
                node.op == EXPERT_LINEAR and ref == node.args[2] and list(node.refs()).count(ref) == 1
            )
            transposed_uses.setdefault(ref.name, set()).add(bool(node.args[6]) if only_matrix else None)
    single_uses = {name: next(iter(values)) for name, values in transposed_uses.items() if len(values) == 1}
    return {
        name: transposed
        for name, transposed in single_uses.items()
        if transposed is not None and name in graph.variable_names
    }


def expert_linear(
    rows: torch.Tensor,  # (rows, in)
    ids: torch.Tensor,  # (rows,)
    weight: torch.Tensor,  # (held, out, in), or (held, in, out) if transposed
    bias: torch.Tensor | None,  # (held, out)
    first: int,
    of: int,
    transposed: bool,
    *,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`fusion.expert_linear`, with gradients; computed in `compute_dtype`, or in the dtype of the weight."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (rows, weight, bias)):
        output: torch.Tensor = _ExpertLinear.apply(  # type: ignore[no-untyped-call]
            rows, ids, weight, bias, first, transposed, compute_dtype
        )
        return output
    return _forward(rows, ids, weight, bias, first, transposed, compute_dtype)


def expert_linear_in_float32(*args: Any) -> torch.Tensor:
    """The same computed in float32, of operands in half precision. One expert is cast at a time: those of a layer may be most of a stage."""
    return expert_linear(*args, compute_dtype=torch.float32)


def pack_experts(weight: torch.Tensor, *, transposed: bool) -> PackedExperts | None:
    """Pack the matrices for `packed_expert_linear`; None where this device or dtype is not supported."""
    matrices: list[Packed] = []
    for matrix in weight.unbind():
        packed = pack(matrix.t() if transposed else matrix)
        if packed is None:
            return None
        matrices.append(packed)
    return PackedExperts(tuple(matrices), _out_features(weight, transposed))


def packed_expert_linear(
    rows: torch.Tensor,
    ids: torch.Tensor,
    experts: PackedExperts,
    bias: torch.Tensor | None,
    first: int,
    of: int,
    transposed: bool,
) -> torch.Tensor:
    """`fusion.expert_linear` for decoding with packed matrices: batch-invariant."""

    def product(group: torch.Tensor, expert: int) -> torch.Tensor:
        return packed_linear(group, experts.matrices[expert], None if bias is None else bias[expert])

    return by_expert(rows, ids, first, len(experts.matrices), experts.out, product)


def _padded_count(count: int) -> int:
    return padded_rows(count, ROW_COUNT_STEPS)


def padded_expert_linear(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    of: int,
    transposed: bool,
    *,
    row_count: Callable[[int], int] = _padded_count,
) -> torch.Tensor:
    """`fusion.expert_linear` for decoding with matrices that are not packed, where products of several rows are batch-invariant.
    `row_count`: maps the rows of an expert to the rows to run."""
    product = _padded_product(_library_product(weight, bias, transposed, weight.dtype), row_count)
    return by_expert(rows, ids, first, weight.shape[0], _out_features(weight, transposed), product)


def fixed_expert_linear(min_rows: int) -> Callable[..., torch.Tensor]:
    """The same for kernels whose bits depend on the number of rows: every expert runs at least `min_rows`, the fixed batch size of single
    positions, and an expert never has more."""

    def linear(*args: Any) -> torch.Tensor:
        return padded_expert_linear(*args, row_count=lambda count: max(count, min_rows))

    return linear


def _padded_product(product: Product, row_count: Callable[[int], int]) -> Product:
    """The product with rows padded to `row_count` by repeating the last one."""

    def padded(group: torch.Tensor, expert: int) -> torch.Tensor:
        count = group.shape[0]
        missing = row_count(count) - count
        if not missing:
            return product(group, expert)
        return product(torch.cat([group, group[-1:].expand(missing, -1)]), expert)[:count]

    return padded


def _forward(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    transposed: bool,
    compute_dtype: torch.dtype | None,
) -> torch.Tensor:
    product = _library_product(weight, bias, transposed, compute_dtype or weight.dtype)
    return by_expert(rows, ids, first, weight.shape[0], _out_features(weight, transposed), product)


def _out_features(weight: torch.Tensor, transposed: bool) -> int:
    return int(weight.shape[2 if transposed else 1])


def _library_product(
    weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool, dtype: torch.dtype
) -> Product:
    def product(group: torch.Tensor, expert: int) -> torch.Tensor:
        matrix = (weight[expert].t() if transposed else weight[expert]).to(dtype)
        offset = None if bias is None else bias[expert].to(dtype)
        output: torch.Tensor = torch._C._nn.linear(group.to(dtype), matrix, offset)
        return output

    return product


def by_expert(
    rows: torch.Tensor, ids: torch.Tensor, first: int, held: int, out: int, product: Product
) -> torch.Tensor:
    """(rows, out) in the dtype of the rows: `product` of each row with its expert, or zeros where that is not held here."""
    order, groups = _groups(ids, first, held)
    sorted_rows = rows.index_select(0, order)
    sorted_output = rows.new_zeros(rows.shape[0], out)
    for expert, start, end in groups:
        sorted_output[start:end] = product(sorted_rows[start:end], expert)
    return torch.empty_like(sorted_output).index_copy_(0, order, sorted_output)


def _groups(ids: torch.Tensor, first: int, held: int) -> tuple[torch.Tensor, Iterator[tuple[int, int, int]]]:
    """The order that sorts rows by expert, and (expert, start, end) of the held experts that have rows."""
    sorted_ids, order = torch.sort(ids, stable=True)
    bounds = torch.arange(first, first + held + 1, device=ids.device)
    starts = torch.searchsorted(sorted_ids, bounds).tolist()
    return order, ((e, starts[e], starts[e + 1]) for e in range(held) if starts[e] < starts[e + 1])


class _ExpertLinear(torch.autograd.Function):
    """The gradient of a matrix is summed over the rows routed to it, in the order of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        first: int,
        transposed: bool,
        compute_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, ids, weight)
        ctx.first, ctx.transposed, ctx.compute_dtype = first, transposed, compute_dtype or weight.dtype
        return _forward(rows, ids, weight, bias, first, transposed, compute_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ids, weight = ctx.saved_tensors
        wants_rows, _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        order, groups = _groups(ids, ctx.first, weight.shape[0])
        sorted_gradient, rows_gradient = gradient.index_select(0, order), None
        sorted_rows = rows.index_select(0, order) if wants_weight else rows
        sorted_rows_gradient = torch.zeros_like(rows) if wants_rows else None
        weight_gradient = torch.zeros_like(weight) if wants_weight else None
        bias_gradient = weight.new_zeros(weight.shape[0], gradient.shape[1]) if wants_bias else None
        for expert, start, end in groups:
            group_gradient = sorted_gradient[start:end].to(ctx.compute_dtype)
            if sorted_rows_gradient is not None:
                matrix = weight[expert].to(ctx.compute_dtype)
                sorted_rows_gradient[start:end] = group_gradient @ (matrix.t() if ctx.transposed else matrix)
            if weight_gradient is not None:
                group = sorted_rows[start:end].to(ctx.compute_dtype)
                weight_gradient[expert] = (
                    group.t() @ group_gradient if ctx.transposed else group_gradient.t() @ group
                )
            if bias_gradient is not None:
                bias_gradient[expert] = group_gradient.sum(0)
        if sorted_rows_gradient is not None:
            rows_gradient = torch.empty_like(sorted_rows_gradient).index_copy_(0, order, sorted_rows_gradient)
        return rows_gradient, None, weight_gradient, bias_gradient, None, None, None
