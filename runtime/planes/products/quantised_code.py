"""Products of float32 rows with a matrix stored as int8 or int4, as machine code.

PyTorch's own kernels for such matrices are fast where a CPU has AVX-512 only: with AVX2 they took 7 to 30 times as long as
the product of the same matrix in float32. What is written depends on two sizes of a number, a dtype and a flag.

For each output, a sum over the columns of a group, one after another, is multiplied by the group's scale and added to what the
groups before gave. So a row's bits depend neither on the rows beside it nor on the number of threads.

Matrices lie in blocks of 16 rows, by columns in a block, as those of `packed_code` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, compiled

# (rows, blocks) that are run at once: see `packed_code`. Where registers hold 16 floats and there are 32 of them, two blocks share
# what is loaded of four rows.
_TILES = ((4, 1), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1))
_WIDE_TILES = ((4, 2), *_TILES)
# Of a row of the matrix, by the bits of a number, from one test of the loop to the next: more saves little, and takes longer to compile.
_BYTES_AT_ONCE = {8: 4, 4: 1}


@cache
def product(bits: int, half: bool, minimums: bool) -> Function | None:
    """(input, weight, scales, minimums, output; first block, last, rows of the input, groups, columns of a group, floats from
    one row of the output to the next) for numbers of 8 or 4 bits, with scales and minimums in float16 (`half`) or float32:
    16 outputs a block for each row. None where there is no such code for this machine."""
    return compiled(5, 6, lambda code: _Writer(code, bits, half, minimums).write())


class _Writer:
    def __init__(self, code: Code, bits: int, half: bool, minimums: bool) -> None:
        self.code, self.at = code, code.at
        self.bits, self.minimums = bits, minimums
        self.share = code.half if half else code.float

    def write(self) -> None:
        code, at, args = self.code, self.at, self.code.arguments
        self.input, self.weight, self.scales, self.offsets, self.output = args[:5]
        first, last, rows, self.groups, self.group, self.width = args[5:]
        self.columns = at.mul(self.groups, self.group)
        self.held = self.columns if self.bits == 8 else at.lshr(self.columns, code.number(1))

        code.tiles(first, last, rows, _WIDE_TILES if code.wide else _TILES, self.tile)

    def tile(self, row: Any, count: int, block: Any, blocks: int) -> None:
        code, at = self.code, self.at
        inputs = [at.mul(at.add(row, code.number(r)), self.columns) for r in range(count)]
        begins = [at.add(block, code.number(b)) for b in range(blocks)]
        weights = [at.mul(begin, at.mul(self.held, code.number(LANES))) for begin in begins]
        shares = [at.mul(begin, at.mul(self.groups, code.number(LANES))) for begin in begins]
        together = 8 // self.bits  # columns in a byte
        at_once = together * _BYTES_AT_ONCE[self.bits]
        sums = count if self.minimums else 0  # of the input over a group: what a minimum is multiplied by

        def group(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
            begin = at.mul(index, self.group)

            def columns(column: Any, found: Sequence[Any]) -> Sequence[Any]:
                place = at.add(begin, column)
                held = at.mul(place if self.bits == 8 else at.lshr(place, code.number(1)), code.number(LANES))
                stored = [
                    code.load(self.weight, at.add(weight, held), code.byte, LANES) for weight in weights
                ]
                products, given = list(found[: count * blocks]), list(found[count * blocks :])
                for step, numbers in enumerate(zip(*map(self.numbers, stored), strict=True)):
                    for r in range(count):
                        one = code.load(
                            self.input, at.add(inputs[r], at.add(place, code.number(step))), code.float
                        )
                        for b, number in enumerate(numbers):
                            n = b * count + r
                            products[n] = code.fma(code.spread(one), number, products[n])
                        if sums:
                            given[r] = at.fadd(given[r], one)
                return [*products, *given]

            def several(column: Any, found: Sequence[Any]) -> Sequence[Any]:
                for more in range(0, at_once, together):
                    found = columns(at.add(column, code.number(more)), found)
                return found

            start = [code.zeros] * (count * blocks) + [code.zero] * sums
            whole = code.whole(code.number(0), self.group, at_once)
            found = code.loop(code.number(0), whole, at_once, several, start)
            if at_once > together:
                found = code.loop(whole, self.group, together, columns, found)
            made = []
            for b, share in enumerate(shares):
                place = at.add(share, at.mul(index, code.number(LANES)))
                scales = self.load_shares(self.scales, place)
                part = slice(b * count, (b + 1) * count)
                mine = [code.fma(p, scales, t) for p, t in zip(found[part], totals[part], strict=True)]
                if sums:
                    offsets, given = self.load_shares(self.offsets, place), found[count * blocks :]
                    mine = [code.fma(code.spread(g), offsets, t) for g, t in zip(given, mine, strict=True)]
                made += mine
            return made

        totals = code.loop(code.number(0), self.groups, 1, group, [code.zeros] * (count * blocks))
        for n, total in enumerate(totals):
            b, r = divmod(n, count)
            begin = at.mul(at.add(row, code.number(r)), self.width)
            code.store(total, self.output, at.add(begin, at.mul(begins[b], code.number(LANES))))

    def numbers(self, stored: Any) -> list[Any]:
        """The numbers in 16 bytes as floats: of one column, or of two with 4 bits."""
        code, at = self.code, self.at
        if self.bits == 8:
            return [at.sitofp(at.sext(stored, code.integers), code.floats)]
        # Made wide first: two instructions that read memory, where bytes that are halved before take six more.
        wide = at.zext(stored, code.integers)
        parts = [at.and_(wide, code.whole_numbers(15)), at.lshr(wide, code.whole_numbers(4))]
        if not self.minimums:
            parts = [at.sub(part, code.whole_numbers(8)) for part in parts]
        return [at.sitofp(part, code.floats) for part in parts]

    def load_shares(self, base: Any, place: Any) -> Any:
        found = self.code.load(base, place, self.share, LANES)
        return found if self.share == self.code.float else self.at.fpext(found, self.code.floats)
