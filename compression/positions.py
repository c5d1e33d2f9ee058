"""Positions of the kept elements: strictly ascending integers to bytes and back. NumPy only.

The length on the wire is a function of (elements, count) alone, so it is not transmitted and cannot be
forged. Both sides use the shorter of two forms:

    Elias-Fano  the low b bits of each position, b = floor(log2(elements / count)), as b planes of `count` bits; then the
                high bits in unary: bit (position >> b) + i is set for the i-th position.
                Within 0.6 bits a position of the information bound H(d)/d
                (Elias, J. ACM 21(2), 1974: "Efficient storage and retrieval by content and address of static files")
    bitmap      one bit for each element: shorter from a density of about a quarter

Bits are packed least significant first. No more than 2**31 - 1 elements: positions are int32 in memory.
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
    low_width = low_bits(elements, count)
    unary = _set_bits((positions >> low_width) + np.arange(count), unary_bits(elements, count))
    planes = np.empty((low_width, count), np.uint8)
    low = positions.astype(np.uint16)  # enough: lows <= 16
    for bit in range(low_width):
        planes[bit] = (low >> np.uint16(bit)) & np.uint16(1)
    return np.concatenate((np.packbits(planes.reshape(-1), bitorder="little"), unary))


def unpack(payload: Bytes, elements: int, count: int) -> Positions:
    """`count` positions, strictly ascending, below `elements`. ValueError for bytes that do not encode them."""
    if len(payload) != position_bytes(elements, count):
        raise ValueError(
            f"{len(payload)} bytes for {count} of {elements} positions: {position_bytes(elements, count)} are right"
        )
    if count in (0, elements):
        return np.arange(count, dtype=np.int32)
    if is_bitmap(elements, count):
        return _get_bits(payload, elements, count).astype(np.int32)
    low_width, planes_end = low_bits(elements, count), planes_bytes(elements, count)
    unary = _get_bits(payload[planes_end:], unary_bits(elements, count), count)
    planes = np.unpackbits(payload[:planes_end], count=low_width * count, bitorder="little")
    low = np.zeros(count, np.uint16)
    for bit in range(low_width):
        low |= planes[bit * count : (bit + 1) * count].astype(np.uint16) << np.uint16(bit)
    positions = ((unary - np.arange(count)) << low_width) | low
    if positions[-1] >= elements:
        raise ValueError(f"position {positions[-1]} of {elements} elements")
    if not np.all(positions[1:] > positions[:-1]):
        raise ValueError("positions that do not ascend")
    return positions.astype(np.int32)


def _set_bits(positions: NDArray[np.signedinteger[Any]], bits: int) -> Bytes:
    flags = np.zeros(bits, np.uint8)
    flags[positions] = 1
    return np.packbits(flags, bitorder="little")


def _get_bits(payload: Bytes, bits: int, count: int) -> NDArray[np.int64]:
    positions = np.flatnonzero(np.unpackbits(payload, count=bits, bitorder="little").view(np.bool_))
    if len(positions) != count:
        raise ValueError(f"{len(positions)} positions where {count} are right")
    return positions
