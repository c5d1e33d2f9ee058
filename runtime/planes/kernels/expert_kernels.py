"""Products of rows with the matrix of the expert that each is routed to, in Triton (grouped GEMM). The host does not need to know which
experts have rows.

Batch-invariant: the columns are split into spans, and the spans reduced, in an order that depends on the matrix alone. The matrix of
an expert without rows is not read. Each float32 is split into two TF32 for tensor cores, which is closer to the exact product than
float32 sums in column order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from fusion.runtime.planes.kernels import quantised_kernels as quantised
from fusion.runtime.planes.kernels.quantised_kernels import sum_spans

_ROWS, _OUTPUTS, _COLUMNS = 32, 64, 64  # of a tile
_MAX_PARTIAL_SUMS = 1 << 22  # of all spans: 16 MiB
_SUMS_PER_PROGRAM = 1024  # of `_reduce_spans`


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
    span = _span_columns(columns, _COLUMNS)
    strides = weight.stride() if not transposed else (weight.stride(0), weight.stride(2), weight.stride(1))

    def multiply(output: torch.Tensor, bias_to_add: torch.Tensor | None, programs: int, spans: int) -> None:
        _multiply[held, triton.cdiv(outputs, _OUTPUTS), programs](
            *(rows, order, bounds, weight, bias_to_add, output, len(rows), outputs, columns, *strides, spans),
            SPAN=span,
            ROWS=_ROWS,
            OUTPUTS=_OUTPUTS,
            COLUMNS=_COLUMNS,
        )

    return _split_by_spans(multiply, rows, ids, bias, first, held, outputs, span)


def quantised_expert_linear(
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
    count, columns = rows.shape
    step_columns = quantised.columns_per_step(columns // groups)
    order, bounds = _groups(ids, first, held)
    span = _span_columns(columns, step_columns)
    parts, sums = quantised.split_rows(rows, step_columns, minimums is not None)

    def multiply(output: torch.Tensor, bias_to_add: torch.Tensor | None, programs: int, spans: int) -> None:
        _multiply_quantised[held, triton.cdiv(outputs, quantised.OUTPUTS), programs](
            *(parts, parts.stride(0), sums, order, bounds, weight, scales, minimums, bias_to_add, output),
            *(count, outputs, columns, columns // groups, spans),
            PARTS=parts.shape[0],
            PACKED=weight.dtype == torch.uint8,
            SPAN=span,
            COLUMNS=step_columns,
            ROWS=quantised.ROWS,
            OUTPUTS=quantised.OUTPUTS,
            num_warps=4,
            num_stages=4,
        )

    return _split_by_spans(multiply, rows, ids, bias, first, held, outputs, span)


def _groups(ids: torch.Tensor, first: int, held: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that sorts rows by expert, and the bounds of the rows of each expert held here."""
    by_expert, order = torch.sort(ids, stable=True)
    return order, torch.searchsorted(by_expert, torch.arange(first, first + held + 1, device=ids.device))


def _span_columns(columns: int, step_columns: int) -> int:
    """Columns of a span: the fewest equal spans of at most `quantised.SPAN` columns."""
    equal_span = -(-columns // -(-columns // quantised.SPAN))
    return -(-equal_span // step_columns) * step_columns


def _split_by_spans(
    multiply: Callable[[torch.Tensor, torch.Tensor | None, int, int], None],
    rows: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    held: int,
    outputs: int,
    span: int,
) -> torch.Tensor:
    """Call `multiply(output, bias, programs, spans of each)`, with one program for all spans, or one for each and a reduction (split-K):
    few rows leave most of a GPU idle otherwise."""
    count, columns = rows.shape
    spans = triton.cdiv(columns, span)
    if spans == 1 or spans * count * outputs > _MAX_PARTIAL_SUMS:
        output = torch.zeros(count, outputs, dtype=rows.dtype, device=rows.device)
        multiply(output, bias, 1, spans)
        return output
    output = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    partial_sums = torch.empty(spans, count, outputs, device=rows.device)
    multiply(partial_sums, None, spans, 1)
    _reduce_spans[triton.cdiv(count * outputs, _SUMS_PER_PROGRAM),](
        *(partial_sums, ids, bias, output, count * outputs, outputs, spans, first, held),
        SIZE=_SUMS_PER_PROGRAM,
    )
    return output


@triton.jit
def _multiply(
    rows, order, bounds, weight, bias, output, count, outputs, columns, expert_stride, output_stride, column_stride, spans,
    SPAN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    start, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    out = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    first_span = tl.program_id(2)
    output_mask = out < outputs
    matrix = weight + expert * expert_stride + out[:, None] * output_stride
    for base in range(start, end, ROWS):
        sorted_row = base + tl.arange(0, ROWS)
        row_mask = sorted_row < end
        row = tl.load(order + sorted_row, mask=row_mask, other=0)
        total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        for span in range(spans):
            span_total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
            for begin in range(0, SPAN, COLUMNS):
                column = (first_span + span) * SPAN + begin + tl.arange(0, COLUMNS)
                column_mask = (column < columns)[None, :]
                inputs = tl.load(
                    rows + row[:, None] * columns + column[None, :],
                    mask=row_mask[:, None] & column_mask,
                    other=0.0,
                )
                weight_pointers = matrix + column[None, :] * column_stride
                weights = tl.load(weight_pointers, mask=output_mask[:, None] & column_mask, other=0.0)
                span_total += tl.dot(inputs, tl.trans(weights), input_precision="tf32x3")
            total += span_total
        if bias is not None:
            total += tl.load(bias + expert * outputs + out, mask=output_mask, other=0.0).to(tl.float32)[
                None, :
            ]
        output_pointers = output + (first_span * count + row)[:, None] * outputs + out[None, :]
        tl.store(
            output_pointers, total.to(output.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :]
        )


@triton.jit
def _multiply_quantised(
    parts, part_stride, sums, order, bounds, weight, scales, minimums, bias, output,
    count, outputs, columns, group, spans,
    PARTS: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    start, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    out = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    first_span = tl.program_id(2)
    output_mask = out < outputs
    matrix_row = expert * outputs + out  # in (held * outputs, columns)
    for base in range(start, end, ROWS):
        sorted_row = base + tl.arange(0, ROWS)
        row_mask = sorted_row < end
        row = tl.load(order + sorted_row, mask=row_mask, other=0)
        total = sum_spans(
            parts, part_stride, sums, weight, scales, minimums, row, row_mask, matrix_row, output_mask, first_span, count, columns, group, spans,
            PARTS, PACKED, SPAN, COLUMNS, ROWS, OUTPUTS,
        )  # fmt: skip
        if bias is not None:
            total += tl.load(bias + matrix_row, mask=output_mask, other=0.0).to(tl.float32)[:, None]
        output_pointers = output + (first_span * count + row)[None, :] * outputs + out[:, None]
        tl.store(
            output_pointers, total.to(output.dtype.element_ty), mask=row_mask[None, :] & output_mask[:, None]
        )


@triton.jit
def _reduce_spans(partial_sums, ids, bias, output, count, outputs, spans, first, held, SIZE: tl.constexpr):
    """Add the spans in the order of `_multiply`, so that the bits are the same; zeros for rows of experts not held here."""
    element = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    expert = tl.load(ids + element // outputs, mask=element < count, other=-1) - first
    mask = (expert >= 0) & (expert < held) & (element < count)
    total = tl.zeros([SIZE], dtype=tl.float32)
    for span in range(spans):
        total += tl.load(partial_sums + span * count + element, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + expert * outputs + element % outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + element, total.to(output.dtype.element_ty), mask=element < count)
