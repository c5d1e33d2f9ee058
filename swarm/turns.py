"""Turns at a limited resource: fair shares whose holders are signalled when they are preempted."""

from __future__ import annotations

import asyncio

from fusion.swarm.shares import Shares
from fusion.swarm.transport import PeerId

Turn = asyncio.Future[None]  # done once it is preempted


class Turns(Shares[Turn]):
    def turn(self, holder: PeerId, amount: int = 1) -> Turn | None:
        """A turn of that size, preempting others if needed; None where that is impossible. The caller must `release` it."""
        if not self.fits(amount):
            return None
        while not self.room(amount):
            other = self.yields(holder, amount)
            if other is None:
                return None
            self.release(other)
            other.set_result(None)
        turn: Turn = asyncio.get_running_loop().create_future()
        self.take(turn, holder, amount)
        return turn
