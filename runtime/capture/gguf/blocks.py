"""Blocks of a GGUF file's quantised tensors as the matrices that our operators read (`fusion.dag.ir.opset_quantised`): the same numbers in
another layout, so that nothing is rounded again.

Q8_0, Q4 and Q5 have a float16 scale, and perhaps a minimum, for 32 numbers. K kinds have blocks of 256 numbers in groups with scales of a few
bits, which become float32 when multiplied out. The 16 values of IQ4 and MXFP4 are not equally spaced: they come from a table of int8, as those
of IQ1, IQ2 and IQ3 come from grids. (ggml-common.h, `gguf.quants`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from fusion.dag.rewrites.quantise import Layout

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[np.generic]

_LOW = np.uint8(15)
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# The values times two, as integers.
TWICE_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)  # bit offsets of two-bit numbers in a byte


def layout_of(kind: str) -> Layout | None:
    """The layout of a matrix in these blocks; None for a kind that has to be dequantised."""
    return _KINDS[kind][0] if kind in _KINDS else None


def unpacked(rows: Bytes, kind: str, block_bytes: int) -> tuple[torch.Tensor, ...]:
    """Numbers, scales and, if the kind has them, minimums of `rows` (rows, bytes)."""
    layout, unpack = _KINDS[kind]
    blocks = rows.reshape(-1, block_bytes)
    with np.errstate(invalid="ignore"):  # a scale may be NaN; then so are its weights
        numbers, scales, minimums = unpack(blocks)
    numbers = numbers.reshape(len(rows), -1)
    if layout.kind == "int4":
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4)
    parts = [numbers.astype(np.int8 if layout.kind == "int8" else np.uint8), scales]
    parts += [minimums] if minimums is not None else []
    return tuple(torch.from_numpy(np.ascontiguousarray(part.reshape(len(rows), -1))) for part in parts)


_Parts = tuple[Bytes | npt.NDArray[np.int8], Array, Array | None]


def _halves(blocks: Bytes, count: int) -> list[npt.NDArray[np.float16]]:
    """The first `count` float16 numbers of each block, (blocks, 1) each."""
    return np.split(np.ascontiguousarray(blocks[:, : 2 * count]).view(np.float16), count, axis=1)


def _nibbles(data: Bytes, run: int) -> Bytes:
    """4-bit numbers: the low nibbles of `run` bytes, then their high nibbles, and so on."""
    runs = data.reshape(len(data), -1, 1, run)
    both = np.concatenate([runs & _LOW, runs >> np.uint8(4)], axis=2)
    return both.reshape(len(data), -1)


def _q8_0(blocks: Bytes) -> _Parts:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 1)[0], None


def _q4_0(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 2:], 16), _halves(blocks, 1)[0], None


def _q4_1(blocks: Bytes) -> _Parts:
    scales, minimums = _halves(blocks, 2)
    return _nibbles(blocks[:, 4:], 16), scales, minimums


def _q5_0(blocks: Bytes) -> _Parts:
    numbers = _fifth_bits(blocks[:, 2:6]) | _nibbles(blocks[:, 6:], 16)
    return numbers.view(np.int8) - np.int8(16), _halves(blocks, 1)[0], None


def _q5_1(blocks: Bytes) -> _Parts:
    scales, minimums = _halves(blocks, 2)
    return _fifth_bits(blocks[:, 4:8]) | _nibbles(blocks[:, 8:], 16), scales, minimums


def _fifth_bits(data: Bytes) -> Bytes:
    return np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little") << np.uint8(4)


def _q4_k(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 16:], 32), *_grouped(blocks)


def _q5_k(blocks: Bytes) -> _Parts:
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)
    numbers = bits.reshape(len(blocks), -1) << np.uint8(4) | _nibbles(blocks[:, 48:], 32)
    return numbers, *_grouped(blocks)


def _grouped(blocks: Bytes) -> tuple[Array, Array]:
    """Scales and minimums of 8 groups: 6-bit integers times the block's two float16 factors."""
    scale, minimum = (half.astype(np.float32) for half in _halves(blocks, 2))
    first, second, rest = np.split(blocks[:, 4:16], 3, axis=1)
    six = np.uint8(63)
    scales = np.concatenate([first & six, rest & _LOW | first >> np.uint8(6) << np.uint8(4)], axis=1)
    minimums = np.concatenate(
        [second & six, rest >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)], axis=1
    )
    return scale * scales.astype(np.float32), -(minimum * minimums.astype(np.float32))


def _q2_k(blocks: Bytes) -> _Parts:
    scale, minimum = (half.astype(np.float32) for half in _halves(blocks[:, 80:], 2))
    scales, minimums = (
        part.astype(np.float32) for part in (blocks[:, :16] & _LOW, blocks[:, :16] >> np.uint8(4))
    )
    return _two_bits(blocks[:, 16:80], 32), scale * scales, -(minimum * minimums)


def _q3_k(blocks: Bytes) -> _Parts:
    bits = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None] & np.uint8(1)
    numbers = bits.reshape(len(blocks), -1) << np.uint8(2) | _two_bits(blocks[:, 32:96], 32)
    six = _nibbles(blocks[:, 96:104], 8) | _two_bits(blocks[:, 104:108], 4) << np.uint8(4)
    (scale,) = _halves(blocks[:, 108:], 1)
    scales = scale.astype(np.float32) * (six.view(np.int8) - np.int8(32)).astype(np.float32)
    return numbers + np.uint8(4), scales, None  # offset by 4: they start at -4, but int4 storage starts at -8


def _two_bits(data: Bytes, run: int) -> Bytes:
    """2-bit numbers: the lowest bits of `run` bytes, then the next ones, and so on."""
    pairs = data.reshape(len(data), -1, 1, run) >> _PAIRS[None, None, :, None]
    return (pairs & np.uint8(3)).reshape(len(data), -1)


def _iq4_nl(blocks: Bytes) -> _Parts:
    return _IQ4[_nibbles(blocks[:, 2:], 16)], _halves(blocks, 1)[0], None


def _iq4_xs(blocks: Bytes) -> _Parts:
    low = np.stack([blocks[:, 4:8] & _LOW, blocks[:, 4:8] >> np.uint8(4)], axis=2).reshape(len(blocks), -1)
    high = (blocks[:, 2:4, None] >> _PAIRS & np.uint8(3)).reshape(len(blocks), -1)
    six = (high << np.uint8(4) | low).view(np.int8) - np.int8(32)
    scale = _halves(blocks, 1)[0].astype(np.float32)
    return _IQ4[_nibbles(blocks[:, 8:], 16)], scale * six.astype(np.float32), None


def _mxfp4(blocks: Bytes) -> _Parts:
    """The scale of 32 numbers is a power of two, stored as its exponent plus 127."""
    return (
        TWICE_MXFP4[_nibbles(blocks[:, 1:], 16)],
        np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128),
        None,
    )


def _q6_k(blocks: Bytes) -> _Parts:
    low, high = _nibbles(blocks[:, :128], 64), _two_bits(blocks[:, 128:192], 32)
    numbers = (high << np.uint8(4) | low).view(np.int8) - np.int8(32)
    scale = np.ascontiguousarray(blocks[:, 208:]).view(np.float16).astype(np.float32)
    return numbers, scale * blocks[:, 192:208].view(np.int8).astype(np.float32), None


def _from_grid(kind: str, scales_of: Callable[[Bytes], Array]) -> Callable[[Bytes], _Parts]:
    """Kinds that take several numbers and signs at once from one of `gguf`'s grids. `scales_of` (blocks, groups): the scale of each group, to be
    multiplied by the block's. With a block scale of 1, the numbers are exact multiples of the group's scale."""

    def unpack(blocks: Bytes) -> _Parts:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        unscaled = blocks.copy()
        unscaled[:, :2] = np.array([1], np.float16).view(np.uint8)
        scales = scales_of(blocks).astype(np.float32)
        numbers = (
            dequantize(unscaled, GGMLQuantizationType[kind]).reshape(*scales.shape, -1) / scales[:, :, None]
        )
        return (
            np.rint(numbers).astype(np.int8).reshape(len(blocks), -1),
            _halves(blocks, 1)[0].astype(np.float32) * scales,
            None,
        )

    return unpack


def _words(data: Bytes) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(data).view(np.uint32)


def _iq1_s(blocks: Bytes) -> Array:
    """Group scales in eighths: the format adds an eighth to the grid's numbers or subtracts it."""
    high = np.ascontiguousarray(blocks[:, 34:]).view(np.uint16)
    return (2 * (high >> 12 & 7) + 1) / 8


def _quarters(scales: Array, factor: float = 1) -> Array:
    return (scales.astype(np.float32) + np.float32(0.5)) * np.float32(factor / 4)


_GRIDS: Mapping[str, tuple[int, Callable[[Bytes], Array]]] = {
    "IQ2_XXS": (32, lambda blocks: _quarters(_words(blocks[:, 2:])[:, 1::2] >> 28)),
    "IQ2_XS": (16, lambda blocks: _quarters(_nibbles(blocks[:, 66:], 1))),
    "IQ2_S": (16, lambda blocks: _quarters(_nibbles(blocks[:, 74:], 1))),
    "IQ3_XXS": (32, lambda blocks: _quarters(_words(blocks[:, 66:]) >> 28, 2)),
    "IQ3_S": (32, lambda blocks: 1 + 2 * _nibbles(blocks[:, 106:], 1)),
    "IQ1_S": (32, _iq1_s),
}
_KINDS: Mapping[str, tuple[Layout, Callable[[Bytes], _Parts]]] = {
    "Q8_0": (Layout("int8"), _q8_0),
    "Q4_0": (Layout("int4"), _q4_0),
    "Q4_1": (Layout("int4", minimums=True), _q4_1),
    "Q5_0": (Layout("int8"), _q5_0),
    "Q5_1": (Layout("int8", minimums=True), _q5_1),
    "Q2_K": (Layout("int4", group=16, scales="float32", minimums=True), _q2_k),
    "Q3_K": (Layout("int4", group=16, scales="float32"), _q3_k),
    "Q4_K": (Layout("int4", scales="float32", minimums=True), _q4_k),
    "Q5_K": (Layout("int8", scales="float32", minimums=True), _q5_k),
    "Q6_K": (Layout("int8", group=16, scales="float32"), _q6_k),
    "IQ4_NL": (Layout("int8"), _iq4_nl),
    "IQ4_XS": (Layout("int8", scales="float32"), _iq4_xs),
    "MXFP4": (Layout("int8", scales="float32"), _mxfp4),
    **{
        kind: (Layout("int8", group=group, scales="float32"), _from_grid(kind, scales_of))
        for kind, (group, scales_of) in _GRIDS.items()
    },
}
