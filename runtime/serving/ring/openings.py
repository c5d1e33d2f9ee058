"""How many sessions gateways may open, and what comes for one before it is open. Pure.

One that opens and never runs costs its gateway next to nothing, and us memory, a call of the device's thread and some frames.

A session that runs earns its gateway EARNED more, so a gateway that answers people is not held up, however many sessions
it moves here at once. Any gateway may open BURST without having run one, and a few a second; all of them together
ALL_BURST, of which the last half is for gateways that have hardly asked of late: ids are free, so that a bound for each
of them would be none.

A prompt need not wait until every stage has answered: it, or its first chunks, may then be here before the session is open, or even
before its gateway's word to open it is. Anybody may send such chunks, so what waits is bounded: in bytes of memory, headers and
sessions counted, and whoever has most there loses its own first. So is what open sessions have of chunks of which another stage has
yet to send its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import msgpack
from cachetools import LRUCache

from fusion.runtime.serving.ring.session import SessionId
from fusion.swarm.transport import Frame, PeerId, by_itself

EARNED, MOST_EARNED = 4, 1024
BURST, PER_SECOND = 64.0, 4.0
FIRST = 8.0  # of these: a gateway that has not asked lately is let in ahead of others
ALL_BURST, ALL_PER_SECOND = 256.0, 16.0
REMEMBERED_GATEWAYS = 4096
EARLY_BYTES = 16 << 20  # that may wait for sessions which are not open
EARLY_SESSION_BYTES = 64 << 10  # that each of these counts for beside: so there are at most 256
EARLY_HEADER_TIMES = 64  # bytes of memory that a byte of a header may become
EARLY_SECONDS = 5.0  # for which frames may wait
REMEMBERED_SESSIONS = 4096  # of which nothing waits any more
LONGEST_NAME = 64  # characters of a session's
PARTS_BYTES = 128 << 20  # of chunks whose other parts are to come, of all sessions

Early = TypeVar("Early")
Session = TypeVar("Session", bound=Hashable)


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
        # Also where the others have used up what there is: whoever keeps asking is served last
        account.unearned -= 1.0
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


def kept(frame: Frame) -> tuple[Frame, int]:
    """The frame with a payload of its own, which keeps no larger one that it came in, and the bytes of memory that it takes."""
    size_bytes = len(frame.payload) + EARLY_HEADER_TIMES * len(msgpack.packb(dict(frame.header)))
    return replace(frame, payload=by_itself(frame.payload)), size_bytes


@dataclass
class _Waiting(Generic[Early]):
    since: float
    found: list[Early] = field(default_factory=list)
    size_bytes: Counter[PeerId] = field(default_factory=Counter)  # by who sent it


class EarlyFrames(Generic[Early]):
    """What has come for sessions that are not open yet. Of a session that has had to wait too long, or of which too much waits, all of it
    is given up, and what comes later: an answer must not go on without a part. Where there is too much in all, whoever sent
    most of it loses the largest of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[SessionId, _Waiting[Early]] = {}
        self._size_bytes: Counter[PeerId] = Counter()
        # Of those that have ended or were given up: whether something was given up.
        self._over: LRUCache[SessionId, bool] = LRUCache(REMEMBERED_SESSIONS)

    def add(self, session: SessionId, sender: PeerId, early: Early, size_bytes: int) -> bool:
        """Whether it waits now."""
        if session in self._over or len(session) > LONGEST_NAME:
            return False
        if session not in self._waiting:
            self._waiting[session] = _Waiting(self._clock())
            size_bytes += EARLY_SESSION_BYTES
        waiting = self._waiting[session]
        waiting.found.append(early)
        waiting.size_bytes[sender] += size_bytes
        self._size_bytes[sender] += size_bytes
        while self._size_bytes.total() > EARLY_BYTES:
            [(most, _)] = self._size_bytes.most_common(1)
            self._give_up(max(self._waiting, key=lambda each: self._waiting[each].size_bytes[most]))
        return session in self._waiting

    def take(self, session: SessionId) -> list[Early]:
        """In the order in which it came; the session is open now."""
        waiting = self._waiting.pop(session, None)
        if waiting is None:
            return []
        self._size_bytes -= waiting.size_bytes  # senders of which nothing is left are forgotten
        return waiting.found

    def gave_up(self, session: SessionId) -> bool:
        """Whether something for it is lost."""
        return self._over.get(session, False)

    def end(self, session: SessionId) -> None:
        """It has ended: what still comes for it is for nobody."""
        self.take(session)
        self._over[session] = False

    def expire(self) -> None:
        """Give up what has waited for too long."""
        now = self._clock()
        for session in [each for each, found in self._waiting.items() if now - found.since > EARLY_SECONDS]:
            self._give_up(session)

    def _give_up(self, session: SessionId) -> None:
        self.take(session)
        self._over[session] = True


class WaitingParts(Generic[Session]):
    """How many bytes of each open session wait for other stages."""

    def __init__(self) -> None:
        self._waiting: dict[Session, tuple[PeerId, int]] = {}
        self._size_bytes: Counter[PeerId] = Counter()  # by gateway

    def set(self, session: Session, gateway: PeerId, size_bytes: int) -> Session | None:
        """So many wait of this one now. Which session has to end, where that is too much in all: the largest of the gateway that has
        most."""
        if not size_bytes and session not in self._waiting:
            return None
        before = self._waiting.pop(session, (gateway, 0))
        self._size_bytes[gateway] += size_bytes - before[1]
        if size_bytes:
            self._waiting[session] = gateway, size_bytes
        elif not self._size_bytes[gateway]:
            del self._size_bytes[gateway]
        if self._size_bytes.total() <= PARTS_BYTES:
            return None
        [(most, _)] = self._size_bytes.most_common(1)
        sizes = {each: size for each, (owner, size) in self._waiting.items() if owner == most}
        return max(sizes, key=sizes.__getitem__)
