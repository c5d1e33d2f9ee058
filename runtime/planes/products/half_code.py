"""Products of rows with a matrix in bfloat16 or float16, as machine code, with the bits of the library's own where a CPU has AVX2 and no
instructions for half precision.

There the library multiplies with a matrix (outputs, columns) by dot products in float32 (`dot_with_fp32_arith` of PyTorch's
ReducedPrecisionFloatGemvFastPathKernel.cpp): 64 sums, of every 64th product, are added by halving; columns beyond the last multiple
of 64 have eight sums of their own. With a matrix (columns, outputs) it has four sums, of every fourth product (`gemm_notrans_` of
BlasKernel.cpp). It does so row after row, and reads the whole matrix for each. Here several rows share what is read. A product of two
such numbers is exact in float32, so only the order of the sums matters, which is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, jit_compile

SUMS = 64  # of one dot product
PARTS = SUMS // LANES
COLUMNS = 16  # a matrix has a multiple of so many
_TRANSPOSED_SUMS = 4  # of an output, where the matrix is (columns, outputs)
# Outputs at once, by rows at once: their sums, two registers each, must fit into the registers of AVX2
_OUTPUTS = {6: 1, 5: 1, 4: 1, 3: 2, 2: 2, 1: 4}


@cache
def product(bfloat16: bool) -> Function | None:
    """A function of (input in float32: of each row, the columns up to the last multiple of SUMS as (PARTS, n, LANES), then the others;
    matrix (outputs, columns) in bfloat16 or float16; output (rows, outputs) in float32; first block of 16 outputs, last, rows, columns,
    outputs). None where this machine is not supported."""
    return jit_compile(3, 5, lambda code: _Writer(code, bfloat16).write())


@cache
def transposed_product(bfloat16: bool) -> Function | None:
    """A function of (input (rows, columns) in float32, matrix (columns, outputs) in bfloat16 or float16, output (rows, outputs) in float32;
    first block of 16 outputs, last, rows, columns, outputs, a multiple of 16). None where this machine is not supported."""
    return jit_compile(3, 5, lambda code: _TransposedWriter(code, bfloat16).write())


class _Writer:
    def __init__(self, code: Code, bfloat16: bool) -> None:
        self.code, self.build = code, code.builder
        self.bfloat16 = bfloat16

    def write(self) -> None:
        code = self.code
        self.input, self.matrix, self.output, first, last, rows, self.columns, self.outputs = code.arguments
        self.aligned = code.aligned_end(code.index(0), self.columns, SUMS)
        # Sums of a tile: of parts 0 and 2 of each dot product, and of part 1
        place = code.ir.ArrayType(code.float32, LANES * LANES * max(_OUTPUTS))
        self.even_part_sums, self.odd_part_sums = (code.untyped(self.build.alloca(place)) for _ in range(2))
        code.tiles(first, last, rows, [(count, 1) for count in _OUTPUTS], self.tile)

    def tile(self, row: Any, count: int, block: Any, _: int) -> None:
        """The outputs of one block for `count` rows. Part by part: a part of the rows stays in the cache for all outputs."""
        code, build = self.code, self.build
        begin = build.mul(block, code.index(LANES))
        remaining = build.sub(self.outputs, begin)
        count_outputs = build.select(
            build.icmp_unsigned("<", remaining, code.index(LANES)), remaining, code.index(LANES)
        )
        rows = [build.add(row, code.index(r)) for r in range(count)]
        for part in (0, 2, 1, 3):
            done: Any = code.index(0)
            for at_once in dict.fromkeys((_OUTPUTS[count], 1)):
                aligned = code.aligned_end(done, count_outputs, at_once)

                def outputs(
                    index: Any, _: Sequence[Any], part: int = part, at_once: int = at_once
                ) -> Sequence[Any]:
                    numbers = [build.add(index, code.index(n)) for n in range(at_once)]
                    self.add_part(part, rows, begin, numbers)
                    return ()

                code.loop(done, aligned, at_once, outputs)
                done = aligned

    def add_part(self, part: int, rows: Sequence[Any], begin: Any, numbers: Sequence[Any]) -> None:
        """Add one part of the dot products of rows with the outputs `numbers` of the block that starts at output `begin`."""
        code, build = self.code, self.build
        sums = iter(self.sums(part, rows, [build.add(begin, number) for number in numbers]))
        for number in numbers:
            for r, row in enumerate(rows):
                total = next(sums)
                place = build.mul(
                    build.add(build.mul(number, code.index(len(rows))), code.index(r)), code.index(LANES)
                )
                if part == 2:
                    total = build.fadd(code.load(self.even_part_sums, place, code.float32, LANES), total)
                if part == 3:
                    total = build.fadd(code.load(self.odd_part_sums, place, code.float32, LANES), total)
                    total = build.fadd(code.load(self.even_part_sums, place, code.float32, LANES), total)
                    output = build.add(build.mul(row, self.outputs), build.add(begin, number))
                    tail = self.tail(row, build.add(begin, number))
                    code.store(build.fadd(code.lane_sum(total), tail), self.output, output)
                else:
                    code.store(total, self.odd_part_sums if part == 1 else self.even_part_sums, place)

    def sums(self, part: int, rows: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        """The sums of one part of every 64 products, for each output and row."""
        code, build = self.code, self.build
        part_start = build.mul(code.index(part), build.udiv(self.aligned, code.index(PARTS)))
        input_starts = [build.add(build.mul(row, self.columns), part_start) for row in rows]
        matrix_starts = [build.mul(output, self.columns) for output in outputs]

        def step(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            in_part = build.udiv(index, code.index(PARTS))
            inputs = [
                code.load(self.input, build.add(start, in_part), code.float32, LANES)
                for start in input_starts
            ]
            offset = build.add(index, code.index(part * LANES))
            weights = [self.weights(build.add(start, offset)) for start in matrix_starts]
            pairs = [(weight, value) for weight in weights for value in inputs]
            return [code.fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)]

        zeros = [code.zero_lanes] * (len(rows) * len(outputs))
        return code.loop(code.index(0), self.aligned, SUMS, step, zeros)

    def tail(self, row: Any, output: Any) -> Any:
        """The sum of the products beyond the last multiple of 64 columns."""
        code, build = self.code, self.build
        input_start, matrix_start = build.mul(row, self.columns), build.mul(output, self.columns)
        half = LANES // 2

        def step(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            values = code.load(self.input, build.add(input_start, index), code.float32, LANES)
            products = build.fmul(values, self.weights(build.add(matrix_start, index)))
            [total] = sums
            for first in (0, half):
                total = build.fadd(total, code.lanes_of(products, first, half))
            return [total]

        zeros = code.lanes_of(code.zero_lanes, 0, half)
        return code.lane_sum(code.loop(self.aligned, self.columns, LANES, step, [zeros])[0])

    def weights(self, offset: Any) -> Any:
        return _weights(self.code, self.matrix, offset, self.bfloat16)


class _TransposedWriter:
    def __init__(self, code: Code, bfloat16: bool) -> None:
        self.code, self.build = code, code.builder
        self.bfloat16 = bfloat16

    def write(self) -> None:
        self.input, self.matrix, self.output, first, last, rows, self.columns, self.outputs = (
            self.code.arguments
        )
        self.aligned = self.code.aligned_end(self.code.index(0), self.columns, _TRANSPOSED_SUMS)
        self.code.tiles(first, last, rows, [(count, 1) for count in _OUTPUTS], self.tile)

    def tile(self, row: Any, count: int, block: Any, _: int) -> None:
        code, build = self.code, self.build
        rows = [build.add(row, code.index(r)) for r in range(count)]
        input_starts = [build.mul(each, self.columns) for each in rows]
        begin = build.mul(block, code.index(LANES))

        def step(column: Any, sums: Sequence[Any]) -> Sequence[Any]:
            offset = build.add(build.mul(column, self.outputs), begin)
            weights = _weights(code, self.matrix, offset, self.bfloat16)
            scalars = [
                code.load(self.input, build.add(start, column), code.float32) for start in input_starts
            ]
            return [
                code.fma(code.splat(scalar), weights, total)
                for scalar, total in zip(scalars, sums, strict=True)
            ]

        totals: Sequence[Any] = ()
        for part in range(_TRANSPOSED_SUMS):
            zeros = [code.zero_lanes] * count
            # The end of the last step is within the aligned columns: `part` is less than a step.
            sums = code.loop(code.index(part), self.aligned, _TRANSPOSED_SUMS, step, zeros)
            if part == 0:
                totals = code.loop(self.aligned, self.columns, 1, step, sums)
            else:
                totals = [build.fadd(total, each) for total, each in zip(totals, sums, strict=True)]
        for each, total in zip(rows, totals, strict=True):
            code.store(total, self.output, build.add(build.mul(each, self.outputs), begin))


def _weights(code: Code, matrix: Any, offset: Any, bfloat16: bool) -> Any:
    """16 numbers of the matrix, in float32."""
    build = code.builder
    if not bfloat16:
        return build.fpext(code.load(matrix, offset, code.float16, LANES), code.float_lanes)
    stored = build.zext(code.load(matrix, offset, code.int16, LANES), code.int_lanes)
    return build.bitcast(build.shl(stored, code.int_constant(16)), code.float_lanes)
