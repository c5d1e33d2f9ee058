"""What a stage runs, turn by turn, and how many sessions it takes. Pure; `fusion.runtime.serving.ring.stage` carries it out.

Chunks of all sessions run in the order in which they arrive; a long prompt is fed chunk by chunk, each behind what
other sessions have waiting, so sessions interleave fairly. A turn is what runs together: one chunk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.ring.session import Chunk, SessionId

if TYPE_CHECKING:  # it holds tensors' layouts
    from fusion.runtime.serving.ring.frames import Parcel

MAX_SESSIONS = 1024
WAITING_CHUNKS = 4  # chunks of activations that may wait here before the stage that sends them has to


class Named(Protocol):
    @property
    def id(self) -> SessionId: ...


Session = TypeVar("Session", bound=Named)


@dataclass(frozen=True)
class Work(Generic[Session]):
    """One chunk to run."""

    session: Session
    chunk: Chunk
    ids: memoryview  # bytes of the token ids, at the first stage
    parts: tuple[tuple[Parcel, memoryview], ...] = ()  # what the stages before sent


class Schedule(Generic[Session]):
    """`bounded`: chunks come from other stages, which wait while as many as WAITING_CHUNKS wait here. The first stage
    makes its own, at most one for each session: it needs no bound and never holds up a token on its way back, which is
    why the ring cannot lock up."""

    def __init__(self, *, bounded: bool) -> None:
        self.sessions: dict[SessionId, Session] = {}
        self._waiting: deque[Work[Session]] = deque()
        self._most = WAITING_CHUNKS if bounded else MAX_SESSIONS

    def admit(self, session: Session) -> bool:
        """Whether there is room for it: then it is one of `sessions`. JobError where one of that name is here."""
        if session.id in self.sessions:
            raise JobError("session: a new name")
        if len(self.sessions) >= MAX_SESSIONS:
            return False
        self.sessions[session.id] = session
        return True

    def remove(self, session: Session) -> bool:
        """Its chunks do not run any more. Whether it was one of `sessions`."""
        if self.sessions.get(session.id) is not session:
            return False
        del self.sessions[session.id]
        return True

    @property
    def has_room(self) -> bool:
        """Whether another chunk may be put in now."""
        return len(self._waiting) < self._most

    def add(self, work: Work[Session]) -> None:
        self._waiting.append(work)

    def next_turn(self) -> tuple[Work[Session], ...]:
        """The chunks that run together next; nothing while none waits."""
        while self._waiting:
            work = self._waiting.popleft()
            if self.sessions.get(work.session.id) is work.session:
                return (work,)
        return ()
