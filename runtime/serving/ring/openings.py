"""Rate limits of session openings, and bounds on frames that arrive before their session is open. Pure.

A session that is opened and never run costs its gateway next to nothing, but the stage memory, a call of the device's thread and some
frames. A session that runs earns its gateway EARNED more openings, so a gateway with real traffic is never limited, however many
sessions it moves here at once. Any gateway may open BURST sessions without having run one, and a few a second; all gateways together
ALL_BURST, of which the last half is reserved for gateways with few recent openings: peer ids are free, so a limit for each alone
would be none.

A prompt is sent before every stage has confirmed its opening, so its first chunks may arrive before the session is open, or even
before its `open` frame. Anybody may send such chunks, so they are bounded in bytes, headers and sessions included, and the sender with
most bytes loses its own first. So are the parts of chunks that wait for the parts of other stages.
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
FIRST = 8.0  # of these: a gateway with no other recent openings has priority
ALL_BURST, ALL_PER_SECOND = 256.0, 16.0
REMEMBERED_GATEWAYS = 4096
EARLY_BYTES = 16 << 20  # of all frames for sessions that are not open
EARLY_SESSION_BYTES = 64 << 10  # overhead counted for each such session: so there are at most 256
EARLY_HEADER_TIMES = 64  # bytes of memory for a byte of a header
EARLY_SECONDS = 5.0  # for which frames may wait
REMEMBERED_SESSIONS = 4096  # that have ended or were given up
LONGEST_NAME = 64  # characters of a session's
PARTS_BYTES = 128 << 20  # of chunks that wait for other parts, of all sessions

Early = TypeVar("Early")
Session = TypeVar("Session", bound=Hashable)


@dataclass
class _Account:
    earned: int = 0
    unearned: float = BURST
    at: float = 0.0


class Openings:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: LRUCache[PeerId, _Account] = LRUCache(REMEMBERED_GATEWAYS)
        self._all, self._at = ALL_BURST, clock()

    def spend(self, gateway: PeerId) -> bool:
        """Whether the gateway may open another session; if so, that is counted."""
        account, now = self._account(gateway), self._clock()
        if account.earned:
            account.earned -= 1
            return True
        fresh = account.unearned > BURST - FIRST
        if account.unearned < 1.0:
            return False
        # Counted even if the common budget is exhausted: gateways that keep trying lose their priority
        account.unearned -= 1.0
        self._all, self._at = min(ALL_BURST, self._all + (now - self._at) * ALL_PER_SECOND), now
        if self._all < (1.0 if fresh else ALL_BURST / 2):
            return False
        self._all -= 1.0
        return True

    def earn(self, gateway: PeerId) -> None:
        """Called when a session of the gateway runs."""
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
    """The frame with its payload copied out of a larger buffer, and the bytes of memory that it takes."""
    size_bytes = len(frame.payload) + EARLY_HEADER_TIMES * len(msgpack.packb(dict(frame.header)))
    return replace(frame, payload=by_itself(frame.payload)), size_bytes


@dataclass
class _Waiting(Generic[Early]):
    since: float
    frames: list[Early] = field(default_factory=list)
    size_bytes: Counter[PeerId] = field(default_factory=Counter)  # by sender


class EarlyFrames(Generic[Early]):
    """Frames for sessions that are not open yet. If those of a session wait too long, or are too many, all are given up, and later ones
    too, as a session must not go on without a part. If there is too much in all, the sender with most bytes loses its largest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[SessionId, _Waiting[Early]] = {}
        self._size_bytes: Counter[PeerId] = Counter()
        # Sessions that have ended or were given up -> whether frames were given up.
        self._over: LRUCache[SessionId, bool] = LRUCache(REMEMBERED_SESSIONS)

    def add(self, session: SessionId, sender: PeerId, early: Early, size_bytes: int) -> bool:
        """Whether it was queued."""
        if session in self._over or len(session) > LONGEST_NAME:
            return False
        if session not in self._waiting:
            self._waiting[session] = _Waiting(self._clock())
            size_bytes += EARLY_SESSION_BYTES
        waiting = self._waiting[session]
        waiting.frames.append(early)
        waiting.size_bytes[sender] += size_bytes
        self._size_bytes[sender] += size_bytes
        while self._size_bytes.total() > EARLY_BYTES:
            [(most, _)] = self._size_bytes.most_common(1)
            self._give_up(max(self._waiting, key=lambda each: self._waiting[each].size_bytes[most]))
        return session in self._waiting

    def take(self, session: SessionId) -> list[Early]:
        """The queued frames, in order of arrival; the session is open now."""
        waiting = self._waiting.pop(session, None)
        if waiting is None:
            return []
        self._size_bytes -= waiting.size_bytes  # senders of which nothing is left are forgotten
        return waiting.frames

    def gave_up(self, session: SessionId) -> bool:
        """Whether frames for it were given up."""
        return self._over.get(session, False)

    def end(self, session: SessionId) -> None:
        """The session has ended: later frames for it are refused."""
        self.take(session)
        self._over[session] = False

    def expire(self) -> None:
        """Give up sessions that have waited for too long."""
        now = self._clock()
        for session in [
            each for each, waiting in self._waiting.items() if now - waiting.since > EARLY_SECONDS
        ]:
            self._give_up(session)

    def _give_up(self, session: SessionId) -> None:
        self.take(session)
        self._over[session] = True


class WaitingParts(Generic[Session]):
    """Bytes of each open session that wait for the parts of other stages."""

    def __init__(self) -> None:
        self._waiting: dict[Session, tuple[PeerId, int]] = {}
        self._size_bytes: Counter[PeerId] = Counter()  # by gateway

    def set(self, session: Session, gateway: PeerId, size_bytes: int) -> Session | None:
        """Set the bytes of a session. If there are too many in all, returns the session to end: the largest of the gateway with most."""
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
