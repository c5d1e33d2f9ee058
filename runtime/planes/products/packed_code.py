"""Products of float32 rows with a float32 matrix, as machine code.

A BLAS library uses another kernel for one row (GEMV) than for several (GEMM), so a row's bits depend on its batch; and a matrix that it
has packed for GEMM is read no faster by GEMV. Here each output is one sum over the columns in order, for any number of rows.

A matrix is packed in blocks of 16 rows, column-major within a block: the weights of one input column are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, jit_compile

# (rows, blocks) of register tiles, in order of preference. The accumulators must fit into the registers of AVX2; with fewer than
# eight of them the latency of the multiply-adds shows.
_TILES = ((6, 1), (5, 1), (4, 1), (3, 1), (2, 2), (2, 1), (1, 4), (1, 1))


@cache
def product() -> Function | None:
    """A function of (input, blocks of the matrix, output; first block, last, rows of the input, columns, row stride of the output in
    floats), which computes 16 outputs a block for each row. None where this machine is not supported."""
    return jit_compile(3, 5, _write)


def _write(code: Code) -> None:
    build = code.builder
    inputs, matrix, output, first, last, rows, columns, width = code.arguments

    def tile(row: Any, count: int, block: Any, blocks: int) -> None:
        row_starts = [build.mul(build.add(row, code.index(r)), columns) for r in range(count)]
        block_starts = [
            build.mul(build.mul(build.add(block, code.index(b)), columns), code.index(LANES))
            for b in range(blocks)
        ]

        def column(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            totals = list(sums)
            scalars = [
                code.splat(code.load(inputs, build.add(start, index), code.float32)) for start in row_starts
            ]
            for b, start in enumerate(block_starts):
                offset = build.add(start, build.mul(index, code.index(LANES)))
                weights = code.load(matrix, offset, code.float32, LANES)
                for r, scalar in enumerate(scalars):
                    totals[b * count + r] = code.fma(scalar, weights, totals[b * count + r])
            return totals

        sums = code.loop(code.index(0), columns, 1, column, [code.zero_lanes] * (count * blocks))
        for n, total in enumerate(sums):
            b, r = divmod(n, count)
            begin = build.mul(build.add(row, code.index(r)), width)
            code.store(
                total, output, build.add(begin, build.mul(build.add(block, code.index(b)), code.index(LANES)))
            )

    code.tiles(first, last, rows, _TILES, tile)
