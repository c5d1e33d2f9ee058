"""Batch-invariant products of rows with a float32 matrix, for decoding: a row's bits do not depend on the rest of its batch.

Matrices are packed in blocks for machine code (`packed_code`), which is batch-invariant from one row on. Where a machine has no such
code, the library's products are used. These run another kernel for one row (GEMV) than for several (GEMM), so products have a few rows
at least (`padded_rows`). From there on a row's bits were the same for any number of rows and any place among them, on every machine
that we have seen; `is_batch_invariant` tests whether that holds here.

In half precision a library without instructions for it multiplies row by row: then a row has the bits of a product of one row, and
nothing is padded or packed (`fusion.runtime.planes.products.half`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.runtime.planes.products.machine_code import LANES, Function, run_blocks
from fusion.runtime.planes.products.packed_code import product

MIN_ROWS = 4  # of a product, where the library runs another kernel for one row
_LANE_BITS = LANES.bit_length() - 1
_TRIAL_ROWS = (1, 2, 3, MIN_ROWS, 5, 6, 8, 12, 16, 24, 40)


def padded_rows(rows: int, parts: int = 4, min_rows: int = MIN_ROWS) -> int:
    """How many rows to run for `rows`: just these where products are batch-invariant from one row on (`min_rows` 1). Else at least
    `min_rows`, and only `parts` counts between one power of two and the next: the library compiles a kernel for each count, which takes
    milliseconds."""
    if min_rows == 1:
        return rows
    step = max(2, (1 << (rows - 1).bit_length()) // (2 * parts))
    return max(min_rows, -(-rows // step) * step)


def packable(graph: Graph) -> dict[str, bool]:
    """The variables that are read as the matrix of `aten.linear`, perhaps also as the table of `aten.embedding` (False), or as the matrix
    of `aten.addmm`, which is stored transposed (True), and as nothing else."""
    uses_by_name: dict[str, set[str | None]] = {}
    for node in graph.nodes:
        for ref in node.refs():
            uses_by_name.setdefault(ref.name, set()).add(_matrix_use(graph, node, ref))
    for ref in graph.outputs:
        uses_by_name.setdefault(ref.name, set()).add(None)
    matrix_uses = {
        name: uses - {"aten.embedding"} for name, uses in uses_by_name.items() if name in graph.variable_names
    }
    return {
        name: matrix_use == {"aten.addmm"}
        for name, matrix_use in matrix_uses.items()
        if matrix_use == {"aten.linear"}
        or (matrix_use == {"aten.addmm"} and uses_by_name[name] == matrix_use)
    }


def _matrix_use(graph: Graph, node: Node, ref: Ref) -> str | None:
    """The operator that reads a value as its matrix or table; None for any other use."""
    match node.op, *node.args:
        case "aten.linear", inputs, matrix, bias if ref == matrix and ref not in (inputs, bias):
            return node.op
        case "aten.embedding", table, indices, *_ if ref == table and ref != indices:
            return node.op
        case "aten.addmm", Ref() as bias, inputs, matrix, 1, 1 if ref == matrix and ref not in (bias, inputs):
            return node.op if len(graph.types[bias].shape) == 1 else None
    return None


def in_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Pack (rows, n) as (blocks, n, 16); the last block is padded with zeros."""
    rows, width = matrix.shape
    full, remainder = divmod(rows, LANES)
    blocks = matrix.new_empty(full + bool(remainder), width, LANES)
    blocks[:full] = matrix[: rows - remainder].view(full, LANES, width).transpose(1, 2)
    if remainder:
        blocks[full, :, :remainder] = matrix[rows - remainder :].t()
        blocks[full, :, remainder:] = 0
    return blocks


def padding_rows(rows: int) -> int:
    """The number of rows of zeros that `in_blocks` adds."""
    return -rows % LANES


def blocks_and_lanes(ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks, and the lanes within them, of the rows `ids` (n,) of a packed matrix of `rows` rows. IndexError for ids beyond it."""
    # A list of a few ids: a reduction of a tensor costs more than all else here
    rows_read = ids.tolist()
    if rows_read and not 0 <= min(rows_read) <= max(rows_read) < rows:
        raise IndexError(f"a row of a table of {rows} rows that it does not have")
    return ids >> _LANE_BITS, ids & LANES - 1


def multiply_blocks(
    code: Function,
    rows: torch.Tensor,
    pointers: Sequence[int],
    blocks: int,
    outputs: int,
    sizes: Sequence[int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """(..., outputs): the product of float32 rows (..., columns) with the packed matrix at the addresses `pointers`. `sizes`: further
    arguments of `code`. The caller has checked that the rows are as wide as the matrix; the code would read beyond them."""
    *outer, columns = rows.shape
    inputs = rows.contiguous()
    count, width = inputs.numel() // columns, blocks * LANES
    output = torch.empty((*outer, width))
    run_blocks(
        code,
        (inputs.data_ptr(), *pointers, output.data_ptr()),
        blocks,
        (count, *sizes, width),
        multiply_adds=count * width * columns,
        threads=torch.get_num_threads(),
    )
    if width != outputs:
        output = output[..., :outputs].contiguous()
    if bias is not None:
        output += bias
    return output


@dataclass(frozen=True)
class Packed:
    """A float32 matrix of `rows` rows, packed by `in_blocks`."""

    blocks: torch.Tensor
    rows: int


def pack(matrix: torch.Tensor) -> Packed | None:
    """Pack a matrix (out, in) for `linear`; None where this device or dtype is not supported."""
    if matrix.device.type != "cpu" or matrix.dtype != torch.float32 or matrix.dim() != 2 or _code() is None:
        return None
    return Packed(in_blocks(matrix), matrix.shape[0])


def linear(rows: torch.Tensor, matrix: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """(..., out): the product of rows (..., in) with a packed matrix (out, in)."""
    code = _code()
    assert code is not None
    return _product(code, rows, matrix, bias)


def _product(code: Function, rows: torch.Tensor, matrix: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    blocks, columns, _ = matrix.blocks.shape
    if rows.shape[-1] != columns or rows.dtype != torch.float32:  # the code would read beyond the rows
        raise ValueError(
            f"rows {tuple(rows.shape)} {rows.dtype} for a matrix of {columns} columns of float32"
        )
    return multiply_blocks(code, rows, (matrix.blocks.data_ptr(),), blocks, matrix.rows, (columns,), bias)


@cache
def _code() -> Function | None:
    """The machine code, where this machine is supported and the code passes a test."""
    code = product()
    if code is None:
        return None
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(100, 72, generator=generator)
    packed = Packed(in_blocks(matrix), len(matrix))
    return (
        code
        if is_batch_invariant(lambda rows: _product(code, rows, packed, None), 72, matrix, min_rows=1)
        else None
    )


def addmm(bias: torch.Tensor, rows: torch.Tensor, matrix: Packed, *_: object) -> torch.Tensor:
    """`aten.addmm` with beta and alpha 1 and a packed matrix."""
    return linear(rows, matrix, bias)


def embedding(table: Packed, ids: torch.Tensor, *_: object) -> torch.Tensor:
    """`aten.embedding` with a packed table."""
    block, lane = blocks_and_lanes(ids.flatten(), table.rows)
    return table.blocks[block, :, lane].view(*ids.shape, -1)


def row_by_row(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`aten.linear` for a matrix that is not packed, such as one of another use too: one product a row."""
    width = rows.shape[-1]
    outputs = [torch._C._nn.linear(row, matrix, bias) for row in rows.reshape(-1, 1, width)]
    return torch.cat(outputs).view(*rows.shape[:-1], matrix.shape[0])


def is_batch_invariant(
    product: Callable[[torch.Tensor], torch.Tensor], width: int, like: torch.Tensor, min_rows: int = MIN_ROWS
) -> bool:
    """Whether a row's product has the same bits in any batch of at least `min_rows` rows, tested with random rows of the device and dtype
    of `like`."""
    generator = torch.Generator().manual_seed(0)
    max_rows = _TRIAL_ROWS[-1]
    rows = torch.randn(1, max_rows, width, generator=generator).to(like.device, like.dtype)
    order = torch.randperm(max_rows, generator=generator)
    batched = product(rows)
    return torch.equal(product(rows[:, order]), batched[:, order]) and all(
        torch.equal(product(rows[:, :count]), batched[:, :count])
        for count in _TRIAL_ROWS[:-1]
        if count >= min_rows
    )
