"""Products and look-ups of matrices that are stored as int8 or int4 (`fusion.dag.ir.opset_quantised`).

Where LLVM makes code for this machine (`quantised_code`), a matrix is laid out for that when a stage is loaded, in the bytes
that it has; on CUDA Triton reads it as it is (`fusion.runtime.planes.kernels.quantised_kernels`); elsewhere tiles of it become float32
as they are needed. All count as exactly as float32 does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from fusion.dag.ir.graph import Graph, Node, Ref, TensorType
from fusion.dag.ir.opset_spec import plain
from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.products.machine_code import LANES, Function
from fusion.runtime.planes.products.packed import filling, in_blocks, multiplied, places, rows_agree
from fusion.runtime.planes.products.quantised_code import product

Tensor = torch.Tensor

TILE_ELEMENTS = 1 << 22  # of a matrix, that are float32 at once
SLAB_ROWS = 16  # of every product: by how many there are, a library chooses its way, and so a row's bits
_SPARE_SHARE = 8  # of a matrix, that blocks may add to it
_MIDDLE = 8  # what a number of 4 bits without a minimum is counted from


# --- any device


def dequantised(weight: Tensor, scales: Tensor, minimums: Tensor | None) -> Tensor:
    """(rows, columns) float32 of weight (rows, columns) int8 or (rows, columns / 2) uint8, scales and minimums (rows, groups)."""
    if weight.dtype == torch.uint8:
        numbers = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).float()
        if minimums is None:
            numbers -= _MIDDLE
    else:
        numbers = weight.float()
    grouped = numbers.view(*scales.shape, -1)
    grouped *= scales.float().unsqueeze(-1)
    if minimums is not None:
        grouped += minimums.float().unsqueeze(-1)
    return grouped.flatten(-2)


def linear(
    rows: Tensor, weight: Tensor, scales: Tensor, minimums: Tensor | None, bias: Tensor | None
) -> Tensor:
    """rows (..., in) with the matrix (out, in), a tile of it at a time: (..., out)."""
    flat = rows.reshape(-1, rows.shape[-1]).float()
    count, columns = flat.shape
    padded = functional.pad(flat, (0, 0, 0, -count % SLAB_ROWS))
    slabs = padded.view(-(-count // SLAB_ROWS), SLAB_ROWS, columns)
    made = flat.new_empty(*slabs.shape[:2], weight.shape[0])
    tile = max(1, TILE_ELEMENTS // columns)
    for at in range(0, weight.shape[0], tile):
        part = slice(at, at + tile)
        matrix = dequantised(weight[part], scales[part], None if minimums is None else minimums[part]).t()
        for given, found in zip(slabs, made, strict=True):
            found[:, part] = torch.mm(given, matrix)
    made = made.flatten(0, 1)[:count]
    if bias is not None:
        made = made + bias.float()
    return made.to(rows.dtype).view(*rows.shape[:-1], weight.shape[0])


def embedding(
    weight: Tensor, scales: Tensor, minimums: Tensor | None, ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """The rows `ids` (...) as (..., columns)."""
    at = ids.flatten()
    parts = [None if part is None else part.index_select(0, at) for part in (weight, scales, minimums)]
    numbers, shares, offsets = parts
    assert numbers is not None and shares is not None
    return dequantised(numbers, shares, offsets).to(dtype).view(*ids.shape, -1)


# --- laid out for machine code


@dataclass(frozen=True)
class InBlocks:
    """The same operators for a stored matrix (rows, columns) with so many groups in a row, each of whose tensors is laid out with
    `in_blocks`."""

    code: Function
    rows: int
    columns: int
    groups: int

    def linear(
        self, rows: Tensor, weight: Tensor, scales: Tensor, minimums: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if rows.shape[-1] != self.columns:  # the code would read beyond the rows
            raise ValueError(f"rows {tuple(rows.shape)} for a stored matrix of {self.columns} columns")
        offsets = 0 if minimums is None else minimums.data_ptr()
        found = multiplied(
            self.code,
            rows.float(),
            (weight.data_ptr(), scales.data_ptr(), offsets),
            -(-self.rows // LANES),
            self.rows,
            (self.groups, self.columns // self.groups),
            None if bias is None else bias.float(),
        )
        return found if rows.dtype == torch.float32 else found.to(rows.dtype)

    def embedding(
        self, weight: Tensor, scales: Tensor, minimums: Tensor | None, ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        block, lane = places(ids.flatten(), self.rows)
        numbers, shares = weight[block, :, lane], scales[block, :, lane]
        offsets = None if minimums is None else minimums[block, :, lane]
        return dequantised(numbers, shares, offsets).to(dtype).view(*ids.shape, self.columns)


# --- of a stage


@dataclass(frozen=True)
class _Stored:
    """The variables that a stored matrix consists of."""

    weight: str
    scales: str
    minimums: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight, self.scales, *([] if self.minimums is None else [self.minimums]))


class StoredMatrices:
    """The quantised matrices of a stage that decodes: in blocks, where there is machine code for them here and nothing else
    reads them. `products`: what computes the nodes that read those; `rows_agree`: whether a row's product has the same bits
    in any company."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.products: dict[str, Callable[..., Tensor]] = {}
        self.rows_agree = True
        self._in_blocks: set[str] = set()
        readers: dict[_Stored, list[Node]] = {}
        for node in graph.nodes:
            if (stored := _stored(graph, node)) is not None:
                readers.setdefault(stored, []).append(node)
        tried: dict[object, bool] = {}
        for stored, nodes in readers.items():
            weight, scales = graph.types[Ref(stored.weight)], graph.types[Ref(stored.scales)]
            apart = all(len(graph.uses[Ref(name)]) == len(nodes) for name in stored.names)
            multiplies = any(node.op in _LINEAR for node in nodes)  # else rows lie best as they are
            made = None
            if (
                multiplies
                and apart
                and device.type == "cpu"
                and not {Ref(name) for name in stored.names} & {*graph.outputs}
            ):
                bits = 8 if weight.dtype == "int8" else 4
                code = product(bits, scales.dtype == "float16", stored.minimums is not None)
                rows, groups = plain(weight.shape[0]), plain(scales.shape[1])
                # What blocks add is in nobody's account: a matrix of few rows would take many times its bytes.
                code = code if filling(rows) <= rows // _SPARE_SHARE else None
                made = None if code is None else InBlocks(code, rows, _columns(weight), groups)
            if made is not None:
                self._in_blocks.update(stored.names)
                for node in nodes:
                    self.products[node.name] = made.linear if node.op in _LINEAR else made.embedding
            if device.type == "cuda":
                own, groups = kernels(), plain(scales.shape[1])
                if own is not None and own.quantised.multiplies(_columns(weight), groups):
                    linears = [node.name for node in nodes if node.op in _LINEAR]
                    self.products.update(dict.fromkeys(linears, own.quantised.linear))
            elif multiplies:
                # The code is the same for all sizes; a library may take another way for each.
                sort = weight.dtype, scales.dtype, stored.minimums is not None
                kind = sort if made is not None else (*sort, weight.shape, scales.shape)
                if kind not in tried:
                    tried[kind] = _rows_agree(made, weight, scales, stored.minimums is not None, device)
                self.rows_agree &= tried[kind]

    def laid_out(self, name: str, value: Tensor) -> Tensor:
        """A variable of the stage as `products` reads it."""
        return in_blocks(value) if name in self._in_blocks else value


_LINEAR = frozenset({"fusion.linear_int8", "fusion.linear_int4"})
_EMBEDDING = frozenset({"fusion.embedding_int8", "fusion.embedding_int4"})


def _stored(graph: Graph, node: Node) -> _Stored | None:
    """What a node reads a stored matrix from; None for another one, or where that is not made of variables."""
    if node.op not in _LINEAR | _EMBEDDING:
        return None
    at = 1 if node.op in _LINEAR else 0
    names = [arg.name if isinstance(arg, Ref) else None for arg in node.args[at : at + 3]]
    weight, scales, minimums = names
    if weight is None or scales is None:
        return None
    stored, read = _Stored(weight, scales, minimums), [ref.name for ref in node.refs()]
    once = all(read.count(name) == 1 for name in stored.names)
    return stored if once and graph.variable_names.issuperset(stored.names) else None


def _columns(weight: TensorType) -> int:
    """Of the matrix that a stored one stands for."""
    return plain(weight.shape[1]) * (1 if weight.dtype == "int8" else 2)


def _rows_agree(
    made: InBlocks | None, weight: TensorType, scales: TensorType, minimums: bool, device: torch.device
) -> bool:
    """`rows_agree` for a random matrix of this type, or a tile of it."""
    chance = torch.Generator().manual_seed(0)
    held, groups, columns = plain(weight.shape[1]), plain(scales.shape[1]), _columns(weight)
    rows = min(plain(weight.shape[0]), max(1, TILE_ELEMENTS // columns))
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
