"""Products of rows with the matrix that each has chosen, in Triton: which experts have rows only the device needs to know.

A row has the same bits in any company: what is summed up by itself, and in which order that is added, depends on the matrix
alone. A matrix that nobody has chosen is not read. Numbers of float32 are each the sum of two of TF32, which tensor cores take:
less far from the exact product than in float32's own order, one column after the other.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from fusion.runtime.planes.kernels import quantised_kernels as stored
from fusion.runtime.planes.kernels.quantised_kernels import sum_of_spans

_ROWS, _OUTPUTS, _COLUMNS = 32, 64, 64  # of one program at once
_APART = 1 << 22  # sums of spans that are kept for adding, at most: 16 MiB
_ADDED = 1024  # sums of one program that adds


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
    span = _span(columns, _COLUMNS)
    steps = weight.stride() if not transposed else (weight.stride(0), weight.stride(2), weight.stride(1))

    def multiply(made: torch.Tensor, added: torch.Tensor | None, programs: int, spans: int) -> None:
        _multiply[held, triton.cdiv(outputs, _OUTPUTS), programs](
            *(rows, order, bounds, weight, added, made, len(rows), outputs, columns, *steps, spans),
            SPAN=span,
            ROWS=_ROWS,
            OUTPUTS=_OUTPUTS,
            COLUMNS=_COLUMNS,
        )

    return _in_spans(multiply, rows, ids, bias, first, held, outputs, span)


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
    count, columns = rows.shape
    at_once = stored.at_once_of(columns // groups)
    order, bounds = _groups(ids, first, held)
    span = _span(columns, at_once)
    parts, sums = stored.parts_of(rows, at_once, minimums is not None)

    def multiply(made: torch.Tensor, added: torch.Tensor | None, programs: int, spans: int) -> None:
        _multiply_stored[held, triton.cdiv(outputs, stored.OUTPUTS), programs](
            *(parts, parts.stride(0), sums, order, bounds, weight, scales, minimums, added, made),
            *(count, outputs, columns, columns // groups, spans),
            PARTS=parts.shape[0],
            PACKED=weight.dtype == torch.uint8,
            SPAN=span,
            COLUMNS=at_once,
            ROWS=stored.ROWS,
            OUTPUTS=stored.OUTPUTS,
            num_warps=4,
            num_stages=4,
        )

    return _in_spans(multiply, rows, ids, bias, first, held, outputs, span)


def _groups(ids: torch.Tensor, first: int, held: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in the order of their experts, and where those of each that is held begin and end."""
    by_expert, order = torch.sort(ids, stable=True)
    return order, torch.searchsorted(by_expert, torch.arange(first, first + held + 1, device=ids.device))


def _span(columns: int, at_once: int) -> int:
    """Columns that are summed up by themselves: of alike spans, as few as there can be of at most `stored.SPAN`."""
    alike = -(-columns // -(-columns // stored.SPAN))
    return -(-alike // at_once) * at_once


def _in_spans(
    multiply: Callable[[torch.Tensor, torch.Tensor | None, int, int], None],
    rows: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    held: int,
    outputs: int,
    span: int,
) -> torch.Tensor:
    """`multiply` writes to what it is given, with the bias it is given, what so many programs make of so many spans each.

    Few rows leave most of a GPU without work, unless each span of columns has a program of its own."""
    count, columns = rows.shape
    spans = triton.cdiv(columns, span)
    if spans == 1 or spans * count * outputs > _APART:
        made = torch.zeros(count, outputs, dtype=rows.dtype, device=rows.device)
        multiply(made, bias, 1, spans)
        return made
    made = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    found = torch.empty(spans, count, outputs, device=rows.device)
    multiply(found, None, spans, 1)
    _add[triton.cdiv(count * outputs, _ADDED),](
        *(found, ids, bias, made, count * outputs, outputs, spans, first, held), ADDED=_ADDED
    )
    return made


@triton.jit
def _multiply(
    rows, order, bounds, weight, bias, made, count, outputs, columns, expert_step, output_step, column_step, spans,
    SPAN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    start, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    out = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    own = tl.program_id(2)
    held = out < outputs
    matrix = weight + expert * expert_step + out[:, None] * output_step
    for base in range(start, end, ROWS):
        place = base + tl.arange(0, ROWS)
        there = place < end
        line = tl.load(order + place, mask=there, other=0)
        found = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        for span in range(spans):
            total = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
            for begin in range(0, SPAN, COLUMNS):
                column = (own + span) * SPAN + begin + tl.arange(0, COLUMNS)
                inside = (column < columns)[None, :]
                given = tl.load(
                    rows + line[:, None] * columns + column[None, :], mask=there[:, None] & inside, other=0.0
                )
                at = matrix + column[None, :] * column_step
                numbers = tl.load(at, mask=held[:, None] & inside, other=0.0)
                total += tl.dot(given, tl.trans(numbers), input_precision="tf32x3")
            found += total
        if bias is not None:
            found += tl.load(bias + expert * outputs + out, mask=held, other=0.0).to(tl.float32)[None, :]
        at = made + (own * count + line)[:, None] * outputs + out[None, :]
        tl.store(at, found.to(made.dtype.element_ty), mask=there[:, None] & held[None, :])


@triton.jit
def _multiply_stored(
    parts, apart, sums, order, bounds, weight, scales, minimums, bias, made,
    count, outputs, columns, group, spans,
    PARTS: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    start, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    out = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    own = tl.program_id(2)
    held = out < outputs
    matrix = expert * outputs + out  # of the matrices one below the other
    for base in range(start, end, ROWS):
        place = base + tl.arange(0, ROWS)
        there = place < end
        line = tl.load(order + place, mask=there, other=0)
        found = sum_of_spans(
            parts, apart, sums, weight, scales, minimums, line, there, matrix, held, own, count, columns, group, spans,
            PARTS, PACKED, SPAN, COLUMNS, ROWS, OUTPUTS,
        )  # fmt: skip
        if bias is not None:
            found += tl.load(bias + matrix, mask=held, other=0.0).to(tl.float32)[:, None]
        at = made + (own * count + line)[None, :] * outputs + out[:, None]
        tl.store(at, found.to(made.dtype.element_ty), mask=there[None, :] & held[:, None])


@triton.jit
def _add(found, ids, bias, made, count, outputs, spans, first, held, ADDED: tl.constexpr):
    """Span after span, as a program that has all of them does; zeros where nobody wrote."""
    at = tl.program_id(0).to(tl.int64) * ADDED + tl.arange(0, ADDED)
    expert = tl.load(ids + at // outputs, mask=at < count, other=-1) - first
    there = (expert >= 0) & (expert < held) & (at < count)
    total = tl.zeros([ADDED], dtype=tl.float32)
    for span in range(spans):
        total += tl.load(found + span * count + at, mask=there, other=0.0)
    if bias is not None:
        total += tl.load(bias + expert * outputs + at % outputs, mask=there, other=0.0).to(tl.float32)
    tl.store(made + at, total.to(made.dtype.element_ty), mask=at < count)
