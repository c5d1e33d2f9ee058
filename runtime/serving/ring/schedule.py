"""What a stage runs, turn by turn, and how many sessions it takes. Pure; `fusion.runtime.serving.ring.stage` carries it out.

A turn is what runs together: chunks of several sessions, in the order in which they came, decode before prefill and nobody
waited for. The sessions that decode are shared out over the stages, so that every stage has some to run while others are
at the next. While somebody decodes, a turn has one chunk of a prompt at most, and a short one; the next chunk is made when
that one has run, behind what others have waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.ring.fair_turns import PromptTurns, Rests, fair_rows, with_fewest
from fusion.runtime.serving.ring.session import Chunk, SessionId

if TYPE_CHECKING:  # it holds tensors' layouts
    from fusion.runtime.serving.ring.frames import Parcel

MAX_SESSIONS = 1024
TURN_POSITIONS = 512  # that run in one turn, unless one chunk has more
SHARED_POSITIONS = 64  # of a prompt, in a turn beside others' tokens
PREFIX_POSITIONS = 4096  # before a chunk, with which it takes about twice as long
SHORT_POSITIONS = 16  # of a chunk that decodes
GUESSES = 64  # of all sessions, under way at once
WAITING_POSITIONS = (
    4 * TURN_POSITIONS
)  # of activations that may wait here before the stage that sends them has to


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
    """`stages`: of the ring. `bounded`: chunks come from other stages, which wait while WAITING_POSITIONS wait here. The
    first stage makes its own, at most one for each session: it needs no bound and never holds up a token on its way back,
    which is why the ring cannot lock up. `user_of`: whose a session is; of several users' work each gets its share."""

    def __init__(
        self, *, stages: int, bounded: bool, user_of: Callable[[Session], Hashable] = lambda session: None
    ) -> None:
        self.sessions: dict[SessionId, Session] = {}
        self._stages = stages
        self._bounded = bounded
        self._user_of = user_of
        self._waiting: list[Work[Session]] = []
        self._positions = 0  # that wait
        self._decoding: set[SessionId] = set()  # sessions whose newest chunk is a short one
        self._prompts = PromptTurns()
        self._few: frozenset[Hashable] = frozenset()  # users with the fewest sessions, at the last turn
        self._rests = Rests()
        self._held: set[SessionId] = set()  # sessions of which a chunk that had its turn comes again

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
        self._decoding.discard(session.id)
        self._held.discard(session.id)
        self._keep([work for work in self._waiting if work.session is not session])
        user = self._user_of(session)
        if not any(self._user_of(other) == user for other in self.sessions.values()):
            self._prompts.forget(user)
        return True

    @property
    def has_room(self) -> bool:
        """Whether another chunk may be put in now."""
        return not self._bounded or self._positions < WAITING_POSITIONS

    def hold(self, session: Session) -> None:
        """A chunk of it could not run: none behind it does until that one is added `again`."""
        self._held.add(session.id)

    def add(self, work: Work[Session], *, again: bool = False) -> None:
        """Of a session that is one of `sessions`; others' chunks are dropped, and so are those that it goes back behind."""
        session, chunk = work.session, work.chunk
        if self.sessions.get(session.id) is not session:
            return
        if again:
            self._held.discard(session.id)
            if any(w.session is session and w.chunk.start < chunk.end for w in self._waiting):
                return
        elif chunk.number:
            self._keep([w for w in self._waiting if w.session is not session or w.chunk.end <= chunk.start])
        self._waiting.insert(0 if again else len(self._waiting), work)
        self._positions += chunk.length
        if chunk.length <= SHORT_POSITIONS:
            self._decoding.add(session.id)
        else:
            self._decoding.discard(session.id)

    def prefill_positions(self, session: Session, most: int, start: int) -> int:
        """How many of a prompt's positions to run in one turn, from `start` on: turns are to take equal time."""
        beside = min(most, SHARED_POSITIONS) if self._decoding - {session.id} else most
        return max(1, round(beside * PREFIX_POSITIONS / (PREFIX_POSITIONS + start)))

    def guesses(self, session: Session) -> int:
        """How many guesses of it may be under way: where others decode, they take the time of their tokens."""
        return GUESSES // max(1, len(self._decoding | {session.id}))

    def next_turn(self, now: float = 0.0) -> tuple[Work[Session], ...]:
        """The chunks that run together next, one a session; nothing while none waits, or for as long as `rest` says."""
        first: dict[SessionId, Work[Session]] = {}
        for work in self._waiting:
            if work.session.id not in self._held:
                first.setdefault(work.session.id, work)
        share = -(-len(self._decoding) // self._stages)
        users = Counter(self._user_of(self.sessions[each]) for each in self._decoding)
        tokens = [work for work in first.values() if work.chunk.length <= SHORT_POSITIONS]
        self._few = with_fewest(users)
        if (
            self._few
            and self.rest(now) > 0.0
            and not any(self._of(work) in self._few for work in first.values())
        ):
            return ()
        tokens = fair_rows(tokens, self._of, users)[: max(1, share)]
        long = [work for work in first.values() if work.chunk.length > SHORT_POSITIONS]
        prompts = self._prompts.ranked(long, self._of)
        chosen: list[Work[Session]] = []
        room = TURN_POSITIONS
        for work in (*tokens, *(prompts[:1] if tokens else prompts)):
            if not chosen or work.chunk.length <= room:
                chosen.append(work)
                room -= work.chunk.length
                if work.chunk.length > SHORT_POSITIONS:
                    self._prompts.ran(self._of(work))
        taken = set(map(id, chosen))
        self._keep([work for work in self._waiting if id(work) not in taken])
        return tuple(chosen)

    def rest(self, now: float) -> float:
        """Seconds for which what waits may have to wait for a user who has fewer sessions."""
        return self._rests.left(now) if self._waiting else 0.0

    def took(self, turn: Sequence[Work[Session]], seconds: float, now: float) -> None:
        """How long the turn has run that is over now."""
        self._rests.ran(
            bool(self._few) and not any(self._of(work) in self._few for work in turn), seconds, now
        )

    def _of(self, work: Work[Session]) -> Hashable:
        return self._user_of(work.session)

    def _keep(self, waiting: list[Work[Session]]) -> None:
        self._waiting = waiting
        self._positions = sum(work.chunk.length for work in waiting)
