from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.compression.position_sizes import position_bytes
from fusion.compression.positions import pack, unpack


@st.composite
def sets(draw: st.DrawFn) -> tuple[int, list[int]]:
    elements = draw(st.integers(1, 5000))
    dense = draw(st.booleans())
    most = elements if dense else max(1, elements // 20)
    return elements, sorted(draw(st.sets(st.integers(0, elements - 1), max_size=most)))


@given(sets())
@settings(max_examples=examples(300), deadline=None)
def test_positions_survive_in_the_bytes_accounted_for(case: tuple[int, list[int]]) -> None:
    elements, chosen = case
    packed = pack(np.array(chosen, np.int64), elements)
    assert len(packed) == position_bytes(elements, len(chosen)) <= (elements + 7) // 8
    assert unpack(packed, elements, len(chosen)).tolist() == chosen


@pytest.mark.parametrize("elements", [1_000, 65_536, 1_000_003])
@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.05, 0.1, 0.2])
def test_positions_cost_little_more_than_their_information(elements: int, density: float) -> None:
    count = max(1, round(elements * density))
    d = count / elements
    bound = count * -(math.log2(d) + (1 - d) / d * math.log2(1 - d)) / 8
    assert position_bytes(elements, count) <= bound + 0.65 * count / 8 + 3


@pytest.mark.parametrize("chosen", [[0, 1, 2], [9997, 9998, 9999], [0, 5000, 9999]])
def test_clustered_positions_cost_no_more(chosen: list[int]) -> None:
    assert unpack(pack(np.array(chosen), 10_000), 10_000, 3).tolist() == chosen


@given(st.integers(1, 3000), st.integers(0, 3000), st.binary(max_size=500), st.booleans())
@settings(max_examples=examples(500), deadline=None)
def test_hostile_bytes_ascend_below_the_size_or_are_refused(
    elements: int, count: int, data: bytes, cut: bool
) -> None:
    count = min(count, elements)
    right = position_bytes(elements, count)
    raw = np.frombuffer(data if cut else (data + bytes(right))[:right], np.uint8)
    try:
        found = unpack(raw, elements, count)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert len(raw) == right and len(found) == count
        assert bool(np.all(np.diff(found) > 0))
        assert count == 0 or 0 <= found[0] <= found[-1] < elements


def _elias_fano(elements: int, low: list[int], unary: list[int], low_bits: int) -> np.ndarray:
    """By hand: bytes for low parts and set bits that `pack` would never make together."""
    planes = np.array([(value >> bit) & 1 for bit in range(low_bits) for value in low], np.uint8)
    flags = np.zeros(len(low) + ((elements - 1) >> low_bits), np.uint8)
    flags[unary] = 1
    return np.concatenate((np.packbits(planes, bitorder="little"), np.packbits(flags, bitorder="little")))


@pytest.mark.parametrize(
    ("low", "unary", "reason"),
    [
        ([5, 6, 7], [0, 1, 2], None),
        ([5, 5, 7], [0, 1, 2], "do not ascend"),
        ([6, 5, 7], [0, 1, 2], "do not ascend"),
        ([5, 6, 31], [0, 1, 7], "position 191 of 170"),
        ([5, 6, 7], [0, 1], "2 positions where 3 are right"),
        ([5, 6, 7], [0, 1, 2, 3], "4 positions where 3 are right"),
    ],
)
def test_each_kind_of_lie_is_named(low: list[int], unary: list[int], reason: str | None) -> None:
    # 170 // 3 is 56: five low bits, and a unary part of 3 + 5 bits, which fill their byte.
    raw = _elias_fano(170, low, unary, 5)
    assert len(raw) == position_bytes(170, 3)
    if reason is None:
        assert unpack(raw, 170, 3).tolist() == low
    else:
        with pytest.raises(ValueError, match=reason):
            unpack(raw, 170, 3)


def test_a_stream_cut_short_is_refused() -> None:
    raw = pack(np.arange(0, 10_000, 100), 10_000)
    for end in (0, 1, len(raw) - 1):
        with pytest.raises(ValueError, match="are right"):
            unpack(raw[:end], 10_000, 100)
