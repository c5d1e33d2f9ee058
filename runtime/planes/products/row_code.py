"""What a layer does to each row between its products, as machine code: a library has several calls for each, and those of a few rows
cost it above all the call.

What a number becomes does not depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, compiled

Loaded = Sequence[Any]
Place = tuple[Any, Any]  # an address, and how many floats behind it something begins


@cache
def rms_norm() -> Function | None:
    """(rows, weight, output; first row, last, width, bits of epsilon): the rows and the output contiguous."""
    return compiled(3, 4, _rms_norm)


@cache
def rotate() -> Function | None:
    """(heads, cosines, sines, output; first position, last, heads, half of their width, floats from one head to the next, and from
    one position to the next): (a, b) becomes (a cos - b sin, b cos + a sin), where a and b are the halves of a head. Cosines and
    sines: (positions, width); output: (positions, heads, width), all contiguous."""
    return compiled(4, 6, _rotate)


@cache
def silu() -> Function | None:
    """(given, output; first block of LANES, last, how many numbers)."""
    return compiled(2, 3, _silu)


@cache
def gate() -> Function | None:
    """(gate, other, output; first block of LANES, last, how many numbers): silu(gate) times other."""
    return compiled(3, 3, _silu)


def _rms_norm(code: Code) -> None:
    """Sums in float64: no further from a library's, whichever order that takes, than its own are from what is right."""
    at, double = code.at, code.ir.DoubleType()
    doubles = code.ir.VectorType(double, LANES)
    rows, weight, made, first, last, width, bits = code.arguments
    epsilon = at.bitcast(at.trunc(bits, code.ir.IntType(32)), code.float)

    def row(index: Any, _: Loaded) -> Loaded:
        place = at.mul(index, width)
        whole = code.whole(code.number(0), width, LANES)

        def squares(column: Any, sums: Loaded) -> Loaded:
            found = at.fpext(code.load(rows, at.add(place, column), code.float, LANES), doubles)
            return [at.fadd(sums[0], at.fmul(found, found))]

        def square(column: Any, sums: Loaded) -> Loaded:
            found = at.fpext(code.load(rows, at.add(place, column), code.float), double)
            return [at.fadd(sums[0], at.fmul(found, found))]

        none = code.ir.Constant(doubles, [0.0] * LANES)
        (lanes,) = code.loop(code.number(0), whole, LANES, squares, [none])
        (total,) = code.loop(whole, width, 1, square, [code.sum(lanes)])
        mean = at.fptrunc(at.fdiv(total, at.sitofp(width, double)), code.float)
        scale = at.fdiv(code.ir.Constant(code.float, 1.0), code.sqrt(at.fadd(mean, epsilon)))

        def scaled(found: Loaded) -> Any:
            by = code.spread(scale) if found[0].type == code.floats else scale
            return at.fmul(at.fmul(found[0], by), found[1])

        _each(code, width, ((rows, place), (weight, code.number(0))), (made, place), scaled)
        return ()

    code.loop(first, last, 1, row)


def _rotate(code: Code) -> None:
    at = code.at
    heads, cosines, sines, made, first, last, count, half, *strides = code.arguments
    width = at.add(half, half)

    def position(index: Any, _: Loaded) -> Loaded:
        angle = at.mul(index, width)

        def head(number: Any, _: Loaded) -> Loaded:
            given = at.add(at.mul(number, strides[0]), at.mul(index, strides[1]))
            place = at.mul(at.add(at.mul(index, count), number), width)
            for own, other, turn in ((code.number(0), half, at.fsub), (half, code.number(0), at.fadd)):
                read = [(heads, at.add(given, own)), (heads, at.add(given, other))]
                read += [(angles, at.add(angle, own)) for angles in (cosines, sines)]

                def turned(found: Loaded, turn: Callable[[Any, Any], Any] = turn) -> Any:
                    return turn(at.fmul(found[0], found[2]), at.fmul(found[1], found[3]))

                _each(code, half, read, (made, at.add(place, own)), turned)
            return ()

        code.loop(code.number(0), count, 1, head)
        return ()

    code.loop(first, last, 1, position)


def _silu(code: Code) -> None:
    """Of the first of what is given, times all others."""
    at = code.at
    *given, made, first, last, count = code.arguments
    begin, beyond = (at.mul(block, code.number(LANES)) for block in (first, last))
    end = at.select(at.icmp_unsigned("<", beyond, count), beyond, count)

    def silu(value: Any) -> Any:
        one = code.all(1.0)
        bits = at.bitcast(value, code.integers)
        less = code.exp(at.bitcast(at.or_(bits, code.whole_numbers(-(1 << 31))), code.floats))
        above = at.select(at.fcmp_ordered(">=", value, code.zeros), one, less)
        return at.fdiv(at.fmul(value, above), at.fadd(one, less))

    def gated(found: Loaded) -> Any:
        value, *others = found
        if value.type == code.floats:
            value = silu(value)
        else:
            value = code.first(silu(code.spread(value)))
        for other in others:
            value = at.fmul(value, other)
        return value

    places = [(address, begin) for address in given]
    _each(code, at.sub(end, begin), places, (made, begin), gated)


def _each(
    code: Code, count: Any, given: Sequence[Place], made: Place, change: Callable[[Loaded], Any]
) -> None:
    """What `change` makes of so many floats at each place, LANES at once, and then one by one."""
    whole = code.whole(code.number(0), count, LANES)
    for begin, until, lanes in ((code.number(0), whole, LANES), (whole, count, 0)):

        def some(index: Any, _: Loaded, lanes: int = lanes) -> Loaded:
            found = [code.load(base, code.at.add(place, index), code.float, lanes) for base, place in given]
            code.store(change(found), made[0], code.at.add(made[1], index))
            return ()

        code.loop(begin, until, lanes or 1, some)
