"""Products of rows with matrices that are stored as int8 or int4, in Triton: each number is read once, in the bytes that it has.

A row has the same bits in any company. Numbers of 8 bits are exact in bfloat16, and a row of float32 is the sum of three such, so
that tensor cores count as exactly as float32 does; scales and minimums are applied to the sums of their groups.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 32  # of one program: as many as single positions are run together
_OUTPUTS = 32  # of one program
_COLUMNS = 128  # of a group at once, at most
_WIDEST = 256  # group, as code is made for each size
_LEAST = 16  # columns, of bfloat16, that tensor cores take


def multiplies(columns: int, groups: int, packed: bool) -> bool:
    """Whether there is code for a matrix of so many columns, in so many groups; `packed`: two numbers in a byte."""
    group = columns // groups
    at_once = _at_once(group)
    return group <= _WIDEST and at_once // (2 if packed else 1) >= _LEAST


def linear(
    rows: torch.Tensor,  # (..., columns)
    weight: torch.Tensor,  # (out, columns) int8, or (out, columns / 2) uint8
    scales: torch.Tensor,  # (out, groups)
    minimums: torch.Tensor | None,
    bias: torch.Tensor | None,  # (out,)
) -> torch.Tensor:
    """`fusion.linear_int8` and `fusion.linear_int4`: (..., out), in the dtype of the rows."""
    columns, outputs = rows.shape[-1], weight.shape[0]
    flat = rows.reshape(-1, columns).contiguous()
    made = torch.empty(flat.shape[0], outputs, dtype=rows.dtype, device=rows.device)
    grid = triton.cdiv(flat.shape[0], _ROWS), triton.cdiv(outputs, _OUTPUTS)
    group = columns // scales.shape[1]
    _multiply[grid](
        *(flat, weight, scales, minimums, bias, made, flat.shape[0], outputs, columns),
        PACKED=weight.dtype == torch.uint8,
        GROUP=group,
        COLUMNS=_at_once(group),
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
    )
    return made.view(*rows.shape[:-1], outputs)


def _at_once(group: int) -> int:
    """The largest power of two that divides a group, up to _COLUMNS."""
    return min(_COLUMNS, group & -group)


@triton.jit
def _product(given, numbers):
    """(rows, columns) with (outputs, columns) of whole numbers below 2**8: (rows, outputs) float32."""
    matrix = tl.trans(numbers.to(tl.bfloat16))
    if given.dtype == tl.bfloat16:
        return tl.dot(given, matrix)
    given = given.to(tl.float32)
    high = given.to(tl.bfloat16)
    rest = given - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(low, matrix) + tl.dot(middle, matrix) + tl.dot(high, matrix)


@triton.jit
def _multiply(
    rows, weight, scales, minimums, bias, made, count, outputs, columns,
    PACKED: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    line = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    out = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    there, held = line < count, out < outputs
    groups = columns // GROUP
    found = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for group in range(groups):
        total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        summed = tl.zeros([ROWS], dtype=tl.float32)
        for start in tl.static_range(0, GROUP, COLUMNS):
            first = group * GROUP + start
            if PACKED:
                pair = tl.arange(0, COLUMNS // 2)
                at = weight + out[:, None] * (columns // 2) + (first // 2 + pair)[None, :]
                both = tl.load(at, mask=held[:, None], other=0)
                even = rows + line[:, None] * columns + (first + 2 * pair)[None, :]
                left = tl.load(even, mask=there[:, None], other=0.0)
                right = tl.load(even + 1, mask=there[:, None], other=0.0)
                small, large = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
                if minimums is None:
                    small, large = small - 8.0, large - 8.0
                total += _product(left, small) + _product(right, large)
                if minimums is not None:
                    summed += tl.sum(left.to(tl.float32), 1) + tl.sum(right.to(tl.float32), 1)
            else:
                column = first + tl.arange(0, COLUMNS)
                numbers = tl.load(
                    weight + out[:, None] * columns + column[None, :], mask=held[:, None], other=0
                )
                given = tl.load(
                    rows + line[:, None] * columns + column[None, :], mask=there[:, None], other=0.0
                )
                total += _product(given, numbers.to(tl.float32))
                if minimums is not None:
                    summed += tl.sum(given.to(tl.float32), 1)
        share = tl.load(scales + out * groups + group, mask=held, other=0.0).to(tl.float32)
        found += total * share[None, :]
        if minimums is not None:
            least = tl.load(minimums + out * groups + group, mask=held, other=0.0).to(tl.float32)
            found += summed[:, None] * least[None, :]
    if bias is not None:
        found += tl.load(bias + out, mask=held, other=0.0).to(tl.float32)[None, :]
    place = made + line[:, None] * outputs + out[None, :]
    tl.store(place, found.to(made.dtype.element_ty), mask=there[:, None] & held[None, :])
