"""Those who follow jobs here: each holds a stream and a task for as long as it likes, so there are only so many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fusion.swarm.shares import Shares
from fusion.swarm.transport import PeerId

WATCHERS = 256  # in all
WATCHERS_PER_PEER = 16
IDLE_SECONDS = 300.0  # without news, after which one gives way first, where there is no room for another
BUSY = "busy: too many follow jobs here"

Turn = asyncio.Future[None]  # done once it has to be given up


class Watchers:
    """`clock` gives seconds that only rise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._shares: Shares[Turn] = Shares(clock, WATCHERS, IDLE_SECONDS)

    @contextmanager
    def turn(self, peer: PeerId) -> Iterator[Turn]:
        """One for a stream of `peer`. ValueError where it has its share, or nobody gives way."""
        if self._shares.of(peer) >= WATCHERS_PER_PEER:
            raise ValueError(BUSY)
        while not self._shares.room():
            other = self._shares.yields(peer, 1)
            if other is None:
                raise ValueError(BUSY)
            self._shares.release(other)
            other.set_result(None)
        turn: Turn = asyncio.get_running_loop().create_future()
        self._shares.take(turn, peer)
        try:
            yield turn
        finally:
            self._shares.release(turn)
            turn.cancel()

    def told(self, turn: Turn) -> None:
        """It was told something new."""
        self._shares.use(turn)
