"""The scheduler of a stage: what runs in each turn, and how many sessions are admitted. Pure; carried out by
`fusion.runtime.serving.ring.stage`.

A turn is one batch: chunks of several sessions, in order of arrival, without waiting for more. A turn takes only a share of the decoding
sessions, so that every stage has some to run while others are at the next.

A prompt goes through the stages in chunks, so that each stage has one to run while others have those before and behind it:
the shorter they are, the sooner the last stage has the first of them, and the more often each reads its weights
(`pipelined_positions`). While a session decodes, chunks are shorter still, and decode and prefill turns alternate: a token then waits
for the chunk that runs when it arrives, but not for another in its own turn.
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

if TYPE_CHECKING:  # it imports torch
    from fusion.runtime.serving.ring.frames import Parcel

MAX_SESSIONS = 1024
TURN_POSITIONS = 512  # of one turn, unless one chunk has more
SHARED_POSITIONS = 16  # of prompts, in a turn between tokens of others
# Fixed cost of a turn, above all to read the weights, in positions of a prompt. Measured on two CPUs: 20.
TURN_COST_POSITIONS = 32
FIRST_POSITIONS = 16  # of a prompt, over a link in slow start
PREFIX_POSITIONS = 4096  # before a chunk, which make it take about twice as long
SHORT_POSITIONS = 16  # of a decoding chunk, at most
SHORT_SECONDS = 0.01  # longest turn that may run in the event loop's thread
GUESSES = 64  # of all sessions, in flight at once
# Of chunks that wait here, before the sending stage has to wait
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
    parts: tuple[tuple[Parcel, memoryview], ...] = ()  # payloads of the stages before


def pipelined_positions(total: int, stages: int) -> int:
    """The chunk length with which the last stage finishes a prompt of `total` positions soonest. n chunks take n + stages - 1 turns of
    total / n + TURN_COST_POSITIONS each, if all stages are equally fast (the pipeline bubble of Huang et al. 2019, GPipe, along the
    sequence as in Li et al. 2021, TeraPipe)."""
    if stages == 1:
        return total
    return max(TURN_COST_POSITIONS, round(math.sqrt(total * TURN_COST_POSITIONS / (stages - 1))))


def slow_start_positions(fed: int, turn_seconds: float, round_trip_seconds: float) -> float:
    """The longest chunk of a prompt, after `fed` positions, over a link that has been idle: TCP's slow start sends ten segments, then
    twice as much in each round trip (RFC 5681, RFC 6928), and the next stage needs a whole chunk. `turn_seconds`: cost of one more turn;
    infinite where the round trip is too short to be worth it."""
    return max(FIRST_POSITIONS, fed) if 2 * turn_seconds < round_trip_seconds else math.inf


def _decodes(chunk: Chunk) -> bool:
    """Whether the chunk counts as decoding. The end of a prompt does too where it is as short."""
    return chunk.sample and chunk.length <= SHORT_POSITIONS


def _is_one(turn: Sequence[Work[Session]]) -> bool:
    """Whether the turn is one decoding position."""
    return len(turn) == 1 and turn[0].chunk.sample and turn[0].chunk.length == 1


class Schedule(Generic[Session]):
    """`stages`: of the ring. `bounded`: chunks come from other stages, which wait while WAITING_POSITIONS wait here. The first stage makes
    its own chunks, at most one for each session: it needs no bound and never blocks a token on its way back, so the ring cannot
    deadlock. `user_of`: the user of a session, for fair shares."""

    def __init__(
        self, *, stages: int, bounded: bool, user_of: Callable[[Session], Hashable] = lambda session: None
    ) -> None:
        self.sessions: dict[SessionId, Session] = {}
        self._stages = stages
        self._bounded = bounded
        self._user_of = user_of
        self._waiting: list[Work[Session]] = []
        self._positions = 0  # of all waiting chunks
        self._decoding: set[SessionId] = set()  # sessions whose newest chunk is a short one
        self._prompts = PromptTurns()
        self._decoded = False  # the last turn decoded, so prompts have the next one
        self._few: frozenset[Hashable] = frozenset()  # users with the fewest sessions, at the last turn
        self._had_few = False  # one of these had a row in the previous turn
        self._rests = Rests()
        self._held: set[SessionId] = set()  # sessions whose failed chunk will be retried
        # Duration of the last turn of one decoding position, since the last admission.
        self._position_seconds = math.inf
        self._prompt_position_seconds = 0.0  # per position of the last prefill turn

    def admit(self, session: Session) -> bool:
        """Add to `sessions`; False where there are too many. JobError where there is one of the same id."""
        if session.id in self.sessions:
            raise JobError("session: a new name")
        if len(self.sessions) >= MAX_SESSIONS:
            return False
        self.sessions[session.id] = session
        self._position_seconds = math.inf  # its sequence may be far longer
        return True

    def remove(self, session: Session) -> bool:
        """Remove it and its chunks. Whether it was one of `sessions`."""
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
        """Whether another chunk may be added now."""
        return not self._bounded or self._positions < WAITING_POSITIONS

    def hold(self, session: Session) -> None:
        """A chunk of it could not run: run no later one until it is added `again`. Ignored for a session that has ended."""
        if self.sessions.get(session.id) is session:
            self._held.add(session.id)

    def add(self, work: Work[Session], *, again: bool = False) -> None:
        """Queue a chunk. Dropped if its session is not one of `sessions`; queued chunks of positions that it runs again are dropped."""
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
        """The length of a prompt's next chunk, from `start` on, of `total` positions to run, of which `fed` have been: such that turns take
        equal time, except at first over a link with a long round trip."""
        turn_seconds = TURN_COST_POSITIONS * self._prompt_position_seconds
        slow = slow_start_positions(fed, turn_seconds, round_trip_seconds)
        best = min(pipelined_positions(total, self._stages), slow)
        if self._decoding - {session.id}:
            best = min(best, SHARED_POSITIONS)
        return max(1, round(min(most, best) * PREFIX_POSITIONS / (PREFIX_POSITIONS + start)))

    def guesses(self, session: Session) -> int:
        """How many guesses of the session may be in flight: fewer while others decode, whose tokens they delay."""
        return GUESSES // max(1, len(self._decoding | {session.id}))

    def next_turn(
        self,
        now: float = 0.0,
        clear: Callable[[Session], bool] = lambda session: True,
        in_window: Callable[[Session], bool] = lambda session: True,
    ) -> tuple[Work[Session], ...]:
        """The chunks of the next turn, one for each session; empty while none waits, or during a `rest`. `clear`: whether the session's
        links have room for its output; `in_window`: whether output of its prompt may be sent although tokens of others would queue
        behind it."""
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
        """Seconds for which waiting chunks may have to wait for a user with fewer sessions."""
        return self._rests.left(now) if self._waiting else 0.0

    def is_short(self, turn: Sequence[Work[Session]]) -> bool:
        """Whether the turn may run in the event loop's thread: it is of the only session here, and the last one like it took less than
        SHORT_SECONDS."""
        return len(self.sessions) == 1 and self._position_seconds < SHORT_SECONDS and _is_one(turn)

    def took(self, turn: Sequence[Work[Session]], seconds: float, now: float) -> None:
        """Record the duration of a finished turn. A prompt's chunk right after a turn with a row of a user with few sessions causes no
        rest."""
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
