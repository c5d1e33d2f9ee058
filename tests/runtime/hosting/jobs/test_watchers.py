from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from fusion.runtime.hosting.jobs import watchers as module
from fusion.runtime.hosting.jobs.watchers import BUSY, IDLE_SECONDS, WATCHERS_PER_PEER, Watchers
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.transport import PeerId


def test_one_peer_has_its_share_and_gives_it_back() -> None:
    async def main() -> None:
        watchers = Watchers(ManualClock())
        with ExitStack() as held:
            for _ in range(WATCHERS_PER_PEER):
                held.enter_context(watchers.turn(PeerId("a")))
            with pytest.raises(ValueError, match=BUSY), watchers.turn(PeerId("a")):
                pass
            held.enter_context(watchers.turn(PeerId("b")))
        with watchers.turn(PeerId("a")):
            pass

    asyncio.run(main())


def test_where_there_is_no_room_the_largest_share_gives_way_and_then_what_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WATCHERS", 4)

    async def main() -> None:
        clock = ManualClock()
        watchers = Watchers(clock)
        with ExitStack() as held:
            greedy = [held.enter_context(watchers.turn(PeerId("greedy"))) for _ in range(4)]
            one = held.enter_context(watchers.turn(PeerId("one")))
            two = held.enter_context(watchers.turn(PeerId("two")))
            assert [turn.done() for turn in greedy] == [False, False, True, True]
            with pytest.raises(ValueError, match=BUSY), watchers.turn(PeerId("greedy")):
                pass
            clock.advance(IDLE_SECONDS)
            for turn in (one, two, greedy[1]):
                watchers.notified(turn)
            held.enter_context(watchers.turn(PeerId("three")))
            assert greedy[0].done() and not (one.done() or two.done() or greedy[1].done())

    asyncio.run(main())
