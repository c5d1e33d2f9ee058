"""Products of float32 rows with a matrix stored as int8 or int4, as machine code.

PyTorch's own kernels for such matrices are fast where a CPU has AVX-512 only: with AVX2 they took 7 to 30 times as long as
the product of the same matrix in float32. The generated code depends only on the bits of a weight, the dtype of the scales and whether
there are minimums.

Each output is a sum over groups in order: the sum over the group's columns in order, times the group's scale. So a row's bits depend
neither on the rest of its batch nor on the number of threads.

Matrices are packed as in `packed_code`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fusion.runtime.planes.products.machine_code import LANES, Code, Function, jit_compile

# (rows, blocks) of register tiles, as in `packed_code`. With 32 registers of 16 floats, two blocks share the inputs loaded of four
# rows.
_TILES = ((4, 1), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1))
_WIDE_TILES = ((4, 2), *_TILES)
# Loop unrolling by the bits of a weight, in bytes of a row: more saves little, and takes longer to compile.
_UNROLLED_BYTES = {8: 4, 4: 1}


@cache
def product(bits: int, half: bool, minimums: bool) -> Function | None:
    """A function of (input, weight, scales, minimums, output; first block, last, rows of the input, groups, columns of a group, row
    stride of the output in floats), which computes 16 outputs a block for each row. Weights have 8 or 4 bits, scales and minimums
    are float16 (`half`) or float32. None where this machine is not supported."""
    return jit_compile(5, 6, lambda code: _Writer(code, bits, half, minimums).write())


class _Writer:
    def __init__(self, code: Code, bits: int, half: bool, minimums: bool) -> None:
        self.code, self.build = code, code.builder
        self.bits, self.minimums = bits, minimums
        self.scale_type = code.float16 if half else code.float32

    def write(self) -> None:
        code, build, args = self.code, self.build, self.code.arguments
        self.input, self.weight, self.scales, self.offsets, self.output = args[:5]
        first, last, rows, self.groups, self.group, self.width = args[5:]
        self.columns = build.mul(self.groups, self.group)
        self.row_width = self.columns if self.bits == 8 else build.lshr(self.columns, code.index(1))

        code.tiles(first, last, rows, _WIDE_TILES if code.wide_registers else _TILES, self.tile)

    def tile(self, row: Any, count: int, block: Any, blocks: int) -> None:
        code, build = self.code, self.build
        row_starts = [build.mul(build.add(row, code.index(r)), self.columns) for r in range(count)]
        block_indices = [build.add(block, code.index(b)) for b in range(blocks)]
        weight_starts = [
            build.mul(block_index, build.mul(self.row_width, code.index(LANES)))
            for block_index in block_indices
        ]
        scale_starts = [
            build.mul(block_index, build.mul(self.groups, code.index(LANES))) for block_index in block_indices
        ]
        columns_per_byte = 8 // self.bits
        columns_per_step = columns_per_byte * _UNROLLED_BYTES[self.bits]
        input_sums = (
            count if self.minimums else 0
        )  # a minimum is multiplied by the sum of the input over its group

        def group(index: Any, totals: Sequence[Any]) -> Sequence[Any]:
            group_start = build.mul(index, self.group)

            def columns(column: Any, sums: Sequence[Any]) -> Sequence[Any]:
                offset = build.add(group_start, column)
                stored_offset = build.mul(
                    offset if self.bits == 8 else build.lshr(offset, code.index(1)), code.index(LANES)
                )
                stored_bytes = [
                    code.load(self.weight, build.add(weight, stored_offset), code.int8, LANES)
                    for weight in weight_starts
                ]
                products, row_sums = list(sums[: count * blocks]), list(sums[count * blocks :])
                for byte_column, values in enumerate(zip(*map(self.unpack, stored_bytes), strict=True)):
                    for r in range(count):
                        scalar = code.load(
                            self.input,
                            build.add(row_starts[r], build.add(offset, code.index(byte_column))),
                            code.float32,
                        )
                        for b, value in enumerate(values):
                            n = b * count + r
                            products[n] = code.fma(code.splat(scalar), value, products[n])
                        if input_sums:
                            row_sums[r] = build.fadd(row_sums[r], scalar)
                return [*products, *row_sums]

            def step(column: Any, sums: Sequence[Any]) -> Sequence[Any]:
                for shift in range(0, columns_per_step, columns_per_byte):
                    sums = columns(build.add(column, code.index(shift)), sums)
                return sums

            start = [code.zero_lanes] * (count * blocks) + [code.zero] * input_sums
            aligned = code.aligned_end(code.index(0), self.group, columns_per_step)
            sums = code.loop(code.index(0), aligned, columns_per_step, step, start)
            if columns_per_step > columns_per_byte:
                sums = code.loop(aligned, self.group, columns_per_byte, columns, sums)
            updated = []
            for b, scale_start in enumerate(scale_starts):
                offset = build.add(scale_start, build.mul(index, code.index(LANES)))
                scales = self.load_scales(self.scales, offset)
                part = slice(b * count, (b + 1) * count)
                block_totals = [code.fma(p, scales, t) for p, t in zip(sums[part], totals[part], strict=True)]
                if input_sums:
                    offsets, row_sums = self.load_scales(self.offsets, offset), sums[count * blocks :]
                    block_totals = [
                        code.fma(code.splat(g), offsets, t)
                        for g, t in zip(row_sums, block_totals, strict=True)
                    ]
                updated += block_totals
            return updated

        totals = code.loop(code.index(0), self.groups, 1, group, [code.zero_lanes] * (count * blocks))
        for n, total in enumerate(totals):
            b, r = divmod(n, count)
            row_start = build.mul(build.add(row, code.index(r)), self.width)
            code.store(
                total, self.output, build.add(row_start, build.mul(block_indices[b], code.index(LANES)))
            )

    def unpack(self, stored: Any) -> list[Any]:
        """The weights in 16 bytes as floats: of one column, or with 4 bits of two."""
        code, build = self.code, self.build
        if self.bits == 8:
            return [build.sitofp(build.sext(stored, code.int_lanes), code.float_lanes)]
        # Widened first: two instructions that read memory; splitting the bytes first takes six more.
        widened = build.zext(stored, code.int_lanes)
        nibbles = [build.and_(widened, code.int_constant(15)), build.lshr(widened, code.int_constant(4))]
        if not self.minimums:
            nibbles = [build.sub(nibble, code.int_constant(8)) for nibble in nibbles]
        return [build.sitofp(nibble, code.float_lanes) for nibble in nibbles]

    def load_scales(self, base: Any, offset: Any) -> Any:
        scales = self.code.load(base, offset, self.scale_type, LANES)
        return (
            scales
            if self.scale_type == self.code.float32
            else self.build.fpext(scales, self.code.float_lanes)
        )
