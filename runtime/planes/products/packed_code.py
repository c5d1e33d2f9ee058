"""Products of float32 rows with a float32 matrix, as machine code.

A library takes another way for one row than for several, so that a row's bits depend on its company; and what it packs for
several rows is read no faster for one. Here each output is one sum over the columns, one after another, for any number of rows.

Matrices lie in blocks of 16 rows, by columns in a block: what is multiplied by one number of the input lies together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, compiled

# (rows, blocks) that are run at once, as long as there are as many: their sums have to fit into the registers of AVX2, and
# fewer than eight of its registers of sums would wait for each other.
_TILES = ((6, 1), (5, 1), (4, 1), (3, 1), (2, 2), (2, 1), (1, 4), (1, 1))


@cache
def product() -> Function | None:
    """(input, blocks of the matrix, output; first block, last, rows of the input, columns, floats from one row of the output to
    the next): 16 outputs a block for each row. None where there is no such code for this machine."""
    return compiled(3, 5, _write)


def _write(code: Code) -> None:
    at = code.at
    given, matrix, made, first, last, rows, columns, width = code.arguments

    def tile(row: Any, count: int, block: Any, blocks: int) -> None:
        inputs = [at.mul(at.add(row, code.number(r)), columns) for r in range(count)]
        starts = [
            at.mul(at.mul(at.add(block, code.number(b)), columns), code.number(LANES)) for b in range(blocks)
        ]

        def column(index: Any, sums: Sequence[Any]) -> Sequence[Any]:
            found = list(sums)
            ones = [code.spread(code.load(given, at.add(start, index), code.float)) for start in inputs]
            for b, start in enumerate(starts):
                place = at.add(start, at.mul(index, code.number(LANES)))
                numbers = code.load(matrix, place, code.float, LANES)
                for r, one in enumerate(ones):
                    found[b * count + r] = code.fma(one, numbers, found[b * count + r])
            return found

        sums = code.loop(code.number(0), columns, 1, column, [code.zeros] * (count * blocks))
        for n, total in enumerate(sums):
            b, r = divmod(n, count)
            begin = at.mul(at.add(row, code.number(r)), width)
            code.store(total, made, at.add(begin, at.mul(at.add(block, code.number(b)), code.number(LANES))))

    code.tiles(first, last, rows, _TILES, tile)
