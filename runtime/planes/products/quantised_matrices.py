"""The quantised matrices of a decoding stage, and the functions for the nodes that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusion.dag.ir.graph import Graph, Node, Ref, TensorType
from fusion.dag.ir.opset_spec import plain
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.products.packed import in_blocks, is_batch_invariant, padding_rows
from fusion.runtime.planes.products.quantised import TILE_ELEMENTS, InBlocks, linear
from fusion.runtime.planes.products.quantised_code import product
from fusion.runtime.planes.products.quantised_experts import expert_linear_by

Tensor = torch.Tensor
Product = Callable[..., Tensor]

_MAX_PADDING_SHARE = 8  # padding may add this share of a matrix
_LINEAR = frozenset({"fusion.linear_int8", "fusion.linear_int4"})
_EXPERTS = frozenset({"fusion.expert_linear_int8", "fusion.expert_linear_int4"})
# Where the weight is among the arguments of each operator; scales and minimums follow it.
_WEIGHT_ARGUMENT = {
    **dict.fromkeys(_LINEAR, 1),
    **dict.fromkeys(_EXPERTS, 2),
    "fusion.embedding_int8": 0,
    "fusion.embedding_int4": 0,
}


@dataclass(frozen=True)
class _Quantised:
    """The variables of a quantised matrix, or of those of experts."""

    weight: str
    scales: str
    minimums: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight, self.scales, *([] if self.minimums is None else [self.minimums]))


class QuantisedMatrices:
    """The quantised matrices of a graph. They are packed where this machine has machine code for them and nothing else reads them.
    `products`: the functions for nodes that read packed matrices, or that CUDA kernels run, by node. `batch_invariant`: whether all
    products are."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.products: dict[str, Product] = {}
        self.batch_invariant = True
        self._graph = graph
        self._device = device
        self._in_blocks: set[str] = set()
        self._invariant_by_kind: dict[object, bool] = {}
        readers: dict[_Quantised, list[Node]] = {}
        for node in graph.nodes:
            if (quantised := _quantised(graph, node)) is not None:
                readers.setdefault(quantised, []).append(node)
        for quantised, nodes in readers.items():
            if device.type == "cuda":
                self._use_kernels(quantised, nodes)
            elif any(node.op in _LINEAR | _EXPERTS for node in nodes):  # for embeddings alone, rows are best
                self._plan_packing(quantised, nodes)

    def prepack(self, name: str, value: Tensor) -> Tensor:
        """A variable of the stage in the layout that `products` read."""
        if name not in self._in_blocks:
            return value
        return in_blocks(value) if value.dim() == 2 else _experts_in_blocks(value)

    def _use_kernels(self, quantised: _Quantised, nodes: Sequence[Node]) -> None:
        cuda_kernels = kernels()
        if cuda_kernels is None:
            return
        weight, scales = self._types(quantised)
        if not cuda_kernels.quantised.supports(_columns(weight), plain(scales.shape[-1])):
            return
        for node in nodes:
            if node.op in _EXPERTS:
                self.products[node.name] = cuda_kernels.experts.quantised_expert_linear
            elif node.op in _LINEAR:
                self.products[node.name] = cuda_kernels.quantised.linear

    def _plan_packing(self, quantised: _Quantised, nodes: Sequence[Node]) -> None:
        weight, scales = self._types(quantised)
        blocks = self._blocks(quantised, nodes)
        if blocks is not None:
            self._in_blocks.update(quantised.names)
            for node in nodes:
                self.products[node.name] = _packed_product(blocks, node.op)
        # The machine code is the same for all sizes; a library may choose a kernel by size.
        dtypes = weight.dtype, scales.dtype, quantised.minimums is not None
        kind = dtypes if blocks is not None else (*dtypes, weight.shape[-2:], scales.shape[-2:])
        if kind not in self._invariant_by_kind:
            self._invariant_by_kind[kind] = _is_batch_invariant(
                blocks, weight, scales, quantised.minimums is not None, self._device
            )
        self.batch_invariant &= self._invariant_by_kind[kind]

    def _blocks(self, quantised: _Quantised, nodes: Sequence[Node]) -> InBlocks | None:
        """The products with the matrix, or each of the experts', in blocks; None where it cannot be packed."""
        uses, names = self._graph.uses, {Ref(name) for name in quantised.names}
        if self._device.type != "cpu" or any(len(uses[ref]) != len(nodes) for ref in names):
            return None
        weight, scales = self._types(quantised)
        rows, groups = plain(weight.shape[-2]), plain(scales.shape[-1])
        # The padding of blocks is in no memory budget, and a matrix of few rows would take many times its bytes.
        if names & {*self._graph.outputs} or padding_rows(rows) > rows // _MAX_PADDING_SHARE:
            return None
        bits = 8 if weight.dtype == "int8" else 4
        code = product(bits, scales.dtype == "float16", quantised.minimums is not None)
        return None if code is None else InBlocks(code, rows, _columns(weight), groups)

    def _types(self, quantised: _Quantised) -> tuple[TensorType, TensorType]:
        """The types of its weight and scales."""
        return self._graph.types[Ref(quantised.weight)], self._graph.types[Ref(quantised.scales)]


def _experts_in_blocks(matrices: Tensor) -> Tensor:
    """Pack (held, rows, n) as (held, blocks, n, 16), with extra memory for one matrix at a time."""
    first = in_blocks(matrices[0])
    blocks = first.new_empty(len(matrices), *first.shape)
    for expert_blocks, matrix in zip(blocks, matrices, strict=True):
        expert_blocks.copy_(in_blocks(matrix))
    return blocks


def _packed_product(blocks: InBlocks, op: str) -> Product:
    if op in _EXPERTS:
        return expert_linear_by(blocks.linear, blocks.rows)
    return blocks.linear if op in _LINEAR else blocks.embedding


def _quantised(graph: Graph, node: Node) -> _Quantised | None:
    """The quantised matrix that a node reads; None where it reads none, or one that is not of variables."""
    first_argument = _WEIGHT_ARGUMENT.get(node.op)
    if first_argument is None:
        return None
    names = [
        arg.name if isinstance(arg, Ref) else None for arg in node.args[first_argument : first_argument + 3]
    ]
    weight, scales, minimums = names
    if weight is None or scales is None:
        return None
    quantised, names_read = _Quantised(weight, scales, minimums), [ref.name for ref in node.refs()]
    read_once = all(names_read.count(name) == 1 for name in quantised.names)
    return quantised if read_once and graph.variable_names.issuperset(quantised.names) else None


def _columns(weight: TensorType) -> int:
    """Columns of the dequantised matrix."""
    return plain(weight.shape[-1]) * (1 if weight.dtype == "int8" else 2)


def _is_batch_invariant(
    blocks: InBlocks | None, weight: TensorType, scales: TensorType, minimums: bool, device: torch.device
) -> bool:
    """Test the product with a random matrix of this type, or a tile of it."""
    generator = torch.Generator().manual_seed(0)
    stored_columns, groups, columns = plain(weight.shape[-1]), plain(scales.shape[-1]), _columns(weight)
    rows = min(plain(weight.shape[-2]), max(1, TILE_ELEMENTS // columns))
    low, dtype = (-128, torch.int8) if weight.dtype == "int8" else (0, torch.uint8)
    random_weight = torch.randint(low, low + 256, (rows, stored_columns), generator=generator, dtype=dtype)
    random_scales = torch.rand(rows, groups, generator=generator).to(
        torch.float16 if scales.dtype == "float16" else torch.float32
    )
    parts = [random_weight, random_scales, *([random_scales] if minimums else [])]
    packed_parts = [(in_blocks(part) if blocks is not None else part).to(device) for part in parts]
    matrix = packed_parts[0], packed_parts[1], packed_parts[2] if minimums else None, None
    multiply = linear if blocks is None else replace(blocks, rows=rows).linear
    like = torch.empty(0, device=device)
    return is_batch_invariant(lambda each: multiply(each, *matrix), columns, like, min_rows=1)
