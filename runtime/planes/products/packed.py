"""Batch-invariant products of rows with a matrix, for decoding: the bits of a row do not depend on the rows beside it.

Whoever decodes in a batch must get the bits that it gets alone. Matrices in float32 are laid out in blocks for code of our own
(`packed_code`), for which that holds from one row on. Where there is no such code, a library's products are used: they take another way for one row
than for several, so there are always a few (`padded`); above one, a row's bits were the same however many rows there were, and
where, on every machine that we have seen. `rows_agree` looks whether that holds here.

In half precision a library without instructions for it takes row after row, each by itself: then a row's product has the bits
of a run of one, which are those of any program that decodes, and nothing is padded or packed (`rows_agree` from one row on).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.runtime.planes.products.machine_code import LANES, Function, over_blocks
from fusion.runtime.planes.products.packed_code import product

FEW_ROWS = 4  # at least, where a product of one row goes another way
_LANE_BITS = LANES.bit_length() - 1
_TRIED_ROWS = (1, 2, 3, FEW_ROWS, 5, 6, 8, 12, 16, 24, 40)


def padded(rows: int, parts: int = 4, least: int = FEW_ROWS) -> int:
    """How many rows are run for `rows`: as they are where products agree from one row on (`least` 1); else four at least, and
    only so many counts between one power of two and the next, because the library makes code for each count that it meets,
    which takes milliseconds."""
    if least == 1:
        return rows
    step = max(2, (1 << (rows - 1).bit_length()) // (2 * parts))
    return max(least, -(-rows // step) * step)


def packable(graph: Graph) -> dict[str, bool]:
    """The variables that are read as the matrix of `aten.linear`, perhaps as the table of `aten.embedding` too, or as the matrix
    of `aten.addmm` (True: its matrix is stored the other way round), and as nothing else."""
    read: dict[str, set[str | None]] = {}
    for node in graph.nodes:
        for ref in node.refs():
            read.setdefault(ref.name, set()).add(_use(graph, node, ref))
    for ref in graph.outputs:
        read.setdefault(ref.name, set()).add(None)
    ways = {name: uses - {"aten.embedding"} for name, uses in read.items() if name in graph.variable_names}
    return {
        name: use == {"aten.addmm"}
        for name, use in ways.items()
        if use == {"aten.linear"} or (use == {"aten.addmm"} and read[name] == use)
    }


def _use(graph: Graph, node: Node, ref: Ref) -> str | None:
    """The operator that reads a value as a matrix, or as a table; None for any other use."""
    match node.op, *node.args:
        case "aten.linear", given, matrix, bias if ref == matrix and ref not in (given, bias):
            return node.op
        case "aten.embedding", table, indices, *_ if ref == table and ref != indices:
            return node.op
        case "aten.addmm", Ref() as bias, given, matrix, 1, 1 if ref == matrix and ref not in (bias, given):
            return node.op if len(graph.types[bias].shape) == 1 else None
    return None


def in_blocks(stored: torch.Tensor) -> torch.Tensor:
    """(rows, n) as (blocks, n, 16): the last block filled up with zeros."""
    rows, width = stored.shape
    whole, rest = divmod(rows, LANES)
    made = stored.new_empty(whole + bool(rest), width, LANES)
    made[:whole] = stored[: rows - rest].view(whole, LANES, width).transpose(1, 2)
    if rest:
        made[whole, :, :rest] = stored[rows - rest :].t()
        made[whole, :, rest:] = 0
    return made


def filling(rows: int) -> int:
    """How many rows of zeros `in_blocks` adds."""
    return -rows % LANES


def places(ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows `ids` (n,) of a matrix of so many rows lie: their blocks, and their lanes there. IndexError for one that it
    does not have."""
    # One pass over what is a handful, where a reduction of a tensor costs more than all else here
    found = ids.tolist()
    if found and not 0 <= min(found) <= max(found) < rows:
        raise IndexError(f"a row of a table of {rows} rows that it does not have")
    return ids >> _LANE_BITS, ids & LANES - 1


def multiplied(
    code: Function,
    rows: torch.Tensor,
    stored: Sequence[int],
    blocks: int,
    outputs: int,
    sizes: Sequence[int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """rows (..., columns), float32, with the matrix of so many `outputs` and `blocks` at the addresses `stored`: (..., outputs).
    `sizes`: as `code` takes them. The caller has checked that the rows are as wide as the matrix: the code would read
    beyond them."""
    *outer, columns = rows.shape
    given = rows.contiguous()
    count, width = given.numel() // columns, blocks * LANES
    found = torch.empty((*outer, width))
    over_blocks(
        code,
        (given.data_ptr(), *stored, found.data_ptr()),
        blocks,
        (count, *sizes, width),
        products=count * width * columns,
        threads=torch.get_num_threads(),
    )
    if width != outputs:
        found = found[..., :outputs].contiguous()
    if bias is not None:
        found += bias
    return found


@dataclass(frozen=True)
class Packed:
    """A matrix (rows, columns) of float32 in blocks."""

    blocks: torch.Tensor
    rows: int


def pack(matrix: torch.Tensor) -> Packed | None:
    """(out, in) for `linear`; None where it cannot be packed here."""
    if matrix.device.type != "cpu" or matrix.dtype != torch.float32 or matrix.dim() != 2 or _code() is None:
        return None
    return Packed(in_blocks(matrix), matrix.shape[0])


def linear(rows: torch.Tensor, matrix: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """rows (..., in) with a packed (out, in): (..., out)."""
    code = _code()
    assert code is not None
    return _product(code, rows, matrix, bias)


def _product(code: Function, rows: torch.Tensor, matrix: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    blocks, columns, _ = matrix.blocks.shape
    if rows.shape[-1] != columns or rows.dtype != torch.float32:  # the code would read beyond the rows
        raise ValueError(
            f"rows {tuple(rows.shape)} {rows.dtype} for a matrix of {columns} columns of float32"
        )
    return multiplied(code, rows, (matrix.blocks.data_ptr(),), blocks, matrix.rows, (columns,), bias)


@cache
def _code() -> Function | None:
    """The machine code, where there is some and it does what it should."""
    code = product()
    if code is None:
        return None
    made = torch.Generator().manual_seed(0)
    matrix = torch.randn(100, 72, generator=made)
    held = Packed(in_blocks(matrix), len(matrix))
    return code if rows_agree(lambda rows: _product(code, rows, held, None), 72, matrix, least=1) else None


def addmm(bias: torch.Tensor, rows: torch.Tensor, matrix: Packed, *_: object) -> torch.Tensor:
    """`aten.addmm` with beta and alpha 1 and a packed matrix."""
    return linear(rows, matrix, bias)


def embedding(table: Packed, ids: torch.Tensor, *_: object) -> torch.Tensor:
    """`aten.embedding` with a packed table."""
    block, lane = places(ids.flatten(), table.rows)
    return table.blocks[block, :, lane].view(*ids.shape, -1)


def row_by_row(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`aten.linear` for a matrix that is not packed, such as one that is an embedding as well: each row by itself."""
    width = rows.shape[-1]
    found = [torch._C._nn.linear(row, matrix, bias) for row in rows.reshape(-1, 1, width)]
    return torch.cat(found).view(*rows.shape[:-1], matrix.shape[0])


def rows_agree(
    product: Callable[[torch.Tensor], torch.Tensor], width: int, like: torch.Tensor, least: int = FEW_ROWS
) -> bool:
    """Whether a row's product has the same bits among others as among `least`. `like`: dtype and device of the rows."""
    made = torch.Generator().manual_seed(0)
    most = _TRIED_ROWS[-1]
    rows = torch.randn(1, most, width, generator=made).to(like.device, like.dtype)
    order = torch.randperm(most, generator=made)
    whole = product(rows)
    return torch.equal(product(rows[:, order]), whole[:, order]) and all(
        torch.equal(product(rows[:, :count]), whole[:, :count])
        for count in _TRIED_ROWS[:-1]
        if count >= least
    )
