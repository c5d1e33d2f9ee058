"""Row-wise operators of a layer, fused into machine code: RMS norm, rotary positions, SiLU and gate. A library needs several calls for
each, and with few rows the overhead of a call is most of its time.

An element's bits do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, jit_compile

Values = Sequence[Any]
Pointer = tuple[Any, Any]  # an address, and an offset in floats


@cache
def rms_norm() -> Function | None:
    """A function of (rows, weight, output; first row, last, width, bits of epsilon). Rows and output are contiguous."""
    return jit_compile(3, 4, _rms_norm)


@cache
def rotate() -> Function | None:
    """A function of (heads, cosines, sines, output; first position, last, number of heads, half their width, head stride and position
    stride in floats). (a, b) becomes (a cos - b sin, b cos + a sin), where a and b are the halves of a head. Cosines and sines are
    (positions, width), the output is (positions, heads, width), all contiguous."""
    return jit_compile(4, 6, _rotate)


@cache
def silu() -> Function | None:
    """A function of (input, output; first block of LANES, last, number of elements)."""
    return jit_compile(2, 3, _silu)


@cache
def gate() -> Function | None:
    """A function of (gate, other, output; first block of LANES, last, number of elements): silu(gate) * other."""
    return jit_compile(3, 3, _silu)


def _rms_norm(code: Code) -> None:
    """Sums are in float64, so the result is as close to a library's, in any reduction order, as that is to the exact one."""
    build, double = code.builder, code.ir.DoubleType()
    doubles = code.ir.VectorType(double, LANES)
    rows, weight, output, first, last, width, epsilon_bits = code.arguments
    epsilon = build.bitcast(build.trunc(epsilon_bits, code.ir.IntType(32)), code.float32)

    def row(index: Any, _: Values) -> Values:
        row_start = build.mul(index, width)
        aligned = code.aligned_end(code.index(0), width, LANES)

        def squares(column: Any, sums: Values) -> Values:
            values = build.fpext(code.load(rows, build.add(row_start, column), code.float32, LANES), doubles)
            return [build.fadd(sums[0], build.fmul(values, values))]

        def tail_square(column: Any, sums: Values) -> Values:
            values = build.fpext(code.load(rows, build.add(row_start, column), code.float32), double)
            return [build.fadd(sums[0], build.fmul(values, values))]

        initial = code.ir.Constant(doubles, [0.0] * LANES)
        (lanes,) = code.loop(code.index(0), aligned, LANES, squares, [initial])
        (total,) = code.loop(aligned, width, 1, tail_square, [code.lane_sum(lanes)])
        mean = build.fptrunc(build.fdiv(total, build.sitofp(width, double)), code.float32)
        scale = build.fdiv(code.ir.Constant(code.float32, 1.0), code.sqrt(build.fadd(mean, epsilon)))

        def normalise(values: Values) -> Any:
            factor = code.splat(scale) if values[0].type == code.float_lanes else scale
            return build.fmul(build.fmul(values[0], factor), values[1])

        _elementwise(
            code, width, ((rows, row_start), (weight, code.index(0))), (output, row_start), normalise
        )
        return ()

    code.loop(first, last, 1, row)


def _rotate(code: Code) -> None:
    build = code.builder
    heads, cosines, sines, output, first, last, count, half, *strides = code.arguments
    width = build.add(half, half)

    def rotate_position(index: Any, _: Values) -> Values:
        angle = build.mul(index, width)

        def rotate_head(head_index: Any, _: Values) -> Values:
            input_start = build.add(build.mul(head_index, strides[0]), build.mul(index, strides[1]))
            output_start = build.mul(build.add(build.mul(index, count), head_index), width)
            for half_start, other_start, combine in (
                (code.index(0), half, build.fsub),
                (half, code.index(0), build.fadd),
            ):
                inputs = [
                    (heads, build.add(input_start, half_start)),
                    (heads, build.add(input_start, other_start)),
                ]
                inputs += [(angles, build.add(angle, half_start)) for angles in (cosines, sines)]

                def rotated(values: Values, combine: Callable[[Any, Any], Any] = combine) -> Any:
                    return combine(build.fmul(values[0], values[2]), build.fmul(values[1], values[3]))

                _elementwise(code, half, inputs, (output, build.add(output_start, half_start)), rotated)
            return ()

        code.loop(code.index(0), count, 1, rotate_head)
        return ()

    code.loop(first, last, 1, rotate_position)


def _silu(code: Code) -> None:
    """silu(first input) times the other inputs."""
    build = code.builder
    *inputs, output, first, last, count = code.arguments
    begin, block_end = (build.mul(block, code.index(LANES)) for block in (first, last))
    end = build.select(build.icmp_unsigned("<", block_end, count), block_end, count)

    def silu(value: Any) -> Any:
        ones = code.float_constant(1.0)
        bits = build.bitcast(value, code.int_lanes)
        exponential = code.exp(
            build.bitcast(build.or_(bits, code.int_constant(-(1 << 31))), code.float_lanes)
        )
        numerator = build.select(build.fcmp_ordered(">=", value, code.zero_lanes), ones, exponential)
        return build.fdiv(build.fmul(value, numerator), build.fadd(ones, exponential))

    def gated(values: Values) -> Any:
        value, *factors = values
        if value.type == code.float_lanes:
            value = silu(value)
        else:
            value = code.first_lane(silu(code.splat(value)))
        for factor in factors:
            value = build.fmul(value, factor)
        return value

    pointers = [(address, begin) for address in inputs]
    _elementwise(code, build.sub(end, begin), pointers, (output, begin), gated)


def _elementwise(
    code: Code, count: Any, inputs: Sequence[Pointer], output: Pointer, change: Callable[[Values], Any]
) -> None:
    """Store `change(values)` for `count` elements of the inputs, LANES at once, then one by one."""
    aligned = code.aligned_end(code.index(0), count, LANES)
    for begin, stop, lanes in ((code.index(0), aligned, LANES), (aligned, count, 0)):

        def apply(index: Any, _: Values, lanes: int = lanes) -> Values:
            values = [
                code.load(base, code.builder.add(offset, index), code.float32, lanes)
                for base, offset in inputs
            ]
            code.store(change(values), output[0], code.builder.add(output[1], index))
            return ()

        code.loop(begin, stop, lanes or 1, apply)
