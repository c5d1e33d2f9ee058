"""Products of rows with the matrix that each has chosen, in Triton: which experts have rows only the device needs to know.

A row has the same bits in any company. A matrix that nobody has chosen is not read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _OUTPUTS, _COLUMNS = 32, 32, 64  # of one program at once


def expert_linear(
    rows: torch.Tensor,  # (rows, in)
    ids: torch.Tensor,  # (rows,)
    weight: torch.Tensor,  # (held, out, in), or (held, in, out) if transposed
    bias: torch.Tensor | None,  # (held, out)
    first: int,
    of: int,
    transposed: bool,
) -> torch.Tensor:
    """`fusion.expert_linear`: (rows, out); zeros for a row whose expert is not held here."""
    held, outputs, columns = weight.shape if not transposed else (weight.shape[0], *weight.shape[:0:-1])
    rows = rows.contiguous()
    order, bounds = _groups(ids, first, held)
    made = torch.zeros(rows.shape[0], outputs, dtype=rows.dtype, device=rows.device)
    steps = weight.stride() if not transposed else (weight.stride(0), weight.stride(2), weight.stride(1))
    _multiply[triton.cdiv(outputs, _OUTPUTS), held](
        *(rows, order, bounds, weight, None, None, bias, made, outputs, columns, columns, *steps),
        PACKED=False,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        COLUMNS=_COLUMNS,
    )
    return made


def stored_expert_linear(
    rows: torch.Tensor,  # (rows, in)
    ids: torch.Tensor,  # (rows,)
    weight: torch.Tensor,  # (held, out, in) int8, or (held, out, in / 2) uint8
    scales: torch.Tensor,  # (held, out, groups)
    minimums: torch.Tensor | None,
    bias: torch.Tensor | None,  # (held, out)
    first: int,
    of: int,
) -> torch.Tensor:
    """`fusion.expert_linear_int8` and `_int4`: (rows, out); zeros for a row whose expert is not held here."""
    held, outputs, groups = scales.shape
    rows = rows.contiguous()
    columns = rows.shape[1]
    order, bounds = _groups(ids, first, held)
    made = torch.zeros(rows.shape[0], outputs, dtype=rows.dtype, device=rows.device)
    _multiply[triton.cdiv(outputs, _OUTPUTS), held](
        *(rows, order, bounds, weight, scales, minimums, bias, made),
        *(outputs, columns, columns // groups, *weight.stride()),
        PACKED=weight.dtype == torch.uint8,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        COLUMNS=_COLUMNS,
    )
    return made


def _groups(ids: torch.Tensor, first: int, held: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in the order of their experts, and where those of each that is held begin and end."""
    by_expert, order = torch.sort(ids, stable=True)
    return order, torch.searchsorted(by_expert, torch.arange(first, first + held + 1, device=ids.device))


@triton.jit
def _multiply(
    rows, order, bounds, weight, scales, minimums, bias, made,
    outputs, columns, group, expert_step, output_step, column_step,
    PACKED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Without `scales` the weights are floats; else numbers that become floats as they are read. PACKED: two of them a byte."""
    expert = tl.program_id(1).to(tl.int64)
    start, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    out = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    held = out < outputs
    matrix = weight + expert * expert_step + out[:, None] * output_step
    for base in range(start, end, ROWS):
        place = base + tl.arange(0, ROWS)
        there = place < end
        line = tl.load(order + place, mask=there, other=0)
        found = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        for begin in range(0, columns, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = (column < columns)[None, :]
            given = tl.load(
                rows + line[:, None] * columns + column[None, :], mask=there[:, None] & inside, other=0.0
            )
            byte, known = column // 2 if PACKED else column, held[:, None] & inside
            numbers = tl.load(matrix + byte[None, :] * column_step, mask=known, other=0)
            if scales is not None:
                given = given.to(tl.float32)
                if PACKED:
                    numbers = (numbers.to(tl.int32) >> ((column % 2) * 4)[None, :]) & 15
                    if minimums is None:
                        numbers -= 8
                share = (expert * outputs + out[:, None]) * (columns // group) + (column // group)[None, :]
                numbers = numbers.to(tl.float32) * tl.load(scales + share, mask=known, other=0.0).to(
                    tl.float32
                )
                if minimums is not None:
                    numbers += tl.load(minimums + share, mask=known, other=0.0).to(tl.float32)
            found += tl.dot(given, tl.trans(numbers), input_precision="ieee")
        if bias is not None:
            found += tl.load(bias + expert * outputs + out, mask=held, other=0.0).to(tl.float32)[None, :]
        at = made + line[:, None] * outputs + out[None, :]
        tl.store(at, found.to(made.dtype.element_ty), mask=there[:, None] & held[None, :])
