"""Numbers in fewer bits: float32 (n,) to bytes (uint8 tensor) and back, for the lossy codecs.

A payload of the right length always decodes to n numbers or is refused with ValueError; its length is the caller's check.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from fusion.compression.spec import BLOCK, EXPONENT_BYTES, SCALE_BYTES, block_bytes, half_bytes

CHUNK = 1 << 16  # elements processed at once: temporaries stay in the CPU's cache


class Packer(Protocol):
    def pack(self, values: torch.Tensor) -> torch.Tensor: ...

    def unpack(self, payload: torch.Tensor, count: int) -> torch.Tensor: ...


class BFloat16:
    """Rounded to nearest even; a magnitude above 3.39e38 becomes infinite."""

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def unpack(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        return payload.view(torch.bfloat16).float()


class Half:
    """float16 after all values were scaled by one power of two, which puts the largest finite one between 2**14 and
    2**15: nothing overflows, and a tensor of small gradients loses no more than one of large activations. What would be
    rounded up to 2**128 becomes the largest value below it.

        exponent  int16; value = fp16 * 2**exponent        values  fp16 (n,)

    11 bits of precision down to 2**-29 of the largest magnitude, absolute error 2**-39 of it below. NaN and infinities
    stay what they are.
    """

    # Both factors are normal float32, and LARGEST * 2**HIGHEST is about the largest one
    LOWEST, HIGHEST = -126, 113
    LARGEST = 2.0**15 - 2.0**4  # the last float16 below 2**15, which times 2**HIGHEST is infinite

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        payload = torch.empty(half_bytes(len(values)), dtype=torch.uint8)
        exponent = self._exponent(values)
        payload[:EXPONENT_BYTES].view(torch.int16)[0] = exponent
        halves = payload[EXPONENT_BYTES:].view(torch.float16)
        for chunk in _chunks(len(values)):
            scaled = values[chunk] * 2.0**-exponent
            halves[chunk] = _clamped(scaled, self.LARGEST) if exponent == self.HIGHEST else scaled
        return payload

    def unpack(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        exponent = int(payload[:EXPONENT_BYTES].view(torch.int16)[0])
        if not self.LOWEST <= exponent <= self.HIGHEST:
            raise ValueError(f"fp16 values scaled by 2**{exponent}")
        return payload[EXPONENT_BYTES:].view(torch.float16).float().mul_(2.0**exponent)

    def _exponent(self, values: torch.Tensor) -> int:
        peak = _peak(values)
        if not math.isfinite(peak):
            peak = _peak(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        return max(self.LOWEST, math.frexp(peak)[1] - 15) if peak else 0


class Blocks:
    """Signed integers of `bits` bits, each block of 64 values scaled by its largest magnitude (block-wise absmax
    quantisation, as in Dettmers et al., arXiv 2110.02861, with a linear grid).

        scales  bfloat16 (blocks,), rounded up; value = code * scale        codes  (n,), two to a byte for 4 bits:
                                                                            the first half of them low, the second high

    The error of a value is at most 0.504 / 127 (8 bits) or 0.504 / 7 (4 bits) of the largest magnitude in its block.
    bfloat16 because it has the range of float32: a float16 scale would lose gradients below 1e-5. The lowest
    code stands for NaN, which is what NaN and infinities become; a block whose largest magnitude is below 1e-34
    becomes zero.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._limit = (1 << (bits - 1)) - 1
        self._nan = -self._limit - 1
        # The largest bfloat16 that can be multiplied with every code, as bits.
        self._last = int(_bits(torch.tensor(torch.finfo(torch.float32).max / self._limit))) >> 16

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        count = len(values)
        payload = torch.empty(block_bytes(count, self._bits), dtype=torch.uint8)
        scales, packed = self._parts(payload, count)
        codes = packed.view(torch.int8) if self._bits == 8 else torch.empty(count, dtype=torch.int8)
        for chunk in _chunks(count):
            scales_at = slice(chunk.start // BLOCK, -(-chunk.stop // BLOCK))
            scales[scales_at], codes[chunk] = self._quantise(values[chunk])
        if self._bits == 4:
            half = len(packed)
            torch.bitwise_and(codes[:half], 15, out=packed.view(torch.int8))
            packed[: count - half] |= codes[half:].view(torch.uint8) << 4
        return payload

    def unpack(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        scale_bits, packed = self._parts(payload, count)
        if bool(torch.any((scale_bits < 0) | (scale_bits > self._last))):
            raise ValueError("a scale that is negative, not finite or too large for its codes")
        codes = packed.view(torch.int8)
        if self._bits == 4:
            codes = torch.cat((codes << 4 >> 4, (codes >> 4)[: count - len(codes)]))
        scales = _bfloat16(scale_bits)
        values = torch.empty(count)
        for chunk in _chunks(count):
            full_end = chunk.start + (chunk.stop - chunk.start) // BLOCK * BLOCK
            blocks = scales[chunk.start // BLOCK : full_end // BLOCK, None]
            torch.mul(
                codes[chunk.start : full_end].view(-1, BLOCK),
                blocks,
                out=values[chunk.start : full_end].view(-1, BLOCK),
            )
            if full_end < chunk.stop:
                torch.mul(codes[full_end : chunk.stop], scales[-1], out=values[full_end : chunk.stop])
        non_finite = codes == self._nan
        if bool(non_finite.any()):
            values[non_finite] = torch.nan
        return values

    def _parts(self, payload: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale_bytes = SCALE_BYTES * -(-count // BLOCK)
        return payload[:scale_bytes].view(torch.int16), payload[scale_bytes:]

    def _quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bits of the scales, int16 (blocks,), and codes, int8 (n,)."""
        count = len(values)
        if count % BLOCK:
            values = torch.nn.functional.pad(values, (0, -count % BLOCK))
        blocks = values.view(-1, BLOCK)
        peaks = blocks.abs().amax(1)
        non_finite = None
        largest = self._limit * float(_bfloat16(torch.tensor(self._last)))
        if not float(peaks.max()) <= largest:  # also where it is NaN
            non_finite = ~blocks.isfinite()
            blocks = blocks.masked_fill(non_finite, 0.0).clamp_(-largest, largest)
            peaks = blocks.abs().amax(1)
        scale_bits = (_bits(peaks / self._limit) + 0xFFFF) >> 16
        scale_bits.masked_fill_(peaks < 1e-34, 0)
        inverse = _bfloat16(scale_bits).reciprocal_().masked_fill_(scale_bits == 0, 0.0)
        codes = (blocks * inverse[:, None]).round_()
        if non_finite is not None:
            codes.masked_fill_(non_finite, self._nan)
        return scale_bits.to(torch.int16), codes.to(torch.int8).view(-1)[:count]


def in_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 numbers in `dtype`, finite ones clamped to its range: a scale that was rounded up can take the largest of a block
    above it."""
    if dtype == torch.float32 or not len(values):
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    if not _peak(values) <= largest:  # also where it is NaN
        values = _clamped(values, largest)
    return values.to(dtype)


def _clamped(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Finite numbers clamped to a magnitude of `largest`; NaN and infinities stay."""
    return torch.where(values.isinf(), values, values.clamp(-largest, largest))


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, CHUNK):
        yield slice(start, min(count, start + CHUNK))


def _peak(values: torch.Tensor) -> float:
    # Two plain passes: `aminmax` and the infinity norm are slower, `abs` makes a copy.
    return max(-float(values.amin()), float(values.amax())) if len(values) else 0.0


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.float().view(torch.int32)


def _bfloat16(bits: torch.Tensor) -> torch.Tensor:
    return (bits.to(torch.int32) << 16).view(torch.float32)
