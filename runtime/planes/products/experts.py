"""Products of rows with the matrix that each row has chosen (`fusion.expert_linear`): rows sorted by expert, one product an
expert. No weights are gathered for a row, and experts that nobody has chosen are not read.

Ids are data, perhaps a stranger's: one that names no expert held here gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.experts import EXPERT_LINEAR
from fusion.runtime.planes.products.packed import Packed, pack, padded
from fusion.runtime.planes.products.packed import linear as packed_linear

Product = Callable[[torch.Tensor, int], torch.Tensor]  # rows (n, in) with the matrix of an expert: (n, out)
# Finer steps than those of other products: here each expert's rows are padded, and their number differs at every run.
PARTS = 8


@dataclass(frozen=True)
class PackedExperts:
    """The matrices of the experts that a stage holds."""

    matrices: tuple[Packed, ...]
    out: int


def packable_experts(graph: Graph) -> dict[str, bool]:
    """The variables that are read as the matrices of `fusion.expert_linear` and of nothing else; whether they are stored the
    other way round."""
    read: dict[str, set[bool | None]] = {}
    for node in graph.nodes:
        for ref in node.refs():
            alone = node.op == EXPERT_LINEAR and ref == node.args[2] and list(node.refs()).count(ref) == 1
            read.setdefault(ref.name, set()).add(bool(node.args[6]) if alone else None)
    uses = {name: next(iter(found)) for name, found in read.items() if len(found) == 1}
    return {name: use for name, use in uses.items() if use is not None and name in graph.variable_names}


def expert_linear(
    rows: torch.Tensor,  # (rows, in)
    ids: torch.Tensor,  # (rows,)
    weight: torch.Tensor,  # (held, out, in), or (held, in, out) if transposed
    bias: torch.Tensor | None,  # (held, out)
    first: int,
    of: int,
    transposed: bool,
) -> torch.Tensor:
    """`fusion.expert_linear`, with gradients."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (rows, weight, bias)):
        found: torch.Tensor = _ExpertLinear.apply(rows, ids, weight, bias, first, transposed)  # type: ignore[no-untyped-call]
        return found
    return _forward(rows, ids, weight, bias, first, transposed)


def pack_experts(weight: torch.Tensor, *, transposed: bool) -> PackedExperts | None:
    """For `packed_expert_linear`; None where they cannot be packed here."""
    found: list[Packed] = []
    for matrix in weight.unbind():
        packed = pack(matrix.t() if transposed else matrix)
        if packed is None:
            return None
        found.append(packed)
    return PackedExperts(tuple(found), _width(weight, transposed))


def packed_expert_linear(
    rows: torch.Tensor,
    ids: torch.Tensor,
    experts: PackedExperts,
    bias: torch.Tensor | None,
    first: int,
    of: int,
    transposed: bool,
) -> torch.Tensor:
    """`fusion.expert_linear` for decoding where the matrices are packed: a row has the same bits in any company."""

    def product(group: torch.Tensor, expert: int) -> torch.Tensor:
        return packed_linear(group, experts.matrices[expert], None if bias is None else bias[expert])

    return by_expert(rows, ids, first, len(experts.matrices), experts.out, product)


def _in_steps(count: int) -> int:
    return padded(count, PARTS)


def padded_expert_linear(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    of: int,
    transposed: bool,
    *,
    whole: Callable[[int], int] = _in_steps,
) -> torch.Tensor:
    """`fusion.expert_linear` for decoding where the matrices are not packed and products of several rows agree. `whole`: how many
    rows are run for so many of an expert."""
    product = _padded(_plain(weight, bias, transposed), whole)
    return by_expert(rows, ids, first, weight.shape[0], _width(weight, transposed), product)


def fixed_expert_linear(least: int) -> Callable[..., torch.Tensor]:
    """The same where rows have the same bits if there are as many of them: so many at least are run, the number that single
    positions are run in, of which no expert gets more."""

    def linear(*args: Any) -> torch.Tensor:
        return padded_expert_linear(*args, whole=lambda count: max(count, least))

    return linear


def _padded(product: Product, whole: Callable[[int], int]) -> Product:
    """Of `whole` as many rows, the last one again as often as some are missing."""

    def of_padded(group: torch.Tensor, expert: int) -> torch.Tensor:
        count = group.shape[0]
        missing = whole(count) - count
        if not missing:
            return product(group, expert)
        return product(torch.cat([group, group[-1:].expand(missing, -1)]), expert)[:count]

    return of_padded


def _forward(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    transposed: bool,
) -> torch.Tensor:
    product = _plain(weight, bias, transposed)
    return by_expert(rows, ids, first, weight.shape[0], _width(weight, transposed), product)


def _width(weight: torch.Tensor, transposed: bool) -> int:
    return int(weight.shape[2 if transposed else 1])


def _plain(weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> Product:
    def product(group: torch.Tensor, expert: int) -> torch.Tensor:
        matrix = weight[expert].t() if transposed else weight[expert]
        found: torch.Tensor = torch._C._nn.linear(group, matrix, None if bias is None else bias[expert])
        return found

    return product


def by_expert(
    rows: torch.Tensor, ids: torch.Tensor, first: int, held: int, out: int, product: Product
) -> torch.Tensor:
    """(rows, out): of each row what `product` makes with the expert that it has chosen, or zeros where that is not held."""
    order, groups = _groups(ids, first, held)
    given = rows.index_select(0, order)
    made = rows.new_zeros(rows.shape[0], out)
    for expert, start, end in groups:
        made[start:end] = product(given[start:end], expert)
    return torch.empty_like(made).index_copy_(0, order, made)


def _groups(ids: torch.Tensor, first: int, held: int) -> tuple[torch.Tensor, Iterator[tuple[int, int, int]]]:
    """The rows in the order of their experts; and (expert, start, end) of those that are held and have rows."""
    by_expert, order = torch.sort(ids, stable=True)
    bounds = torch.arange(first, first + held + 1, device=ids.device)
    at = torch.searchsorted(by_expert, bounds).tolist()
    return order, ((e, at[e], at[e + 1]) for e in range(held) if at[e] < at[e + 1])


class _ExpertLinear(torch.autograd.Function):
    """Gradients of a matrix come from the rows that have chosen it, summed in the order of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        first: int,
        transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, ids, weight)
        ctx.first, ctx.transposed = first, transposed
        return _forward(rows, ids, weight, bias, first, transposed)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ids, weight = ctx.saved_tensors
        wants_rows, _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        order, groups = _groups(ids, ctx.first, weight.shape[0])
        given, of_rows = gradient.index_select(0, order), None
        chosen = rows.index_select(0, order) if wants_weight else rows
        made = torch.zeros_like(rows) if wants_rows else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        of_bias = weight.new_zeros(weight.shape[0], gradient.shape[1]) if wants_bias else None
        for expert, start, end in groups:
            part, matrix = given[start:end], weight[expert]
            if made is not None:
                made[start:end] = part @ (matrix.t() if ctx.transposed else matrix)
            if of_weight is not None:
                mine = chosen[start:end]
                of_weight[expert] = mine.t() @ part if ctx.transposed else part.t() @ mine
            if of_bias is not None:
                of_bias[expert] = part.sum(0)
        if made is not None:
            of_rows = torch.empty_like(made).index_copy_(0, order, made)
        return of_rows, None, of_weight, of_bias, None, None
