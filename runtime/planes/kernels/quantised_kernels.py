"""Products of rows with matrices that are stored as int8 or int4, in Triton: each number is read once, in the bytes that it has.

A row has the same bits in any company: what is summed up by itself, and in which order that is added, depends on the matrix
alone. Numbers of 8 bits are exact in half precision, and a row of float32 is the sum of three of bfloat16, so that tensor
cores count as exactly as float32 does; scales and minimums are applied to the sums of their columns. Sizes are those that
`tests/bench/quantised.py --device cuda` was fastest with on an H200.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32  # of one program: as many as single positions are run together
OUTPUTS = 64  # of one program: as many as Hopper's tensor cores take
_COLUMNS = 64  # of one scale that are multiplied at once, at most
_LEAST = 16  # of them that tensor cores take
SPAN = 512  # columns that are summed up by themselves
_FULL = 512  # programs that give all of a GPU work
_SPLIT = 1024  # columns of one program that splits rows, sums of one that adds


def multiplies(columns: int, groups: int) -> bool:
    """Whether there is code for a matrix of so many columns, in so many groups."""
    return at_once_of(columns // groups) >= _LEAST


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
    count, group = flat.shape[0], columns // scales.shape[1]
    at_once = at_once_of(group)
    parts, sums = parts_of(flat, at_once, minimums is not None)
    made = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    lines, tiles = triton.cdiv(count, ROWS), triton.cdiv(outputs, OUTPUTS)
    spans = triton.cdiv(columns, SPAN)
    # Few rows of a small matrix leave most of a GPU without work, unless each span has a program of its own.
    apart = spans > 1 and lines == 1 and tiles <= _FULL
    found = torch.empty(spans, count, outputs, device=rows.device) if apart else made
    _multiply[lines, tiles, spans if apart else 1](
        *(parts, parts.stride(0), sums, weight, scales, minimums, None if apart else bias, found),
        *(count, outputs, columns, group, 1 if apart else spans),
        PARTS=parts.shape[0],
        PACKED=weight.dtype == torch.uint8,
        SPAN=SPAN,
        COLUMNS=at_once,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        num_warps=4,
        num_stages=4,
    )
    if apart:
        programs = triton.cdiv(count * outputs, _SPLIT)
        _add[programs,](found, bias, made, count * outputs, outputs, spans, ADDED=_SPLIT)
    return made.view(*rows.shape[:-1], outputs)


def at_once_of(group: int) -> int:
    """The largest power of two that divides a group, up to _COLUMNS."""
    return min(_COLUMNS, group & -group)


def parts_of(rows: torch.Tensor, at_once: int, summed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows (count, columns) as (parts, count, columns) in half precision, whose sum they are; and, where they are wanted, the
    sums (columns / at_once, count) of so many columns of each."""
    count, columns = rows.shape
    half = rows.dtype != torch.float32
    if half and not summed:
        return rows[None], None
    parts = rows[None] if half else torch.empty(3, count, columns, dtype=torch.bfloat16, device=rows.device)
    sums = torch.empty(columns // at_once, count, device=rows.device) if summed else None
    grid = count, triton.cdiv(columns, _SPLIT)
    _split[grid](
        *(rows, parts, parts.stride(0), sums, count, columns), HALF=half, AT_ONCE=at_once, COLUMNS=_SPLIT
    )
    return parts, sums


@triton.jit
def _split(
    rows, parts, apart, sums, count, columns,
    HALF: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    place = line * columns + column
    given = tl.load(rows + place, mask=there, other=0.0).to(tl.float32)
    if not HALF:
        high = given.to(tl.bfloat16)
        rest = given - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = rest - middle.to(tl.float32)
        tl.store(parts + place, high, mask=there)
        tl.store(parts + apart + place, middle, mask=there)
        tl.store(parts + 2 * apart + place, low.to(tl.bfloat16), mask=there)
    if sums is not None:
        unit = tl.program_id(1) * (COLUMNS // AT_ONCE) + tl.arange(0, COLUMNS // AT_ONCE)
        total = tl.sum(tl.reshape(given, [COLUMNS // AT_ONCE, AT_ONCE]), 1)
        tl.store(sums + unit * count + line, total, mask=unit < columns // AT_ONCE)


@triton.jit
def _multiply(
    parts, apart, sums, weight, scales, minimums, bias, made, count, outputs, columns, group, spans,
    PARTS: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    line = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    out = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    own = tl.program_id(2)
    there, held = line < count, out < outputs
    found = sum_of_spans(
        parts, apart, sums, weight, scales, minimums, line, there, out, held, own, count, columns, group, spans,
        PARTS, PACKED, SPAN, COLUMNS, ROWS, OUTPUTS,
    )  # fmt: skip
    if bias is not None:
        found += tl.load(bias + out, mask=held, other=0.0).to(tl.float32)[:, None]
    place = made + (own * count + line)[None, :] * outputs + out[:, None]
    tl.store(place, found.to(made.dtype.element_ty), mask=there[None, :] & held[:, None])


@triton.jit
def sum_of_spans(
    parts, apart, sums, weight, scales, minimums, line, there, out, held, own, count, columns, group, spans,
    PARTS: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """(OUTPUTS, ROWS) float32: so many spans from `own` on of the products of one matrix's outputs `out` with the rows `line`."""
    column, pair = tl.arange(0, COLUMNS), tl.arange(0, COLUMNS // 2)
    given = parts + column[:, None] + line[None, :] * columns
    groups = columns // group
    found = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for span in range(spans):
        total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
        begin = (own + span) * SPAN
        for start in range(0, SPAN, COLUMNS):
            first = begin + start
            inside = first < columns
            known = held & inside
            if PACKED:
                at = weight + out[:, None] * (columns // 2) + (first // 2 + pair)[None, :]
                both = tl.load(at, mask=known[:, None], other=0)
                numbers = tl.interleave(both & 15, both >> 4).to(tl.int8)
                if minimums is None:
                    numbers -= 8
            else:
                at = weight + out[:, None] * columns + (first + column)[None, :]
                numbers = tl.load(at, mask=known[:, None], other=0)
            matrix = numbers.to(parts.dtype.element_ty)
            product = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
            for part in tl.static_range(PARTS - 1, -1, -1):  # the smallest first
                row = tl.load(given + part * apart + first, mask=(there & inside)[None, :], other=0.0)
                product = tl.dot(matrix, row, product)
            place = out * groups + first // group
            scale = tl.load(scales + place, mask=known, other=0.0).to(tl.float32)
            total += product * scale[:, None]
            if minimums is not None:
                least = tl.load(minimums + place, mask=known, other=0.0).to(tl.float32)
                summed = tl.load(sums + (first // COLUMNS) * count + line, mask=there & inside, other=0.0)
                total += least[:, None] * summed[None, :]
        found += total
    return found


@triton.jit
def _add(found, bias, made, count, outputs, spans, ADDED: tl.constexpr):
    """As `sum_of_spans` adds span after span, so that a row has the same bits."""
    at = tl.program_id(0).to(tl.int64) * ADDED + tl.arange(0, ADDED)
    there = at < count
    total = tl.zeros([ADDED], dtype=tl.float32)
    for span in range(spans):
        total += tl.load(found + span * count + at, mask=there, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % outputs, mask=there, other=0.0).to(tl.float32)
    tl.store(made + at, total.to(made.dtype.element_ty), mask=there)
