"""The bytes of the positions of kept elements, in either form of `fusion.compression.positions`. Arithmetic alone."""

from __future__ import annotations

MAX_ELEMENTS = 2**31 - 1


def position_bytes(elements: int, count: int) -> int:
    """The bytes of `count` positions of `elements`; 0 where count alone determines them (none, or all)."""
    if count in (0, elements):
        return 0
    return min(_bytes(elements), planes_bytes(elements, count) + _bytes(unary_bits(elements, count)))


def is_bitmap(elements: int, count: int) -> bool:
    return position_bytes(elements, count) == _bytes(elements)


def low_bits(elements: int, count: int) -> int:
    return min(16, (elements // count).bit_length() - 1)


def planes_bytes(elements: int, count: int) -> int:
    return _bytes(low_bits(elements, count) * count)


def unary_bits(elements: int, count: int) -> int:
    return count + ((elements - 1) >> low_bits(elements, count))


def _bytes(bits: int) -> int:
    return (bits + 7) // 8
