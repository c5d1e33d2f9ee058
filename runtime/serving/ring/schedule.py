"""What a stage runs, turn by turn, and how many sessions it takes. Pure; `fusion.runtime.serving.ring.stage` carries it out.

A turn is what runs together: chunks of several sessions, in the order in which they came, and nobody waited for. The sessions
that decode are shared out over the stages, so that every stage has some to run while others are at the next.

A prompt goes through the stages in chunks, so that each stage has one to run while others have those before and behind it:
the shorter they are the sooner the last stage has the first of them, and the more often each reads its weights
(`pipelined_positions`). While somebody decodes they are shorter still, and decode and prefill have turns of their own, the one
after the other: a token then waits for the chunk that it finds under way, and not for one that runs along with it as well.
"""

from __future__ import annotations

import math
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
SHARED_POSITIONS = 16  # of prompts, in a turn between others' tokens
# Of a prompt, that take as long as what a turn costs whatever it runs: above all to read the weights. Seen on two CPUs: 20.
TURN_COST_POSITIONS = 32
FIRST_POSITIONS = 16  # of a prompt, over a link that begins slowly
PREFIX_POSITIONS = 4096  # before a chunk, with which it takes about twice as long
SHORT_POSITIONS = 16  # at most, of a chunk that decodes
SHORT_SECONDS = 0.01  # less than which a turn takes that may run in the event loop's thread
GUESSES = 64  # of all sessions, under way at once
# Of activations that may wait here before the stage that sends them has to
WAITING_POSITIONS = 4 * TURN_POSITIONS


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


def pipelined_positions(total: int, stages: int) -> int:
    """How many positions of a prompt of `total` to run at once, for the last stage to have run all of them soonest. n chunks take
    n + stages - 1 turns of total / n + TURN_COST_POSITIONS each, where every stage takes as long (the pipeline's bubble of
    Huang et al. 2019, GPipe, along the sequence as in Li et al. 2021, TeraPipe)."""
    if stages == 1:
        return total
    return max(TURN_COST_POSITIONS, round(math.sqrt(total * TURN_COST_POSITIONS / (stages - 1))))


def slow_start_positions(fed: int, turn_seconds: float, round_trip_seconds: float) -> float:
    """How many positions of a prompt to run at once at most, behind so many, as a link that has been idle begins: TCP sends ten
    segments, and twice as much in each round trip (RFC 5681, RFC 6928), and the next stage waits for the whole of a chunk. `turn_seconds`:
    what one more turn costs each stage, for which a short round trip is not worth it."""
    return max(FIRST_POSITIONS, fed) if 2 * turn_seconds < round_trip_seconds else math.inf


def _decodes(chunk: Chunk) -> bool:
    """Rather than being of a prompt; the end of one, where it is as short, is no more in the way."""
    return chunk.sample and chunk.length <= SHORT_POSITIONS


def _is_one(turn: Sequence[Work[Session]]) -> bool:
    """One position, whose token is wanted."""
    return len(turn) == 1 and turn[0].chunk.sample and turn[0].chunk.length == 1


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
        self._decoded = False  # in the last turn: of what waits, prompts have the next one
        self._few: frozenset[Hashable] = frozenset()  # users with the fewest sessions, at the last turn
        self._had_few = False  # one of these had a row in the turn before that
        self._rests = Rests()
        self._held: set[SessionId] = set()  # sessions of which a chunk that had its turn comes again
        # That the last turn took which was for one position, of the newest session.
        self._position_seconds = math.inf
        self._prompt_position_seconds = 0.0  # that the last turn of prompts took for each position

    def admit(self, session: Session) -> bool:
        """Whether there is room for it: then it is one of `sessions`. JobError where one of that name is here."""
        if session.id in self.sessions:
            raise JobError("session: a new name")
        if len(self.sessions) >= MAX_SESSIONS:
            return False
        self.sessions[session.id] = session
        self._position_seconds = math.inf  # it may be far longer than others were
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
        """A chunk of it could not run: none behind it does until that one is added `again`. Harmless for one that has ended."""
        if self.sessions.get(session.id) is session:
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
        if _decodes(chunk):
            self._decoding.add(session.id)
        else:
            self._decoding.discard(session.id)

    def prefill_positions(
        self,
        session: Session,
        most: int,
        start: int,
        total: int,
        *,
        fed: int = 0,
        round_trip_seconds: float = 0.0,
    ) -> int:
        """How many of a prompt's positions to run in one turn, from `start` on, of `total` that have to be run, of which so many are
        `fed`: turns are to take equal time, but for the first over a link of so long a round trip."""
        turn_seconds = TURN_COST_POSITIONS * self._prompt_position_seconds
        slow = slow_start_positions(fed, turn_seconds, round_trip_seconds)
        best = min(pipelined_positions(total, self._stages), slow)
        if self._decoding - {session.id}:
            best = min(best, SHARED_POSITIONS)
        return max(1, round(min(most, best) * PREFIX_POSITIONS / (PREFIX_POSITIONS + start)))

    def guesses(self, session: Session) -> int:
        """How many guesses of it may be under way: where others decode, they take the time of their tokens."""
        return GUESSES // max(1, len(self._decoding | {session.id}))

    def next_turn(
        self,
        now: float = 0.0,
        clear: Callable[[Session], bool] = lambda session: True,
        in_window: Callable[[Session], bool] = lambda session: True,
    ) -> tuple[Work[Session], ...]:
        """The chunks that run together next, one a session; nothing while none waits, or for as long as `rest` says. `clear`:
        whether what a chunk of the session gives can go out; `in_window`: whether what one of a prompt gives may go out although
        tokens of others, who decode, would wait behind it."""
        if not self._waiting:
            self._decoded = False
            return ()
        first: dict[SessionId, Work[Session]] = {}
        for work in self._waiting:
            if work.session.id not in self._held and clear(work.session):
                first.setdefault(work.session.id, work)
        share = -(-len(self._decoding) // self._stages)
        users = Counter(self._user_of(self.sessions[each]) for each in self._decoding)
        tokens = [work for work in first.values() if _decodes(work.chunk)]
        self._few = with_fewest(users)
        if (
            self._few
            and self.rest(now) > 0.0
            and not any(self._of(work) in self._few for work in first.values())
        ):
            return ()
        tokens = fair_rows(tokens, self._of, users)[: max(1, share)]
        prompts = self._prompts.ranked(
            [
                work
                for work in first.values()
                if not _decodes(work.chunk)
                and (not self._decoding - {work.session.id} or in_window(work.session))
            ],
            self._of,
        )
        chosen: list[Work[Session]] = []
        decodes = bool(tokens) and not (prompts and self._decoded)
        room = TURN_POSITIONS if decodes or not self._decoding else SHARED_POSITIONS
        self._decoded = decodes
        for work in tokens if decodes else prompts:
            if not chosen or work.chunk.length <= room:
                chosen.append(work)
                room -= work.chunk.length
                if not decodes:
                    self._prompts.ran(self._of(work))
        taken = set(map(id, chosen))
        self._keep([work for work in self._waiting if id(work) not in taken])
        return tuple(chosen)

    def rest(self, now: float) -> float:
        """Seconds for which what waits may have to wait for a user who has fewer sessions."""
        return self._rests.left(now) if self._waiting else 0.0

    def is_short(self, turn: Sequence[Work[Session]]) -> bool:
        """Whether the turn may hold up all else that the peer does: it is for the only session here, and takes less than
        SHORT_SECONDS, as far as the last one like it tells."""
        return len(self.sessions) == 1 and self._position_seconds < SHORT_SECONDS and _is_one(turn)

    def took(self, turn: Sequence[Work[Session]], seconds: float, now: float) -> None:
        """How long the turn has run that is over now. A prompt's chunk, once after each of a user's tokens, is not held
        against anybody."""
        if _is_one(turn):
            self._position_seconds = seconds
        if not self._decoded:
            self._prompt_position_seconds = seconds / sum(work.chunk.length for work in turn)
        has_few = any(self._of(work) in self._few for work in turn)
        behind = self._had_few and not self._decoded
        self._rests.ran(bool(self._few) and not has_few and not behind, seconds, now)
        self._had_few = has_few

    def _of(self, work: Work[Session]) -> Hashable:
        return self._user_of(work.session)

    def _keep(self, waiting: list[Work[Session]]) -> None:
        self._waiting = waiting
        self._positions = sum(work.chunk.length for work in waiting)
