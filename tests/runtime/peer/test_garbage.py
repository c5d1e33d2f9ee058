from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, field

import pytest

from fusion.runtime.peer import garbage
from fusion.runtime.peer.garbage import (
    BACKSTOP_COLLECTIONS,
    CHECK_SECONDS,
    LARGE_BYTES,
    MAX_YOUNG_COLLECTIONS,
    SHARE,
    Garbage,
    collected,
)


@dataclass
class Collector:
    """A process that stands still for `seconds` each time."""

    seconds: float
    now: float = 100.0
    young: int = 0
    at: list[float] = field(default_factory=list)

    def collect(self) -> None:
        self.at.append(self.now)
        self.now += self.seconds


def test_however_often_it_is_asked_for_it_takes_a_hundredth_of_the_time() -> None:
    process = Collector(seconds=0.08)
    made = Garbage(process.collect, lambda: process.now, lambda: process.young)
    until = process.now + 600.0
    while process.now < until:
        made.request()
        made.collect_if_due()
        process.now += 0.5
    assert 0.5 * SHARE < 0.08 * len(process.at) / 600.0 <= SHARE + 0.08 / 600.0
    assert process.at[0] == 100.0  # at once where it has not been done lately


def test_after_a_large_stage_it_is_done_at_once() -> None:
    process, held = Collector(seconds=0.08), [200 << 20]
    made = Garbage(process.collect, lambda: process.now, lambda: process.young, lambda: held[0])
    for more, done in ((0, 0), (LARGE_BYTES, 1), (LARGE_BYTES, 1), (2 * LARGE_BYTES, 2)):
        held[0] = (200 << 20) + more
        made.request()
        assert len(process.at) == done


def test_it_is_done_where_somebody_asked_or_the_oldest_generation_is_due_and_else_not() -> None:
    process = Collector(seconds=0.0)
    made = Garbage(process.collect, lambda: process.now, lambda: process.young)
    made.collect_if_due()
    assert not process.at
    made.request()
    made.collect_if_due()
    made.collect_if_due()
    assert len(process.at) == 1
    process.young = MAX_YOUNG_COLLECTIONS
    made.collect_if_due()
    assert len(process.at) == 2


def test_the_oldest_generation_is_looked_at_here_alone_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "CHECK_SECONDS", 0.001)
    before = gc.get_threshold()

    async def main() -> None:
        async with collected() as made:
            assert gc.get_threshold() == (*before[:2], BACKSTOP_COLLECTIONS)
            loop = [made]
            loop.append(loop)  # type: ignore[arg-type]
            gone = asyncio.Event()
            monkeypatch.setattr(made, "_collect", gone.set)
            made.request()
            await asyncio.wait_for(gone.wait(), 5.0)

    asyncio.run(main())
    assert gc.get_threshold() == before
    assert CHECK_SECONDS >= 1.0
