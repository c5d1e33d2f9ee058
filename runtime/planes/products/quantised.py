"""Products and look-ups of matrices that are stored as int8 or int4 (`fusion.dag.ir.opset_quantised`).

Where LLVM makes code for this machine (`quantised_code`), a matrix is laid out for that when a stage is loaded, in the bytes
that it has (`stored`); on CUDA Triton reads it as it is (`fusion.runtime.planes.kernels.quantised_kernels`); elsewhere tiles of it become float32
as they are needed. All count as exactly as float32 does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from fusion.runtime.planes.products.machine_code import LANES, Function
from fusion.runtime.planes.products.packed import multiplied, places

Tensor = torch.Tensor

TILE_ELEMENTS = 1 << 22  # of a matrix, that are float32 at once
SLAB_ROWS = 16  # of every product: by how many there are, a library chooses its way, and so a row's bits
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
