"""The quantised matrices of a stage that decodes, and what computes the nodes that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusion.dag.ir.graph import Graph, Node, Ref, TensorType
from fusion.dag.ir.opset_spec import plain
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.products.packed import filling, in_blocks, rows_agree
from fusion.runtime.planes.products.quantised import TILE_ELEMENTS, InBlocks, linear
from fusion.runtime.planes.products.quantised_code import product
from fusion.runtime.planes.products.quantised_experts import of_experts

Tensor = torch.Tensor
Product = Callable[..., Tensor]

_SPARE_SHARE = 8  # of a matrix, that blocks may add to it
_LINEAR = frozenset({"fusion.linear_int8", "fusion.linear_int4"})
_EXPERTS = frozenset({"fusion.expert_linear_int8", "fusion.expert_linear_int4"})
# Where the ops have the first of the tensors of a stored matrix among their arguments.
_PLACES = {
    **dict.fromkeys(_LINEAR, 1),
    **dict.fromkeys(_EXPERTS, 2),
    "fusion.embedding_int8": 0,
    "fusion.embedding_int4": 0,
}


@dataclass(frozen=True)
class _Stored:
    """The variables that a stored matrix, or those of experts, consist of."""

    weight: str
    scales: str
    minimums: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight, self.scales, *([] if self.minimums is None else [self.minimums]))


class StoredMatrices:
    """Those of a graph: in blocks, where there is machine code for them here and nothing else reads them. `products`: what
    computes the nodes that read those; `rows_agree`: whether a row's product has the same bits in any company."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.products: dict[str, Product] = {}
        self.rows_agree = True
        self._graph = graph
        self._device = device
        self._in_blocks: set[str] = set()
        self._tried: dict[object, bool] = {}
        readers: dict[_Stored, list[Node]] = {}
        for node in graph.nodes:
            if (stored := _stored(graph, node)) is not None:
                readers.setdefault(stored, []).append(node)
        for stored, nodes in readers.items():
            if device.type == "cuda":
                self._give_to_kernels(stored, nodes)
            elif any(node.op in _LINEAR | _EXPERTS for node in nodes):  # else rows lie best as they are
                self._lay_out(stored, nodes)

    def laid_out(self, name: str, value: Tensor) -> Tensor:
        """A variable of the stage as `products` reads it."""
        if name not in self._in_blocks:
            return value
        return in_blocks(value) if value.dim() == 2 else _each_in_blocks(value)

    def _give_to_kernels(self, stored: _Stored, nodes: Sequence[Node]) -> None:
        own = kernels()
        if own is None:
            return
        weight, scales = self._types(stored)
        if not own.quantised.multiplies(_columns(weight), plain(scales.shape[-1])):
            return
        for node in nodes:
            if node.op in _EXPERTS:
                self.products[node.name] = own.experts.stored_expert_linear
            elif node.op in _LINEAR:
                self.products[node.name] = own.quantised.linear

    def _lay_out(self, stored: _Stored, nodes: Sequence[Node]) -> None:
        weight, scales = self._types(stored)
        made = self._blocks(stored, nodes)
        if made is not None:
            self._in_blocks.update(stored.names)
            for node in nodes:
                self.products[node.name] = _with_blocks(made, node.op)
        # The code is the same for all sizes; a library may take another way for each.
        sort = weight.dtype, scales.dtype, stored.minimums is not None
        kind = sort if made is not None else (*sort, weight.shape[-2:], scales.shape[-2:])
        if kind not in self._tried:
            self._tried[kind] = _rows_agree(made, weight, scales, stored.minimums is not None, self._device)
        self.rows_agree &= self._tried[kind]

    def _blocks(self, stored: _Stored, nodes: Sequence[Node]) -> InBlocks | None:
        """What multiplies with the matrix, or each of the experts', laid out; None where that cannot be had."""
        uses, names = self._graph.uses, {Ref(name) for name in stored.names}
        if self._device.type != "cpu" or any(len(uses[ref]) != len(nodes) for ref in names):
            return None
        weight, scales = self._types(stored)
        rows, groups = plain(weight.shape[-2]), plain(scales.shape[-1])
        # What blocks add is in nobody's account: a matrix of few rows would take many times its bytes.
        if names & {*self._graph.outputs} or filling(rows) > rows // _SPARE_SHARE:
            return None
        bits = 8 if weight.dtype == "int8" else 4
        code = product(bits, scales.dtype == "float16", stored.minimums is not None)
        return None if code is None else InBlocks(code, rows, _columns(weight), groups)

    def _types(self, stored: _Stored) -> tuple[TensorType, TensorType]:
        """Of its numbers and its scales."""
        return self._graph.types[Ref(stored.weight)], self._graph.types[Ref(stored.scales)]


def _each_in_blocks(matrices: Tensor) -> Tensor:
    """(held, rows, n) as (held, blocks, n, 16), with memory for one matrix beside."""
    first = in_blocks(matrices[0])
    made = first.new_empty(len(matrices), *first.shape)
    for laid, matrix in zip(made, matrices, strict=True):
        laid.copy_(in_blocks(matrix))
    return made


def _with_blocks(made: InBlocks, op: str) -> Product:
    if op in _EXPERTS:
        return of_experts(made.linear, made.rows)
    return made.linear if op in _LINEAR else made.embedding


def _stored(graph: Graph, node: Node) -> _Stored | None:
    """What a node reads a stored matrix from; None for another one, or where that is not made of variables."""
    at = _PLACES.get(node.op)
    if at is None:
        return None
    names = [arg.name if isinstance(arg, Ref) else None for arg in node.args[at : at + 3]]
    weight, scales, minimums = names
    if weight is None or scales is None:
        return None
    stored, read = _Stored(weight, scales, minimums), [ref.name for ref in node.refs()]
    once = all(read.count(name) == 1 for name in stored.names)
    return stored if once and graph.variable_names.issuperset(stored.names) else None


def _columns(weight: TensorType) -> int:
    """Of the matrix that a stored one stands for."""
    return plain(weight.shape[-1]) * (1 if weight.dtype == "int8" else 2)


def _rows_agree(
    made: InBlocks | None, weight: TensorType, scales: TensorType, minimums: bool, device: torch.device
) -> bool:
    """`rows_agree` for a random matrix of this type, or a tile of it."""
    chance = torch.Generator().manual_seed(0)
    held, groups, columns = plain(weight.shape[-1]), plain(scales.shape[-1]), _columns(weight)
    rows = min(plain(weight.shape[-2]), max(1, TILE_ELEMENTS // columns))
    least, dtype = (-128, torch.int8) if weight.dtype == "int8" else (0, torch.uint8)
    numbers = torch.randint(least, least + 256, (rows, held), generator=chance, dtype=dtype)
    shares = torch.rand(rows, groups, generator=chance).to(
        torch.float16 if scales.dtype == "float16" else torch.float32
    )
    parts = [numbers, shares, *([shares] if minimums else [])]
    laid = [(in_blocks(part) if made is not None else part).to(device) for part in parts]
    given = laid[0], laid[1], laid[2] if minimums else None, None
    multiply = linear if made is None else replace(made, rows=rows).linear
    like = torch.empty(0, device=device)
    return rows_agree(lambda each: multiply(each, *given), columns, like, least=1)
