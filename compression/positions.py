"""Which of n elements are there: a strictly ascending run of positions to bytes and back. NumPy only.

The length on the wire is a function of (elements, count) alone, so it is not transmitted, and nothing about
it can be forged. Of two forms the shorter is used, the same on both sides:

    Elias-Fano  of each position the low b bits as they are, b = floor(log2(elements / count)), one plane of `count`
                bits for each of them; then the rest of it, counted up in unary: bit (position >> b) + i for the i-th.
                Within 0.6 bits a position of the information bound H(d)/d
                (Elias, J. ACM 21(2), 1974: "Efficient storage and retrieval by content and address of static files")
    bitmap      one bit for each element: shorter from a density of about a quarter

Bits lie in bytes with the first one lowest. No more than 2**31 - 1 elements: positions are int32 in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusion.compression.position_sizes import (
    is_bitmap,
    low_bits,
    planes_bytes,
    position_bytes,
    unary_bits,
)

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int32]


def pack(positions: NDArray[np.signedinteger[Any]], elements: int) -> Bytes:
    """`position_bytes` bytes for strictly ascending positions below `elements` (the caller's promise)."""
    count = len(positions)
    if count in (0, elements):
        return np.empty(0, np.uint8)
    if is_bitmap(elements, count):
        return _set_bits(positions, elements)
    lows = low_bits(elements, count)
    unary = _set_bits((positions >> lows) + np.arange(count), unary_bits(elements, count))
    planes = np.empty((lows, count), np.uint8)
    low = positions.astype(np.uint16)  # all that is looked at: lows <= 16
    for bit in range(lows):
        planes[bit] = (low >> np.uint16(bit)) & np.uint16(1)
    return np.concatenate((np.packbits(planes.reshape(-1), bitorder="little"), unary))


def unpack(payload: Bytes, elements: int, count: int) -> Positions:
    """The positions: `count` of them, strictly ascending, below `elements`. ValueError for bytes that are not that."""
    if len(payload) != position_bytes(elements, count):
        raise ValueError(
            f"{len(payload)} bytes for {count} of {elements} positions: {position_bytes(elements, count)} are right"
        )
    if count in (0, elements):
        return np.arange(count, dtype=np.int32)
    if is_bitmap(elements, count):
        return _found_bits(payload, elements, count).astype(np.int32)
    lows, begin = low_bits(elements, count), planes_bytes(elements, count)
    unary = _found_bits(payload[begin:], unary_bits(elements, count), count)
    planes = np.unpackbits(payload[:begin], count=lows * count, bitorder="little")
    low = np.zeros(count, np.uint16)
    for bit in range(lows):
        low |= planes[bit * count : (bit + 1) * count].astype(np.uint16) << np.uint16(bit)
    found = ((unary - np.arange(count)) << lows) | low
    if found[-1] >= elements:
        raise ValueError(f"position {found[-1]} of {elements} elements")
    if not np.all(found[1:] > found[:-1]):
        raise ValueError("positions that do not ascend")
    return found.astype(np.int32)


def _set_bits(positions: NDArray[np.signedinteger[Any]], bits: int) -> Bytes:
    flags = np.zeros(bits, np.uint8)
    flags[positions] = 1
    return np.packbits(flags, bitorder="little")


def _found_bits(payload: Bytes, bits: int, count: int) -> NDArray[np.int64]:
    found = np.flatnonzero(np.unpackbits(payload, count=bits, bitorder="little").view(np.bool_))
    if len(found) != count:
        raise ValueError(f"{len(found)} positions where {count} are right")
    return found
