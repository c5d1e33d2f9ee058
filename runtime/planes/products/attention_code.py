"""Attention of single positions to the keys and values of their own sequences, as machine code.

A library needs a call for each sequence, and a few more to store the new keys and values and to look up the cached ones: for sequences
of a few hundred positions, these calls take most of its time. Here one call computes the attention of a layer for all sequences.
Scores are computed key by key, and the softmax in a fixed reduction order, so a position's bits do not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, jit_compile

ENTRY = 4  # integers of the table for each position
_KEYS_PER_STEP = 4  # whose scores are computed at once, which hides the latency of the multiply-adds
_VECTORS_PER_STEP = 4  # of a value row, summed at once


@cache
def attention() -> Function | None:
    """A function of (queries, new keys, new values, table, slopes, sinks, scores, output; first key head, last, number of key heads,
    query heads per key head, positions, key width, value width; the head and position strides, in floats, of queries, new keys and new
    values; head stride of scores, window, bits of the scale, bits of the cap).

    The table holds (address of the cached keys, of the cached values, positions allocated per head, position) for each position. New
    keys and values are stored in the cache first; then the position attends to all positions up to itself, or to the last `window` of
    them where that is not 0. Slopes and sinks have one number per query head; their addresses, and the cap of the scores, are 0 where
    there are none (`fusion.cached_attention_scored`). Output: (positions, heads, value width), contiguous. `scores` needs room for
    LANES more than the most positions that one attends to. None where this machine is not supported."""
    return jit_compile(8, 17, _write)


Pointer = tuple[Any, Any]  # an address, and an offset in floats


def _write(code: Code) -> None:
    build = code.builder
    queries, new_keys, new_values, table, slopes, sinks, scores, output, *sizes = code.arguments
    first, last, groups, group_queries, positions, width, value_width, *strides, room, window, scale, cap = (
        sizes
    )
    scale, cap = (
        build.bitcast(build.trunc(bits, code.ir.IntType(32)), code.float32) for bits in (scale, cap)
    )
    # `Code` has no branches: a loop of one or no iterations stands for one.
    cap_runs = build.zext(build.fcmp_ordered("!=", cap, code.zero), code.int64)
    slope_runs, sink_runs = (
        build.zext(build.icmp_unsigned("!=", build.ptrtoint(address, code.int64), code.index(0)), code.int64)
        for address in (slopes, sinks)
    )
    vector_sizes = [(code.aligned_end(code.index(0), size, LANES), size) for size in (width, value_width)]

    def run_head(group: Any, _: Sequence[Any]) -> Sequence[Any]:
        def run_position(row: Any, _: Sequence[Any]) -> Sequence[Any]:
            entry = build.mul(row, code.index(ENTRY))
            *addresses, room_positions, own_position = (
                code.load(table, build.add(entry, code.index(n)), code.int64) for n in range(ENTRY)
            )
            keys, values = (build.inttoptr(address, code.ir.PointerType()) for address in addresses)
            head_start = build.mul(group, room_positions)
            for source, cached, size, stride in (
                (new_keys, keys, vector_sizes[0], 2),
                (new_values, values, vector_sizes[1], 4),
            ):
                start = build.add(build.mul(group, strides[stride]), build.mul(row, strides[stride + 1]))
                _copy_row(
                    code,
                    (source, start),
                    (cached, build.mul(build.add(head_start, own_position), size[1])),
                    size,
                )
            end = build.add(own_position, code.index(1))
            windowed = build.and_(
                build.icmp_unsigned("!=", window, code.index(0)), build.icmp_unsigned(">", end, window)
            )
            first_seen = build.select(windowed, build.sub(end, window), code.index(0))
            seen, start = build.sub(end, first_seen), build.add(head_start, first_seen)

            def run_query(query_index: Any, _: Sequence[Any]) -> Sequence[Any]:
                query_head = build.add(build.mul(group, group_queries), query_index)
                query_row = (
                    queries,
                    build.add(build.mul(query_head, strides[0]), build.mul(row, strides[1])),
                )
                row_scores = (scores, build.mul(query_head, room))
                _scores(code, query_row, (keys, start), row_scores, vector_sizes[0], seen, scale)
                _cap_scores(code, row_scores, seen, cap_runs, cap)
                _pad_scores(code, row_scores, seen)
                _add_slopes(code, row_scores, seen, slope_runs, (slopes, query_head))
                total = _softmax(code, row_scores, seen, sink_runs, (sinks, query_head))
                output_start = build.mul(
                    build.add(build.mul(row, build.mul(groups, group_queries)), query_head), value_width
                )
                _weighted_values(
                    code, row_scores, (values, start), (output, output_start), vector_sizes[1], seen, total
                )
                return ()

            code.loop(code.index(0), group_queries, 1, run_query)
            return ()

        code.loop(code.index(0), positions, 1, run_position)
        return ()

    code.loop(first, last, 1, run_head)


def _copy_row(code: Code, source: Pointer, target: Pointer, width: tuple[Any, Any]) -> None:
    """`width`, here and below: the floats in full vectors, and all floats."""
    aligned, end = width
    for begin, stop, count in ((code.index(0), aligned, LANES), (aligned, end, 1)):

        def copy(index: Any, _: Sequence[Any], count: int = count) -> Sequence[Any]:
            values = code.load(
                source[0], code.builder.add(source[1], index), code.float32, count if count > 1 else 0
            )
            code.store(values, target[0], code.builder.add(target[1], index))
            return ()

        code.loop(begin, stop, count, copy)


def _scores(
    code: Code, query: Pointer, keys: Pointer, scores: Pointer, width: tuple[Any, Any], seen: Any, scale: Any
) -> None:
    """Store the scaled scores of the `seen` keys; `keys` points to the first of them."""
    build = code.builder
    aligned, end = width

    def blocked(count: int, first: Any, last: Any) -> None:
        def key_block(key: Any, _: Sequence[Any]) -> Sequence[Any]:
            starts = [build.mul(build.add(build.add(keys[1], key), code.index(k)), end) for k in range(count)]

            def column(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                query_values = code.load(query[0], build.add(query[1], index), code.float32, LANES)
                key_values = [
                    code.load(keys[0], build.add(begin, index), code.float32, LANES) for begin in starts
                ]
                return [
                    code.fma(query_values, key, total) for key, total in zip(key_values, sums, strict=True)
                ]

            sums = code.loop(code.index(0), aligned, LANES, column, [code.zero_lanes] * count)

            def tail_column(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                query_values = code.load(query[0], build.add(query[1], index), code.float32)
                key_values = [code.load(keys[0], build.add(begin, index), code.float32) for begin in starts]
                return [
                    build.fadd(total, build.fmul(query_values, key))
                    for key, total in zip(key_values, sums, strict=True)
                ]

            totals = code.loop(aligned, end, 1, tail_column, [code.lane_sum(total) for total in sums])
            for k, total in enumerate(totals):
                offset = build.add(scores[1], build.add(key, code.index(k)))
                code.store(build.fmul(total, scale), scores[0], offset)
            return ()

        code.loop(first, last, count, key_block)

    aligned_keys = code.aligned_end(code.index(0), seen, _KEYS_PER_STEP)
    blocked(_KEYS_PER_STEP, code.index(0), aligned_keys)
    blocked(1, aligned_keys, seen)


def _map_scores(code: Code, scores: Pointer, seen: Any, change: Callable[[Any, Any], Any]) -> None:
    """Replace each vector of scores by `change(index, scores)`."""

    def apply(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        offset = code.builder.add(scores[1], index)
        code.store(change(index, code.load(scores[0], offset, code.float32, LANES)), scores[0], offset)
        return ()

    code.loop(code.index(0), seen, LANES, apply)


def _cap_scores(code: Code, scores: Pointer, seen: Any, runs: Any, cap: Any) -> None:
    """Replace scores by cap * tanh(score / cap), where `runs` is 1."""
    build = code.builder

    def capped(_: Any, value: Any) -> Any:
        value = build.fdiv(value, code.splat(cap))
        bits = build.bitcast(value, code.int_lanes)
        sign = build.and_(bits, code.int_constant(-(1 << 31)))
        size = build.bitcast(build.and_(bits, code.int_constant((1 << 31) - 1)), code.float_lanes)
        exponential = code.exp(build.fmul(size, code.float_constant(-2.0)))
        tanh = build.fdiv(
            build.fsub(code.float_constant(1.0), exponential),
            build.fadd(code.float_constant(1.0), exponential),
        )
        tanh = build.bitcast(build.or_(build.bitcast(tanh, code.int_lanes), sign), code.float_lanes)
        return build.fmul(tanh, code.splat(cap))

    def once(_: Any, __: Sequence[Any]) -> Sequence[Any]:
        _map_scores(code, scores, seen, capped)
        return ()

    code.loop(code.index(0), runs, 1, once)


def _pad_scores(code: Code, scores: Pointer, seen: Any) -> None:
    """Fill the last vector with -inf."""
    masked = code.ir.Constant(code.float32, -math.inf)

    def pad(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        code.store(masked, scores[0], code.builder.add(scores[1], index))
        return ()

    code.loop(seen, code.builder.add(seen, code.index(LANES)), 1, pad)


def _add_slopes(code: Code, scores: Pointer, seen: Any, runs: Any, slope: Pointer) -> None:
    """Add slope * (position - last position), where `runs` is 1 (ALiBi)."""
    build = code.builder
    lane_offsets = code.ir.Constant(code.float_lanes, [float(lane) for lane in range(LANES)])

    def once(_: Any, __: Sequence[Any]) -> Sequence[Any]:
        slopes = code.splat(code.load(*slope, code.float32))

        def add_slope(index: Any, value: Any) -> Any:
            distance = build.sitofp(build.sub(index, build.sub(seen, code.index(1))), code.float32)
            return build.fadd(value, build.fmul(slopes, build.fadd(code.splat(distance), lane_offsets)))

        _map_scores(code, scores, seen, add_slope)
        return ()

    code.loop(code.index(0), runs, 1, once)


def _softmax(code: Code, scores: Pointer, seen: Any, sink_runs: Any, sink: Pointer) -> Any:
    """Replace scores by exp(score - maximum); return their sum, with that of the sink where `sink_runs` is 1."""
    build = code.builder
    minimum = code.float_constant(-math.inf)

    def maximum(index: Any, carried: Sequence[Any]) -> Sequence[Any]:
        values = code.load(scores[0], build.add(scores[1], index), code.float32, LANES)
        return [build.select(build.fcmp_ordered(">", values, carried[0]), values, carried[0])]

    def sink_score(_: Any, __: Sequence[Any]) -> Sequence[Any]:
        return [code.load(*sink, code.float32)]

    (lane_maxima,) = code.loop(code.index(0), seen, LANES, maximum, [minimum])
    (sink_value,) = code.loop(
        code.index(0), sink_runs, 1, sink_score, [code.ir.Constant(code.float32, -math.inf)]
    )
    highest = sink_value
    for lane in range(LANES):
        lane_value = build.extract_element(lane_maxima, code.ir.Constant(code.ir.IntType(32), lane))
        highest = build.select(build.fcmp_ordered(">", lane_value, highest), lane_value, highest)
    lane_maxima = code.splat(highest)

    def exponentials(index: Any, carried: Sequence[Any]) -> Sequence[Any]:
        offset = build.add(scores[1], index)
        values = code.exp(build.fsub(code.load(scores[0], offset, code.float32, LANES), lane_maxima))
        code.store(values, scores[0], offset)
        return [build.fadd(carried[0], values)]

    (total,) = code.loop(code.index(0), seen, LANES, exponentials, [code.zero_lanes])
    sink_weight = code.exp(build.fsub(code.splat(sink_value), lane_maxima))
    return build.fadd(code.lane_sum(total), code.first_lane(sink_weight))


def _weighted_values(
    code: Code,
    weights: Pointer,
    values: Pointer,
    output: Pointer,
    width: tuple[Any, Any],
    seen: Any,
    total: Any,
) -> None:
    """Store the sum of values times weights, divided by `total`."""
    build = code.builder
    aligned, end = width
    total_lanes = code.splat(total)

    def columns(vectors: int, first: Any, last: Any) -> None:
        step = vectors * LANES or 1

        def column_block(column: Any, _: Sequence[Any]) -> Sequence[Any]:
            def key(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                weight = code.load(weights[0], build.add(weights[1], index), code.float32)
                value_start = build.add(build.mul(build.add(values[1], index), end), column)
                if not vectors:
                    value = code.load(values[0], value_start, code.float32)
                    return [build.fadd(sums[0], build.fmul(weight, value))]
                weight_lanes = code.splat(weight)
                value = [
                    code.load(values[0], build.add(value_start, code.index(n * LANES)), code.float32, LANES)
                    for n in range(vectors)
                ]
                return [code.fma(weight_lanes, each, total) for each, total in zip(value, sums, strict=True)]

            initial = [code.zero_lanes] * vectors or [code.zero]
            for n, weighted in enumerate(code.loop(code.index(0), seen, 1, key, initial)):
                offset = build.add(output[1], build.add(column, code.index(n * LANES)))
                code.store(build.fdiv(weighted, total_lanes if vectors else total), output[0], offset)
            return ()

        code.loop(first, last, step, column_block)

    unrolled_end = code.aligned_end(code.index(0), end, _VECTORS_PER_STEP * LANES)
    columns(_VECTORS_PER_STEP, code.index(0), unrolled_end)
    columns(1, unrolled_end, aligned)
    columns(0, aligned, end)
