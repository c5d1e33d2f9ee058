"""Attention of single positions to the keys and values of their own sequences, as machine code.

A library's takes a call for each sequence, and a few more to store what is new and to find what is kept: for sequences of a
few hundred positions most of what it takes. Here one call does a layer's for all of them. The scores of a
position are computed key by key and its softmax in one order, whatever other positions there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, compiled

ENTRY = 4  # whole numbers of the table for each position
_KEYS = 4  # whose scores are computed at once: their sums wait for each other otherwise
_VECTORS = 4  # of a value's width that are summed at once


@cache
def attention() -> Function | None:
    """(queries, new keys, new values, table, slopes, sinks, scores, output; first head of the keys, last, how many there are,
    queries' heads for each, positions, width of a key, of a value, floats from one head of the queries to the next and from one
    position to the next, the same of new keys and of new values, of scores from one head to the next, window, bits of the scale,
    of the cap).

    The table has (address of the keys, of the values, positions that these have room for in each head, position) for each
    position. What is new is stored there first; then the position sees all up to itself, or the last of them, as many as the
    window has, if that is not 0. Slopes and sinks are one a head of the queries, their addresses 0 where there are none, and so is the
    cap of the scores (`fusion.cached_attention_scored`). Output: (positions, heads, width of a value), contiguous. Scores have
    room for LANES more than a position sees at most. None where there is no such code for this machine."""
    return compiled(8, 17, _write)


Place = tuple[Any, Any]  # an address, and how many floats behind it something begins


def _write(code: Code) -> None:
    at = code.at
    queries, new_keys, new_values, table, slopes, sinks, scores, made, *numbers = code.arguments
    first, last, groups, each, positions, width, value_width, *strides, room, window, scale, cap = numbers
    scale, cap = (at.bitcast(at.trunc(bits, code.ir.IntType(32)), code.float) for bits in (scale, cap))
    # How often a loop runs that is for these alone: once or not at all.
    has_cap = at.zext(at.fcmp_ordered("!=", cap, code.zero), code.word)
    has_slopes, has_sinks = (
        at.zext(at.icmp_unsigned("!=", at.ptrtoint(address, code.word), code.number(0)), code.word)
        for address in (slopes, sinks)
    )
    widths = [(code.whole(code.number(0), wide, LANES), wide) for wide in (width, value_width)]

    def head(group: Any, _: Sequence[Any]) -> Sequence[Any]:
        def position(row: Any, _: Sequence[Any]) -> Sequence[Any]:
            entry = at.mul(row, code.number(ENTRY))
            *addresses, rows, own = (
                code.load(table, at.add(entry, code.number(n)), code.word) for n in range(ENTRY)
            )
            keys, values = (at.inttoptr(address, code.ir.PointerType()) for address in addresses)
            before = at.mul(group, rows)
            for given, kept, wide, n in ((new_keys, keys, widths[0], 2), (new_values, values, widths[1], 4)):
                start = at.add(at.mul(group, strides[n]), at.mul(row, strides[n + 1]))
                _copy(code, (given, start), (kept, at.mul(at.add(before, own), wide[1])), wide)
            until = at.add(own, code.number(1))
            cut = at.and_(
                at.icmp_unsigned("!=", window, code.number(0)), at.icmp_unsigned(">", until, window)
            )
            begin = at.select(cut, at.sub(until, window), code.number(0))
            seen, start = at.sub(until, begin), at.add(before, begin)

            def query(number: Any, _: Sequence[Any]) -> Sequence[Any]:
                which = at.add(at.mul(group, each), number)
                asked = (queries, at.add(at.mul(which, strides[0]), at.mul(row, strides[1])))
                held = (scores, at.mul(which, room))
                _scores(code, asked, (keys, start), held, widths[0], seen, scale)
                _cap(code, held, seen, has_cap, cap)
                _pad(code, held, seen)
                _slope(code, held, seen, has_slopes, (slopes, which))
                total = _softmax(code, held, seen, has_sinks, (sinks, which))
                place = at.mul(at.add(at.mul(row, at.mul(groups, each)), which), value_width)
                _values(code, held, (values, start), (made, place), widths[1], seen, total)
                return ()

            code.loop(code.number(0), each, 1, query)
            return ()

        code.loop(code.number(0), positions, 1, position)
        return ()

    code.loop(first, last, 1, head)


def _copy(code: Code, given: Place, to: Place, width: tuple[Any, Any]) -> None:
    """`width`, here and below: of how many floats there are whole vectors, and how many there are."""
    whole, end = width
    for begin, until, count in ((code.number(0), whole, LANES), (whole, end, 1)):

        def some(index: Any, _: Sequence[Any], count: int = count) -> Sequence[Any]:
            found = code.load(given[0], code.at.add(given[1], index), code.float, count if count > 1 else 0)
            code.store(found, to[0], code.at.add(to[1], index))
            return ()

        code.loop(begin, until, count, some)


def _scores(
    code: Code, query: Place, keys: Place, scores: Place, width: tuple[Any, Any], seen: Any, scale: Any
) -> None:
    """Of all keys that are seen, times the scale. `keys` begins with a whole key."""
    at = code.at
    whole, end = width

    def some(count: int, first: Any, last: Any) -> None:
        def several(key: Any, _: Sequence[Any]) -> Sequence[Any]:
            starts = [at.mul(at.add(at.add(keys[1], key), code.number(k)), end) for k in range(count)]

            def column(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                asked = code.load(query[0], at.add(query[1], index), code.float, LANES)
                held = [code.load(keys[0], at.add(begin, index), code.float, LANES) for begin in starts]
                return [code.fma(asked, key, total) for key, total in zip(held, sums, strict=True)]

            sums = code.loop(code.number(0), whole, LANES, column, [code.zeros] * count)

            def rest(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                asked = code.load(query[0], at.add(query[1], index), code.float)
                held = [code.load(keys[0], at.add(begin, index), code.float) for begin in starts]
                return [at.fadd(total, at.fmul(asked, key)) for key, total in zip(held, sums, strict=True)]

            totals = code.loop(whole, end, 1, rest, [code.sum(total) for total in sums])
            for k, total in enumerate(totals):
                place = at.add(scores[1], at.add(key, code.number(k)))
                code.store(at.fmul(total, scale), scores[0], place)
            return ()

        code.loop(first, last, count, several)

    together = code.whole(code.number(0), seen, _KEYS)
    some(_KEYS, code.number(0), together)
    some(1, together, seen)


def _each(code: Code, scores: Place, seen: Any, change: Callable[[Any, Any], Any]) -> None:
    """What `change` (index, scores) makes of them in place of each."""

    def some(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        place = code.at.add(scores[1], index)
        code.store(change(index, code.load(scores[0], place, code.float, LANES)), scores[0], place)
        return ()

    code.loop(code.number(0), seen, LANES, some)


def _cap(code: Code, scores: Place, seen: Any, times: Any, cap: Any) -> None:
    """cap * tanh(score / cap), where `times` is 1."""
    at = code.at

    def capped(_: Any, value: Any) -> Any:
        value = at.fdiv(value, code.spread(cap))
        bits = at.bitcast(value, code.integers)
        sign = at.and_(bits, code.whole_numbers(-(1 << 31)))
        size = at.bitcast(at.and_(bits, code.whole_numbers((1 << 31) - 1)), code.floats)
        less = code.exp(at.fmul(size, code.all(-2.0)))
        found = at.fdiv(at.fsub(code.all(1.0), less), at.fadd(code.all(1.0), less))
        found = at.bitcast(at.or_(at.bitcast(found, code.integers), sign), code.floats)
        return at.fmul(found, code.spread(cap))

    def once(_: Any, __: Sequence[Any]) -> Sequence[Any]:
        _each(code, scores, seen, capped)
        return ()

    code.loop(code.number(0), times, 1, once)


def _pad(code: Code, scores: Place, seen: Any) -> None:
    """-inf behind the last, up to whole vectors."""
    lowest = code.ir.Constant(code.float, -math.inf)

    def pad(index: Any, _: Sequence[Any]) -> Sequence[Any]:
        code.store(lowest, scores[0], code.at.add(scores[1], index))
        return ()

    code.loop(seen, code.at.add(seen, code.number(LANES)), 1, pad)


def _slope(code: Code, scores: Place, seen: Any, times: Any, slope: Place) -> None:
    """Plus the slope for each position from the last one back, where `times` is 1."""
    at = code.at
    places = code.ir.Constant(code.floats, [float(lane) for lane in range(LANES)])

    def once(_: Any, __: Sequence[Any]) -> Sequence[Any]:
        each = code.spread(code.load(*slope, code.float))

        def sloped(index: Any, value: Any) -> Any:
            first = at.sitofp(at.sub(index, at.sub(seen, code.number(1))), code.float)
            return at.fadd(value, at.fmul(each, at.fadd(code.spread(first), places)))

        _each(code, scores, seen, sloped)
        return ()

    code.loop(code.number(0), times, 1, once)


def _softmax(code: Code, scores: Place, seen: Any, times: Any, sink: Place) -> Any:
    """exp(score - the highest) in place of each; the sum of them, and of the sink's where `times` is 1."""
    at = code.at
    lowest = code.all(-math.inf)

    def higher(index: Any, carried: Sequence[Any]) -> Sequence[Any]:
        found = code.load(scores[0], at.add(scores[1], index), code.float, LANES)
        return [at.select(at.fcmp_ordered(">", found, carried[0]), found, carried[0])]

    def sink_score(_: Any, __: Sequence[Any]) -> Sequence[Any]:
        return [code.load(*sink, code.float)]

    (most,) = code.loop(code.number(0), seen, LANES, higher, [lowest])
    (own,) = code.loop(code.number(0), times, 1, sink_score, [code.ir.Constant(code.float, -math.inf)])
    highest = own
    for lane in range(LANES):
        one = at.extract_element(most, code.ir.Constant(code.ir.IntType(32), lane))
        highest = at.select(at.fcmp_ordered(">", one, highest), one, highest)
    most = code.spread(highest)

    def some(index: Any, carried: Sequence[Any]) -> Sequence[Any]:
        place = at.add(scores[1], index)
        found = code.exp(at.fsub(code.load(scores[0], place, code.float, LANES), most))
        code.store(found, scores[0], place)
        return [at.fadd(carried[0], found)]

    (total,) = code.loop(code.number(0), seen, LANES, some, [code.zeros])
    extra = code.exp(at.fsub(code.spread(own), most))
    return at.fadd(code.sum(total), code.first(extra))


def _values(
    code: Code, weights: Place, values: Place, made: Place, width: tuple[Any, Any], seen: Any, total: Any
) -> None:
    """The sum of the values times their weights, over the sum of these."""
    at = code.at
    whole, end = width
    totals = code.spread(total)

    def some(vectors: int, first: Any, last: Any) -> None:
        step = vectors * LANES or 1

        def several(column: Any, _: Sequence[Any]) -> Sequence[Any]:
            def key(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
                weight = code.load(weights[0], at.add(weights[1], index), code.float)
                begin = at.add(at.mul(at.add(values[1], index), end), column)
                if not vectors:
                    held = code.load(values[0], begin, code.float)
                    return [at.fadd(sums[0], at.fmul(weight, held))]
                many = code.spread(weight)
                held = [
                    code.load(values[0], at.add(begin, code.number(n * LANES)), code.float, LANES)
                    for n in range(vectors)
                ]
                return [code.fma(many, each, total) for each, total in zip(held, sums, strict=True)]

            none = [code.zeros] * vectors or [code.zero]
            for n, found in enumerate(code.loop(code.number(0), seen, 1, key, none)):
                place = at.add(made[1], at.add(column, code.number(n * LANES)))
                code.store(at.fdiv(found, totals if vectors else total), made[0], place)
            return ()

        code.loop(first, last, step, several)

    wide = code.whole(code.number(0), end, _VECTORS * LANES)
    some(_VECTORS, code.number(0), wide)
    some(1, wide, whole)
    some(0, whole, end)
