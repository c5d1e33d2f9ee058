"""One session at one stage: its chunks, and running them in the worker thread. Knows nothing of peers or streams but
that a session has links to the stages it feeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from fusion.dag.rewrites.positions import rows_per_position, sequence_axis
from fusion.runtime.planes.plane import DecodingStage, Piece
from fusion.runtime.serving.drafts.draft_model import DraftModel
from fusion.runtime.serving.drafts.drafter import DraftStep, ModelDrafter
from fusion.runtime.serving.requests.request import Logprobs
from fusion.runtime.serving.ring.constraint import SuppressedTokens, TokenConstraint, WithheldEnds
from fusion.runtime.serving.ring.frames import Parcel, RingPlan, unpack_source
from fusion.runtime.serving.ring.guesses import Verdicts
from fusion.runtime.serving.ring.penalties import TokenCounts
from fusion.runtime.serving.ring.sampling import PromptScores, logprobs, sample
from fusion.runtime.serving.ring.schedule import Work
from fusion.runtime.serving.ring.session import Chunk, Feed, Opening, SessionId
from fusion.swarm.errors import FrameError
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.transport import PeerId, by_itself

# What running a stage may raise: torch's errors for wrong data, no memory, and our own JobFailed.
PLANE_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, MemoryError)
PART_BYTES = 1024  # that something which waits counts for, beside its payload


@dataclass(frozen=True)
class Part:
    """What one stage sent of a chunk."""

    length: int
    payload: memoryview

    @property
    def size_bytes(self) -> int:
        return PART_BYTES + len(self.payload)


@dataclass(eq=False)
class StageSession:
    opening: Opening
    gateway: QueuedStream
    ready: bool = False
    closed: bool = False
    task: asyncio.Task[None] | None = None  # makes it ready
    hops: list[tuple[Parcel, QueuedStream]] = field(default_factory=list)
    source_hops: list[tuple[Parcel, QueuedStream]] = field(default_factory=list)  # for the source
    back: QueuedStream | None = None  # from the last stage to the first
    feed: Feed | None = None  # at the first stage
    source: memoryview | None = None  # at the first stage, until it has been fed
    drafter: ModelDrafter | None = None  # at the first stage, where there is a draft model
    counts: TokenCounts | None = None  # at the last stage, where there are penalties
    scores: PromptScores | None = None  # at the last stage, where the prompt's own tokens are told of
    verdicts: Verdicts = field(init=False)  # of the last stage, in the worker thread
    user: tuple[PeerId, int] = field(init=False)  # whose it is: one of its gateway's clients'
    constraint: TokenConstraint | None = None  # at the last stage, where there is a schema
    suppressed: SuppressedTokens | None = None  # at the last stage, where tokens are never to be said
    withheld: WithheldEnds | None = None  # at the last stage, where the answer has a least length
    parts: dict[int, dict[int, Part]] = field(default_factory=dict)  # order of chunk -> sender -> its part
    waiting_positions: int = 0  # of these
    waiting_bytes: int = 0  # of these, and of what waits for the source
    early: list[Work[StageSession]] = field(default_factory=list)  # chunks that came before the source
    encoded: bool = False  # whether the source has come
    ended: bool = False  # at the last stage: the answer has its last token
    ran: int = 0  # chunks
    heard_at: float = 0.0  # when its gateway last said anything about it, or a chunk of it ran
    freed: asyncio.Task[None] | None = None  # frees its memory, once it is closed
    held: int = 0  # positions that it has had keys and values of since it was opened
    reached: int = 0  # positions that it has keys and values of now

    def __post_init__(self) -> None:
        self.verdicts = Verdicts(self.opening.prompt_length)
        self.user = self.gateway_peer, self.opening.user

    @property
    def id(self) -> SessionId:
        return self.opening.session

    @property
    def gateway_peer(self) -> PeerId:
        return self.gateway.stream.remote

    def take_part(
        self, chunk: Chunk, sender: int, payload: memoryview, senders: int
    ) -> Mapping[int, Part] | None:
        """Keep what `sender` sent for a chunk; what all of `senders` sent once they have. Chunks before one that is whole do
        not come any more: somebody has found them stale. FrameError where too many wait."""
        # Beside what is known of the sequence as much of guesses may be under way, at most.
        self.waiting_positions += chunk.length
        if self.waiting_positions > senders * (2 * self.opening.capacity + self.opening.source):
            raise FrameError("chunks of which other stages never send their part")
        parts = self.parts.setdefault(chunk.order, {})
        parts[sender] = part = Part(chunk.length, by_itself(payload))
        if len(parts) < senders:
            self.waiting_bytes += part.size_bytes
            return None
        self.parts = {order: kept for order, kept in self.parts.items() if order > chunk.order}
        left = [each for kept in self.parts.values() for each in kept.values()]
        self.waiting_positions = sum(each.length for each in left)
        self.waiting_bytes = sum(each.size_bytes for each in left) + sum(map(_size_bytes, self.early))
        return parts

    def in_order(self, work: Work[StageSession]) -> Sequence[Work[StageSession]]:
        """What may run now that `work` has come: nothing before the source, of which a part may come over another link and later.
        FrameError where too many wait."""
        if work.chunk.start < 0:
            if self.encoded:
                raise FrameError("the source of a session comes once")
            early, self.early, self.encoded = self.early, [], True
            self.waiting_bytes -= sum(map(_size_bytes, early))
            return [work, *early]
        if self.encoded or not self.opening.source:
            return [work]
        if sum(each.chunk.length for each in (*self.early, work)) > self.opening.capacity:
            raise FrameError("chunks of a session whose source never comes")
        work = replace(work, parts=tuple((parcel, by_itself(payload)) for parcel, payload in work.parts))
        self.early.append(work)
        self.waiting_bytes += _size_bytes(work)
        return []


def _size_bytes(work: Work[StageSession]) -> int:
    """Of a chunk that waits."""
    return PART_BYTES + sum(len(payload) for _, payload in work.parts)


@dataclass(frozen=True)
class Token:
    """That was chosen. `guessed`: the one before it was, so that it took no trip of its own."""

    position: int
    id: int
    logits: bytes = b""
    logprobs: Logprobs | None = None
    guessed: bool = False
    complete: bool = False  # the schema lets nothing follow


@dataclass(frozen=True)
class Outcome:
    sends: tuple[list[memoryview], ...] = ()  # payload for each outgoing parcel
    tokens: tuple[Token, ...] = ()  # by position
    scores: tuple[tuple[int, bytes], ...] = ()  # of the prompt's tokens, as `PromptScores.told`


@dataclass(frozen=True)
class ReusedPrefix:
    """Where a session finds its first positions: at another one, or under the name of what was retained, which may become its
    own."""

    name: SessionId | int
    positions: int
    moved: bool = False


@dataclass(frozen=True)
class Kept:
    """A session that ends, of whose first positions keys and values are retained."""

    session: SessionId
    name: int
    positions: int


class StageRunner:
    """What the worker thread does for a stage, and for the draft model beside it. Every method runs there. `account` is called
    when sessions have come or gone: MemoryError (one line) where the peer would hold more than it lends. What the draft keeps
    gives way to sessions."""

    def __init__(
        self,
        plane: DecodingStage,
        plan: RingPlan,
        max_sequence: int,
        account: Callable[[], None] = lambda: None,
        draft: DraftModel | None = None,
    ) -> None:
        self._plane = plane
        self._plan = plan
        self._positions = torch.arange(max_sequence).unsqueeze(0)
        self._account_all = account
        self.draft = draft

    def _account(self) -> None:
        try:
            self._account_all()
        except MemoryError:
            if self.draft is None or not self.draft.clear():
                raise
            self._account_all()

    def _freed(self) -> None:
        """There is less than before. Where that is still more than is set aside for us, another stage has just taken what was
        loose here: we have yet to be told to free it."""
        with suppress(MemoryError):
            self._account_all()

    @property
    def guesses(self) -> bool:
        """Whether chunks may have guesses."""
        return self._plane.together

    def begin(
        self,
        session: SessionId,
        capacity: int,
        positions: int,
        prefix: ReusedPrefix | None = None,
        encoded: int = 0,
    ) -> int:
        """Begin a session of at most `capacity` positions, with memory for the first and with what it finds at `prefix`: how
        many positions it holds. `encoded`: how much an encoder reads. MemoryError, in one line, where these do not fit: all is as before then."""
        plane, held = self._plane, 0
        moved = prefix.name if prefix is not None and prefix.moved else None
        if prefix is not None and isinstance(moved, int):
            held = plane.resume(session, capacity, moved, prefix.positions)
        else:
            plane.open(session, capacity, encoded)
        plane.reserve(session, positions)
        try:
            self._account()
        except MemoryError:
            if isinstance(moved, int):
                plane.retain(session, moved, held)
            plane.close(session)
            raise
        if prefix is not None and moved is None:
            held = plane.copy(prefix.name, session, prefix.positions)
        return held

    @property
    def compiles(self) -> bool:
        """Whether running a chunk may take seconds more than another as long did."""
        return self._plane.compiles

    @property
    def chunks_agree(self) -> bool:
        """Whether prompts may be cut anywhere, and keys and values of one prompt do for another that begins alike."""
        return self._plane.chunks_agree

    @property
    def caches(self) -> bool:
        """Whether sessions have keys and values here; without attention there is nothing that they would have to hold."""
        return self._plane.caches

    def retain(self, kept: Sequence[Kept]) -> list[tuple[int, int]]:
        """How many positions there were of each, and their bytes."""
        found = [self._plane.retain(each.session, each.name, each.positions) for each in kept]
        self._end_drafts(each.session for each in kept)
        self._freed()
        return found

    def forget(self, names: Sequence[int]) -> None:
        """Free what was retained."""
        for name in names:
            self._plane.forget(name)
        self._freed()

    def clear(self) -> None:
        """Free everything."""
        self._plane.clear()
        if self.draft is not None:
            self.draft.clear()

    def free(self, sessions: Sequence[SessionId]) -> None:
        for session in sessions:
            self._plane.close(session)
        self._end_drafts(sessions)
        self._freed()

    def _end_drafts(self, sessions: Iterable[SessionId]) -> None:
        if self.draft is not None:
            for session in sessions:
                self.draft.close(session)

    def run_draft(self, steps: Sequence[DraftStep]) -> list[int | None]:
        """What the draft model says follows each, of several sessions; None where there is no memory for that. Raises
        PLANE_ERRORS where the model cannot be run."""
        assert self.draft is not None, "nobody asks without one"
        return self.draft.run(steps, self._account_all)

    def run(self, turn: Sequence[Work[StageSession]]) -> list[Outcome | Exception]:
        """What each chunk gave, or what went wrong with it: the others then go on without it. MemoryError: there is no
        memory for it now; it may be run again."""
        found: dict[int, Outcome | Exception] = {}
        for place, work in enumerate(turn):
            if self._plan.last and _stale(work):
                found[place] = Outcome()
            elif (error := self._grow(work)) is not None:
                found[place] = error
            elif (scores := work.session.scores) is not None and scores.wants(work.chunk.start):
                found[place] = self._scored(work, scores)
        ready = [place for place in range(len(turn)) if place not in found]
        found.update(zip(ready, self._run([turn[place] for place in ready]), strict=True))
        return [found[place] for place in range(len(turn))]

    def _grow(self, work: Work[StageSession]) -> MemoryError | None:
        """Set memory aside for the chunk."""
        session = work.session.id
        if work.chunk.start < 0:
            return None  # set aside when the session was opened
        if self._plane.reserve(session, work.chunk.end):
            try:
                self._account()
            except MemoryError as error:
                self._plane.reserve(session, 0)
                return error
        return None

    def _run(self, turn: Sequence[Work[StageSession]]) -> list[Outcome | Exception]:
        if not turn:
            return []
        try:
            pieces, ids = zip(*(self._piece(work) for work in turn), strict=True)
            found = self._plane.run(pieces)
        except PLANE_ERRORS as error:
            return [_broken(error)] if len(turn) == 1 else [self._run((work,))[0] for work in turn]
        return [self._outcome(*each) for each in zip(turn, found, ids, strict=True)]

    def _scored(self, work: Work[StageSession], scores: PromptScores) -> Outcome | Exception:
        """A chunk of a prompt whose tokens are told of, which runs by itself: logits of all of its positions, a part of them at
        a time. Where pieces do not run together, a part is one position."""
        chunk = work.chunk
        most = scores.at_once if self._plane.together else 1
        told, tokens = list[tuple[int, bytes]](), tuple[Token, ...]()
        try:
            piece, _ = self._piece(work)
            along = self._along() if most < chunk.length else {}
            for first in range(0, chunk.length, most):
                count = min(most, chunk.length - first)
                part = piece if count == chunk.length else piece.part(first, count, along)
                [outputs] = self._plane.run([replace(part, shown=count)])
                logits = outputs["result/0"][0]
                told += scores.told(chunk.start + first, logits)
            if chunk.sample:
                tokens = tuple(_choose(work.session, chunk, logits))
        except PLANE_ERRORS as error:
            return _broken(error)
        return Outcome(tokens=tokens, scores=tuple(told))

    def _along(self) -> dict[str, tuple[int, int]]:
        """The dimension along the sequence of each input, and how many rows a position has there. ValueError where one has none."""
        found = {}
        for given in self._plane.stage.graph.inputs:
            axis = sequence_axis(given.type)
            if axis is None:
                raise ValueError(f"echo: {given.name} is of no position, so a chunk cannot be run in parts")
            found[given.name] = axis, rows_per_position(given.type, axis)
        return found

    def _piece(self, work: Work[StageSession]) -> tuple[Piece, memoryview]:
        """What the plane runs, and the bytes of the chunk's token ids where there are any."""
        chunk, ids = work.chunk, work.ids
        plan, inputs = self._plan.of(chunk.start), dict[str, torch.Tensor]()
        for parcel, payload in work.parts:
            ids = parcel.unpack(payload, chunk.length, inputs) or ids
        if plan.source is not None:
            inputs[plan.source.name] = unpack_source(plan.source.type, ids, chunk.length)
        if plan is not self._plan:
            return Piece(work.session.id, chunk.start, inputs), ids
        if self._plan.reads_ids:
            inputs["input_ids"] = torch.frombuffer(bytearray(ids), dtype=torch.int64).unsqueeze(0)
        if self._plan.reads_positions:
            inputs["position_ids"] = self._positions[:, chunk.start : chunk.end]
        # What is guessed, and what of the answer is read again, has the bits of positions that ran one by one.
        again = self._plane.together and chunk.length > 1 and chunk.start >= work.session.opening.first
        shown = chunk.length if chunk.guesses else 1
        return Piece(work.session.id, chunk.start, inputs, bool(chunk.guesses) or again, shown), ids

    def _outcome(
        self, work: Work[StageSession], outputs: Mapping[str, torch.Tensor], ids: memoryview
    ) -> Outcome | Exception:
        try:
            return self._made(work, outputs, ids)
        except PLANE_ERRORS as error:  # this session's logits are not numbers, for example
            return error

    def _made(
        self, work: Work[StageSession], outputs: Mapping[str, torch.Tensor], ids: memoryview
    ) -> Outcome:
        plan = self._plan.of(work.chunk.start)
        if not plan.last:
            return Outcome(sends=tuple(p.pack(outputs, ids) for p in plan.outgoing))
        if not work.chunk.sample:
            return Outcome()
        return Outcome(tokens=tuple(_choose(work.session, work.chunk, outputs["result/0"][0])))


def _stale(work: Work[StageSession]) -> bool:
    """At the last stage: whether the chunk follows a guess that was wrong."""
    chunk, verdicts = work.chunk, work.session.verdicts
    if not chunk.sample:
        return False
    guessed = zip(range(chunk.end - len(chunk.guesses), verdicts.next), chunk.guesses, strict=False)
    return chunk.start >= verdicts.next or not all(verdicts.holds(*guess) for guess in guessed)


def _choose(session: StageSession, chunk: Chunk, logits: torch.Tensor) -> Iterator[Token]:
    """The tokens after the chunk's positions, up to the first that was guessed wrongly. logits: (positions or 1, vocabulary), of
    the last positions."""
    opening, counts, verdicts = session.opening, session.counts, session.verdicts
    constraint = session.constraint
    first = max(chunk.start, verdicts.next - 1) if chunk.guesses else chunk.end - 1
    for place in range(first - chunk.end, 0):
        position, row = chunk.end + place + 1, logits[place]
        allowed = None if constraint is None else constraint.allowed()
        if session.suppressed is not None:
            allowed = session.suppressed.of(allowed, first=position == opening.first)
        if session.withheld is not None:
            allowed = session.withheld.of(allowed, position)
        token = sample(row, opening.sampling, position, counts, allowed)
        complete = constraint is not None and constraint.push(token)
        verdicts.push(token)
        if counts is not None:
            counts.push(token)
        raw = row.to(device="cpu", dtype=torch.float32).numpy().tobytes() if opening.logits else b""
        probable = None if opening.top_logprobs is None else logprobs(row, token, opening.top_logprobs)
        yield Token(position, token, raw, probable, guessed=-place <= len(chunk.guesses), complete=complete)
        if complete or (place < -1 and chunk.guesses[place + 1] != token):
            return


def _broken(error: Exception) -> Exception:
    """The device's own lack of memory is not one that others' sessions could give way to."""
    return RuntimeError(str(error)) if isinstance(error, MemoryError) else error
