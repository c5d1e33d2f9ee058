"""Attention of single positions by kernels, against that of a session alone on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.devices import NEEDS_GPU

from fusion.runtime.planes.attention import ScoreMods
from fusion.runtime.planes.cuda.fixed_batch import ROWS
from fusion.runtime.planes.cuda.row_attention import RowAttention
from fusion.runtime.planes.kv_cache import CacheShape, SessionCache

pytestmark = NEEDS_GPU
SLOT, CAPACITY = 4, 2000
LENGTHS = [0, 1, 63, 64, 255, 256, 257, 511, 700, 1500]  # of what is there before the rows

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"held": 2},
    "a window": {"window": 100},
    "a window of chunks": {"window": 600, "held": 1},
    "uneven widths": {"width": 48, "broad": 80},
    "wide": {"width": 192, "broad": 256},
    "capped": {"scored": ScoreMods(softcap=3.0)},
    "sloped": {"scored": ScoreMods(slopes=(0.5, 0.25, 0.125, 0.0625))},
    "with sinks": {"scored": ScoreMods(sinks=torch.tensor([0.5, -1.0, 2.0, 6.0])), "window": 300},
}


class Case:
    """Four heads, and sessions of unlike lengths on both devices."""

    def __init__(
        self, held: int = 4, width: int = 64, broad: int = 64, window: int | None = None,
        scored: ScoreMods | None = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.held, self.widths, self.dtype = held, (width, broad), dtype
        self.options = width**-0.5 * 2, window
        self.scored = scored
        self.state = RowAttention([SLOT], torch.device("cuda"))
        shapes = {SLOT: (CacheShape(held, width, dtype), CacheShape(held, broad, dtype))}
        self.there = [SessionCache(shapes, CAPACITY, torch.device("cuda")) for _ in LENGTHS]
        self.here = [SessionCache(shapes, CAPACITY, torch.device("cpu")) for _ in LENGTHS]
        for there, here, length in zip(self.there, self.here, LENGTHS, strict=True):
            if length:
                query, *new = self.values(length)
                for cache, device in ((there, "cuda"), (here, "cpu")):
                    cache.begin(0, length)
                    cache.attend(query.to(device), [each.to(device) for each in new], SLOT, *self.options)
                    cache.commit()

    def values(self, count: int) -> list[torch.Tensor]:
        """Query, key and value of so many positions."""
        width, broad = self.widths
        sizes = ((4, width), (self.held, width), (self.held, broad))
        return [torch.randn(1, heads, count, size).to(self.dtype) for heads, size in sizes]

    def alone(self, place: int, values: Sequence[torch.Tensor]) -> torch.Tensor:
        cache, (query, *new) = self.here[place], values
        cache.begin(cache.length, query.shape[2], singly=True)
        found = cache.attend(query, new, SLOT, *self.options, self.scored)
        cache.commit()
        return found

    def rows(self, places: Sequence[int], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """A row of each of these sessions; those of one session follow one another."""
        counts = {place: places.count(place) for place in places}
        positions = []
        for place, count in counts.items():
            cache = self.there[place]
            positions += range(cache.length, cache.length + count)
            cache.begin(cache.length, count, singly=True)
        padded = [
            torch.cat([v, v.new_zeros(1, v.shape[1], ROWS - v.shape[2], v.shape[3])], 2) for v in values
        ]
        query, *new = (each.to("cuda").transpose(1, 2).contiguous().transpose(1, 2) for each in padded)
        scored = self.scored
        if scored is not None and scored.sinks is not None:
            scored = scored._replace(sinks=scored.sinks.to("cuda"))
        self.state.chunks = self.state.begin([self.there[place] for place in places], positions)
        found = self.state.attend(query, new, SLOT, *self.options, scored).cpu()
        for place in counts:
            self.there[place].commit()
        assert not found[:, :, len(places) :].any()
        return found[:, :, : len(places)]


def of(values: Sequence[torch.Tensor], at: int, count: int = 1) -> list[torch.Tensor]:
    return [value.narrow(2, at, count) for value in values]


def each_row(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place, first row, how many)."""
    for place in dict.fromkeys(places):
        yield place, places.index(place), places.count(place)


@pytest.mark.parametrize("name", CASES)
def test_each_row_sees_what_its_session_holds(name: str) -> None:
    case = Case(**CASES[name])
    for places in ([*range(len(LENGTHS))], [0, 0, 0, 4, 5, 5, 9], [8]):
        values = case.values(len(places))
        found = case.rows(places, values)
        for place, first, count in each_row(places):
            wanted = case.alone(place, of(values, first, count))
            torch.testing.assert_close(found[:, :, first : first + count], wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_as_near_as_that_rounds(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    places = [*range(len(LENGTHS))]
    values = case.values(len(places))
    found = case.rows(places, values)
    for place in places:
        wanted = case.alone(place, of(values, place))
        torch.testing.assert_close(found[:, :, place : place + 1], wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_whoever_else_is_there(name: str) -> None:
    case = Case(**CASES[name])
    places = [*range(len(LENGTHS))]
    values = case.values(len(places))
    together = case.rows(places, values)
    for place in places:
        case.there[place].cut(LENGTHS[place])
    for place in places:
        assert torch.equal(case.rows([place], of(values, place)), together[:, :, place : place + 1])
