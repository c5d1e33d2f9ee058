"""Turns at what there is not enough of: whoever has one is told when it has to be given up."""

from __future__ import annotations

import asyncio

from fusion.swarm.shares import Shares
from fusion.swarm.transport import PeerId

Turn = asyncio.Future[None]  # done once it has to be given up


class Turns(Shares[Turn]):
    def turn(self, holder: PeerId, amount: int = 1) -> Turn | None:
        """One of that size, be it that of others who have to give way; None where there is none. Every one that is given is
        released."""
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
