"""How many sessions gateways may open: one that opens and never runs costs its gateway next to nothing, and us memory, a
call of the device's thread and some frames. Pure.

A session that runs earns its gateway EARNED more, so a gateway that answers people is not held up, however many sessions
it moves here at once. Any gateway may open BURST without having run one, and a few a second; all of them together
ALL_BURST, of which the last half is for gateways that have hardly asked of late: ids are free, so that a bound for each
of them would be none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachetools import LRUCache

from fusion.swarm.transport import PeerId

EARNED, MOST_EARNED = 4, 1024
BURST, PER_SECOND = 64.0, 4.0
FIRST = 8.0  # of these: a gateway that has not asked lately is let in ahead of others
ALL_BURST, ALL_PER_SECOND = 256.0, 16.0
REMEMBERED_GATEWAYS = 4096


@dataclass
class _Account:
    earned: int = 0
    unearned: float = BURST
    at: float = 0.0


class Openings:
    """`clock` gives seconds that only rise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: LRUCache[PeerId, _Account] = LRUCache(REMEMBERED_GATEWAYS)
        self._all, self._at = ALL_BURST, clock()

    def spend(self, gateway: PeerId) -> bool:
        """Whether the gateway may open one more; if so, it counts."""
        account, now = self._account(gateway), self._clock()
        if account.earned:
            account.earned -= 1
            return True
        fresh = account.unearned > BURST - FIRST
        if account.unearned < 1.0:
            return False
        account.unearned -= (
            1.0  # also where the others have used up what there is: whoever keeps asking is served last
        )
        self._all, self._at = min(ALL_BURST, self._all + (now - self._at) * ALL_PER_SECOND), now
        if self._all < (1.0 if fresh else ALL_BURST / 2):
            return False
        self._all -= 1.0
        return True

    def earn(self, gateway: PeerId) -> None:
        """One of its sessions runs."""
        account = self._account(gateway)
        account.earned = min(MOST_EARNED, account.earned + EARNED)

    def _account(self, gateway: PeerId) -> _Account:
        now = self._clock()
        account = self._accounts.get(gateway)
        if account is None:
            account = self._accounts[gateway] = _Account(at=now)
        account.unearned = min(BURST, account.unearned + (now - account.at) * PER_SECOND)
        account.at = now
        return account
