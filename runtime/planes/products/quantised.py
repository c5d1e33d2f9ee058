"""Products and look-ups of matrices that are stored as int8 or int4 (`fusion.dag.ir.opset_quantised`).

Where this machine has machine code for it (`quantised_code`), a matrix is packed when a stage is loaded and keeps its size
(`quantised_matrices`). On CUDA, Triton kernels read it as it is stored (`fusion.runtime.planes.kernels.quantised_kernels`). Elsewhere
tiles of it are dequantised to float32 as they are needed. All accumulate in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from fusion.runtime.planes.products.machine_code import LANES, Function
from fusion.runtime.planes.products.packed import blocks_and_lanes, multiply_blocks

Tensor = torch.Tensor

TILE_ELEMENTS = 1 << 22  # of a matrix that are dequantised at once
SLAB_ROWS = 16  # of every product: the library chooses a kernel, and so a row's bits, by the number of rows
_ZERO_POINT = 8  # of weights of 4 bits without a minimum


# --- any device


def dequantised(weight: Tensor, scales: Tensor, minimums: Tensor | None) -> Tensor:
    """Dequantise to (rows, columns) float32. `weight`: (rows, columns) int8 or (rows, columns / 2) uint8; scales, minimums: (rows,
    groups)."""
    if weight.dtype == torch.uint8:
        numbers = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).float()
        if minimums is None:
            numbers -= _ZERO_POINT
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
    """(..., out): the product of rows (..., in) with a quantised matrix (out, in), dequantised a tile at a time."""
    flat = rows.reshape(-1, rows.shape[-1]).float()
    count, columns = flat.shape
    padded = functional.pad(flat, (0, 0, 0, -count % SLAB_ROWS))
    slabs = padded.view(-(-count // SLAB_ROWS), SLAB_ROWS, columns)
    output = flat.new_empty(*slabs.shape[:2], weight.shape[0])
    tile_size = max(1, TILE_ELEMENTS // columns)
    for at in range(0, weight.shape[0], tile_size):
        tile_rows = slice(at, at + tile_size)
        matrix = dequantised(
            weight[tile_rows], scales[tile_rows], None if minimums is None else minimums[tile_rows]
        ).t()
        for slab, slab_output in zip(slabs, output, strict=True):
            slab_output[:, tile_rows] = torch.mm(slab, matrix)
    output = output.flatten(0, 1)[:count]
    if bias is not None:
        output = output + bias.float()
    return output.to(rows.dtype).view(*rows.shape[:-1], weight.shape[0])


def embedding(
    weight: Tensor, scales: Tensor, minimums: Tensor | None, ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """(..., columns): the dequantised rows `ids` (...)."""
    rows = ids.flatten()
    parts = [None if part is None else part.index_select(0, rows) for part in (weight, scales, minimums)]
    row_weights, row_scales, row_minimums = parts
    assert row_weights is not None and row_scales is not None
    return dequantised(row_weights, row_scales, row_minimums).to(dtype).view(*ids.shape, -1)


# --- packed for machine code


@dataclass(frozen=True)
class InBlocks:
    """The same operators for a quantised matrix (rows, columns) with `groups` groups in a row, whose tensors are packed by `in_blocks`."""

    code: Function
    rows: int
    columns: int
    groups: int

    def linear(
        self, rows: Tensor, weight: Tensor, scales: Tensor, minimums: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if rows.shape[-1] != self.columns:  # the code would read beyond the rows
            raise ValueError(f"rows {tuple(rows.shape)} for a stored matrix of {self.columns} columns")
        minimums_address = 0 if minimums is None else minimums.data_ptr()
        output = multiply_blocks(
            self.code,
            rows.float(),
            (weight.data_ptr(), scales.data_ptr(), minimums_address),
            -(-self.rows // LANES),
            self.rows,
            (self.groups, self.columns // self.groups),
            None if bias is None else bias.float(),
        )
        return output if rows.dtype == torch.float32 else output.to(rows.dtype)

    def embedding(
        self, weight: Tensor, scales: Tensor, minimums: Tensor | None, ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        block, lane = blocks_and_lanes(ids.flatten(), self.rows)
        row_weights, row_scales = weight[block, :, lane], scales[block, :, lane]
        row_minimums = None if minimums is None else minimums[block, :, lane]
        return dequantised(row_weights, row_scales, row_minimums).to(dtype).view(*ids.shape, self.columns)
