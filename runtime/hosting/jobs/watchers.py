"""A limit on the streams that follow jobs here: each keeps a stream and a task for as long as its peer likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fusion.swarm.transport import PeerId
from fusion.swarm.turns import Turn, Turns

__all__ = ["BUSY", "IDLE_SECONDS", "WATCHERS", "WATCHERS_PER_PEER", "Turn", "Watchers"]

WATCHERS = 256  # in all
WATCHERS_PER_PEER = 16
IDLE_SECONDS = 300.0  # without news, after which one gives way first, where there is no room for another
BUSY = "busy: too many follow jobs here"


class Watchers:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._shares = Turns(clock, WATCHERS, IDLE_SECONDS)

    @contextmanager
    def turn(self, peer: PeerId) -> Iterator[Turn]:
        """One for a stream of `peer`. ValueError where it has WATCHERS_PER_PEER, or all WATCHERS are in use and none is idle."""
        if self._shares.of(peer) >= WATCHERS_PER_PEER:
            raise ValueError(BUSY)
        turn = self._shares.turn(peer)
        if turn is None:
            raise ValueError(BUSY)
        try:
            yield turn
        finally:
            self._shares.release(turn)
            turn.cancel()

    def notified(self, turn: Turn) -> None:
        """Its stream was sent news: it is not idle."""
        self._shares.use(turn)
