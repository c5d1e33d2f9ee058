"""Products of rows with matrices quantised to int8 or int4, in Triton: each weight is read once, without dequantising to memory.

Batch-invariant: the columns are split into spans, and the spans reduced, in an order that depends on the matrix alone. Weights of 8
bits are exact in half precision, and a float32 row is split into three bfloat16 ones, so that tensor cores give float32 precision.
Scales and minimums are applied to the sums over their columns. Tile sizes are those that `tests/bench/quantised.py --device cuda`
was fastest with on an H200.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32  # of a tile: the batch size of single positions
OUTPUTS = 64  # of a tile: as many as Hopper's tensor cores take
_COLUMNS = 64  # of a tile, at most; they share a scale
_MIN_COLUMNS = 16  # of a tile, for tensor cores
SPAN = 512  # columns reduced by themselves
_FULL_GPU_PROGRAMS = 512  # programs that occupy a GPU
_ELEMENTS_PER_PROGRAM = 1024  # of `_split_rows` and `_reduce_spans`


def supports(columns: int, groups: int) -> bool:
    """Whether `linear` supports a matrix of `columns` in `groups`."""
    return columns_per_step(columns // groups) >= _MIN_COLUMNS


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
    step_columns = columns_per_step(group)
    parts, sums = split_rows(flat, step_columns, minimums is not None)
    output = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    row_tiles, output_tiles = triton.cdiv(count, ROWS), triton.cdiv(outputs, OUTPUTS)
    spans = triton.cdiv(columns, SPAN)
    # Split-K: few rows of a small matrix leave most of a GPU idle, unless each span has a program of its own.
    split = spans > 1 and row_tiles == 1 and output_tiles <= _FULL_GPU_PROGRAMS
    partial_sums = torch.empty(spans, count, outputs, device=rows.device) if split else output
    _multiply[row_tiles, output_tiles, spans if split else 1](
        *(parts, parts.stride(0), sums, weight, scales, minimums, None if split else bias, partial_sums),
        *(count, outputs, columns, group, 1 if split else spans),
        PARTS=parts.shape[0],
        PACKED=weight.dtype == torch.uint8,
        SPAN=SPAN,
        COLUMNS=step_columns,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        num_warps=4,
        num_stages=4,
    )
    if split:
        programs = triton.cdiv(count * outputs, _ELEMENTS_PER_PROGRAM)
        _reduce_spans[programs,](
            partial_sums, bias, output, count * outputs, outputs, spans, SIZE=_ELEMENTS_PER_PROGRAM
        )
    return output.view(*rows.shape[:-1], outputs)


def columns_per_step(group: int) -> int:
    """The largest power of two that divides a group, up to _COLUMNS."""
    return min(_COLUMNS, group & -group)


def split_rows(
    rows: torch.Tensor, step_columns: int, with_sums: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split rows (count, columns) into (parts, count, columns) in half precision, whose sum they are. `with_sums`: also return the sums
    (columns / step_columns, count) over steps of columns."""
    count, columns = rows.shape
    half = rows.dtype != torch.float32
    if half and not with_sums:
        return rows[None], None
    parts = rows[None] if half else torch.empty(3, count, columns, dtype=torch.bfloat16, device=rows.device)
    sums = torch.empty(columns // step_columns, count, device=rows.device) if with_sums else None
    grid = count, triton.cdiv(columns, _ELEMENTS_PER_PROGRAM)
    _split_rows[grid](
        *(rows, parts, parts.stride(0), sums, count, columns),
        HALF=half,
        STEP=step_columns,
        COLUMNS=_ELEMENTS_PER_PROGRAM,
    )
    return parts, sums


@triton.jit
def _split_rows(
    rows, parts, part_stride, sums, count, columns,
    HALF: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    element = row * columns + column
    value = tl.load(rows + element, mask=mask, other=0.0).to(tl.float32)
    if not HALF:
        high = value.to(tl.bfloat16)
        rest = value - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = rest - middle.to(tl.float32)
        tl.store(parts + element, high, mask=mask)
        tl.store(parts + part_stride + element, middle, mask=mask)
        tl.store(parts + 2 * part_stride + element, low.to(tl.bfloat16), mask=mask)
    if sums is not None:
        step = tl.program_id(1) * (COLUMNS // STEP) + tl.arange(0, COLUMNS // STEP)
        total = tl.sum(tl.reshape(value, [COLUMNS // STEP, STEP]), 1)
        tl.store(sums + step * count + row, total, mask=step < columns // STEP)


@triton.jit
def _multiply(
    parts, part_stride, sums, weight, scales, minimums, bias, output, count, outputs, columns, group, spans,
    PARTS: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    out = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    first_span = tl.program_id(2)
    row_mask, output_mask = row < count, out < outputs
    total = sum_spans(
        parts, part_stride, sums, weight, scales, minimums, row, row_mask, out, output_mask, first_span, count, columns, group, spans,
        PARTS, PACKED, SPAN, COLUMNS, ROWS, OUTPUTS,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + out, mask=output_mask, other=0.0).to(tl.float32)[:, None]
    pointers = output + (first_span * count + row)[None, :] * outputs + out[:, None]
    tl.store(pointers, total.to(output.dtype.element_ty), mask=row_mask[None, :] & output_mask[:, None])


@triton.jit
def sum_spans(
    parts, part_stride, sums, weight, scales, minimums, row, row_mask, out, output_mask, first_span, count, columns, group, spans,
    PARTS: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """(OUTPUTS, ROWS) float32: the products of the rows `row` with the outputs `out` of one matrix, over `spans` spans from
    `first_span`."""
    column, pair = tl.arange(0, COLUMNS), tl.arange(0, COLUMNS // 2)
    row_pointers = parts + column[:, None] + row[None, :] * columns
    groups = columns // group
    total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for span in range(spans):
        span_total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
        span_start = (first_span + span) * SPAN
        for start in range(0, SPAN, COLUMNS):
            first_column = span_start + start
            inside = first_column < columns
            weight_mask = output_mask & inside
            if PACKED:
                weight_pointers = weight + out[:, None] * (columns // 2) + (first_column // 2 + pair)[None, :]
                packed = tl.load(weight_pointers, mask=weight_mask[:, None], other=0)
                weights = tl.interleave(packed & 15, packed >> 4).to(tl.int8)
                if minimums is None:
                    weights -= 8
            else:
                weight_pointers = weight + out[:, None] * columns + (first_column + column)[None, :]
                weights = tl.load(weight_pointers, mask=weight_mask[:, None], other=0)
            matrix = weights.to(parts.dtype.element_ty)
            product = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
            for part in tl.static_range(PARTS - 1, -1, -1):  # smallest first
                row_part = tl.load(
                    row_pointers + part * part_stride + first_column,
                    mask=(row_mask & inside)[None, :],
                    other=0.0,
                )
                product = tl.dot(matrix, row_part, product)
            group_index = out * groups + first_column // group
            scale = tl.load(scales + group_index, mask=weight_mask, other=0.0).to(tl.float32)
            span_total += product * scale[:, None]
            if minimums is not None:
                minimum = tl.load(minimums + group_index, mask=weight_mask, other=0.0).to(tl.float32)
                input_sum = tl.load(
                    sums + (first_column // COLUMNS) * count + row, mask=row_mask & inside, other=0.0
                )
                span_total += minimum[:, None] * input_sum[None, :]
        total += span_total
    return total


@triton.jit
def _reduce_spans(partial_sums, bias, output, count, outputs, spans, SIZE: tl.constexpr):
    """Add the spans in the order of `sum_spans`, so that the bits are the same."""
    element = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = element < count
    total = tl.zeros([SIZE], dtype=tl.float32)
    for span in range(spans):
        total += tl.load(partial_sums + span * count + element, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + element % outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + element, total.to(output.dtype.element_ty), mask=mask)
