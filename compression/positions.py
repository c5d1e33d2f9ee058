"""Which of n elements are there: a strictly ascending run of positions to bytes and back. NumPy only.

The length on the wire is a function of (elements, count) alone, so nothing has to be said about it and nothing about
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

MAX_ELEMENTS = 2**31 - 1

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int32]


def position_bytes(elements: int, count: int) -> int:
    """What `count` positions of `elements` take; 0 where there is nothing to say (none of them, or all)."""
    if count in (0, elements):
        return 0
    return min(_bytes(elements), _planes_bytes(elements, count) + _bytes(_unary_bits(elements, count)))


def pack(positions: NDArray[np.signedinteger[Any]], elements: int) -> Bytes:
    """`position_bytes` bytes for strictly ascending positions below `elements` (the caller's promise)."""
    count = len(positions)
    if count in (0, elements):
        return np.empty(0, np.uint8)
    if _is_bitmap(elements, count):
        return _set_bits(positions, elements)
    low_bits = _low_bits(elements, count)
    unary = _set_bits((positions >> low_bits) + np.arange(count), _unary_bits(elements, count))
    planes = np.empty((low_bits, count), np.uint8)
    low = positions.astype(np.uint16)  # all that is looked at: low_bits <= 16
    for bit in range(low_bits):
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
    if _is_bitmap(elements, count):
        return _found_bits(payload, elements, count).astype(np.int32)
    low_bits, planes_bytes = _low_bits(elements, count), _planes_bytes(elements, count)
    unary = _found_bits(payload[planes_bytes:], _unary_bits(elements, count), count)
    planes = np.unpackbits(payload[:planes_bytes], count=low_bits * count, bitorder="little")
    low = np.zeros(count, np.uint16)
    for bit in range(low_bits):
        low |= planes[bit * count : (bit + 1) * count].astype(np.uint16) << np.uint16(bit)
    found = ((unary - np.arange(count)) << low_bits) | low
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


def _is_bitmap(elements: int, count: int) -> bool:
    return position_bytes(elements, count) == _bytes(elements)


def _low_bits(elements: int, count: int) -> int:
    return min(16, (elements // count).bit_length() - 1)


def _planes_bytes(elements: int, count: int) -> int:
    return _bytes(_low_bits(elements, count) * count)


def _unary_bits(elements: int, count: int) -> int:
    return count + ((elements - 1) >> _low_bits(elements, count))


def _bytes(bits: int) -> int:
    return (bits + 7) // 8
