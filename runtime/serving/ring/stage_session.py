"""One session at one stage: its chunks, and running them in the worker thread. Knows of peers and streams only that a session has links
to the stages it feeds.
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
from fusion.runtime.serving.ring.guesses import SampledTokens
from fusion.runtime.serving.ring.penalties import TokenCounts
from fusion.runtime.serving.ring.sampling import PromptScores, logprobs, sample
from fusion.runtime.serving.ring.schedule import Work
from fusion.runtime.serving.ring.session import Chunk, Feed, Opening, SessionId
from fusion.swarm.errors import FrameError
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.transport import PeerId, by_itself

# Errors of running a stage: torch's for wrong data, out of memory, and our own JobFailed.
PLANE_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, MemoryError)
PART_BYTES = 1024  # overhead counted for each part or chunk that waits


@dataclass(frozen=True)
class Part:
    """One stage's part of a chunk."""

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
    scores: PromptScores | None = (
        None  # at the last stage, where the prompt's log-probabilities are requested
    )
    sampled: SampledTokens = field(init=False)  # at the last stage, in the worker thread
    user: tuple[PeerId, int] = field(init=False)  # its gateway, and the gateway's number of the tenant
    constraint: TokenConstraint | None = None  # at the last stage, where there is a schema
    suppressed: SuppressedTokens | None = None  # at the last stage, where the model suppresses tokens
    withheld: WithheldEnds | None = None  # at the last stage, where there are min_tokens
    parts: dict[int, dict[int, Part]] = field(default_factory=dict)  # order of chunk -> sender -> its part
    waiting_positions: int = 0  # of these
    waiting_bytes: int = 0  # of these, and of chunks that wait for the source
    early: list[Work[StageSession]] = field(default_factory=list)  # chunks that arrived before the source
    encoded: bool = False  # whether the source has arrived
    ended: bool = False  # at the last stage: the completion has its last token
    ran: int = 0  # chunks
    active_at: float = 0.0  # when its gateway's last frame about it arrived, or a chunk of it last ran
    freed: asyncio.Task[None] | None = None  # frees its memory, once it is closed
    held: int = 0  # cached positions when it was opened
    reached: int = 0  # cached positions now

    def __post_init__(self) -> None:
        self.sampled = SampledTokens(self.opening.prompt_length)
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
        """Keep the part of `sender`; returns all parts once `senders` have sent theirs. Earlier chunks that are still incomplete are
        dropped: some stage has found them stale. FrameError where too many wait."""
        # The known sequence, and as many guesses in flight, at most.
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
        """The chunks that may run now that `work` has arrived: none before the source, which may arrive later over another link.
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
    """Bytes of a chunk that waits."""
    return PART_BYTES + sum(len(payload) for _, payload in work.parts)


@dataclass(frozen=True)
class Token:
    """A sampled token. `guessed`: it follows an accepted guess, so it took no trip of its own."""

    position: int
    id: int
    logits: bytes = b""
    logprobs: Logprobs | None = None
    guessed: bool = False
    complete: bool = False  # the schema allows no further token


@dataclass(frozen=True)
class Outcome:
    sends: tuple[list[memoryview], ...] = ()  # payload for each outgoing parcel
    tokens: tuple[Token, ...] = ()  # by position
    scores: tuple[tuple[int, bytes], ...] = ()  # of the prompt's tokens, as `PromptScores.scores_of`


@dataclass(frozen=True)
class ReusedPrefix:
    """A cached prefix of a session: in another session, or the name of a retained entry, which is `moved` if the session takes it over."""

    name: SessionId | int
    positions: int
    moved: bool = False


@dataclass(frozen=True)
class Kept:
    """A session that has ended, whose first positions are retained as entry `name`."""

    session: SessionId
    name: int
    positions: int


class StageRunner:
    """Runs a stage, and the draft model beside it, in the worker thread: every method is called there. `account` is called when sessions
    have begun or ended; it raises MemoryError (one line) where the peer would hold more than it lends. The draft model's cache is
    dropped before a session fails for lack of memory."""

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
        """Account for freed memory. It may still be more than is reserved for this stage, if another stage has just claimed retained
        memory that this one has not been asked to evict yet."""
        with suppress(MemoryError):
            self._account_all()

    @property
    def guesses(self) -> bool:
        """Whether speculation is supported."""
        return self._plane.batched

    def begin(
        self,
        session: SessionId,
        capacity: int,
        positions: int,
        prefix: ReusedPrefix | None = None,
        encoded: int = 0,
    ) -> int:
        """Begin a session of at most `capacity` positions, with memory reserved for `positions` and the cached `prefix`. `encoded`: length
        of the encoder's input. Returns how many positions are cached. MemoryError, in one line, where it does not fit; then nothing has
        changed."""
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
        """Whether a chunk may trigger a compilation of seconds."""
        return self._plane.compiles

    @property
    def chunk_invariant(self) -> bool:
        """Whether results do not depend on how a prompt is cut into chunks, so that its keys and values may be reused for another with the
        same prefix."""
        return self._plane.chunk_invariant

    @property
    def has_cache(self) -> bool:
        """Whether sessions have keys and values here; a stage without attention has none."""
        return self._plane.has_cache

    def retain(self, kept: Sequence[Kept]) -> list[tuple[int, int]]:
        """Retain the prefixes of sessions that have ended. Returns positions and bytes of each."""
        sizes = [self._plane.retain(each.session, each.name, each.positions) for each in kept]
        self._end_drafts(each.session for each in kept)
        self._freed()
        return sizes

    def forget(self, names: Sequence[int]) -> None:
        """Free retained prefixes."""
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
        """The draft model's next token for each step, of several sessions; None where there is no memory. Raises PLANE_ERRORS where the
        model fails."""
        assert self.draft is not None, "nobody asks without one"
        return self.draft.run(steps, self._account_all)

    def run(self, turn: Sequence[Work[StageSession]]) -> list[Outcome | Exception]:
        """Run the chunks of a turn; returns the outcome or the error of each. MemoryError: there is no memory for it now; it may be
        retried."""
        outcomes: dict[int, Outcome | Exception] = {}
        for place, work in enumerate(turn):
            if self._plan.last and _stale(work):
                outcomes[place] = Outcome()
            elif (error := self._grow(work)) is not None:
                outcomes[place] = error
            elif (scores := work.session.scores) is not None and scores.wants(work.chunk.start):
                outcomes[place] = self._scored(work, scores)
        ready = [place for place in range(len(turn)) if place not in outcomes]
        outcomes.update(zip(ready, self._run([turn[place] for place in ready]), strict=True))
        return [outcomes[place] for place in range(len(turn))]

    def _grow(self, work: Work[StageSession]) -> MemoryError | None:
        """Reserve memory for the chunk."""
        session = work.session.id
        if work.chunk.start < 0:
            return None  # reserved when the session was opened
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
            outputs = self._plane.run(pieces)
        except PLANE_ERRORS as error:
            return [_broken(error)] if len(turn) == 1 else [self._run((work,))[0] for work in turn]
        return [self._outcome(*each) for each in zip(turn, outputs, ids, strict=True)]

    def _scored(self, work: Work[StageSession], scores: PromptScores) -> Outcome | Exception:
        """Run a chunk of a prompt whose log-probabilities are requested, by itself: it needs the logits of all positions, in parts of
        `at_once`, or of one position where the plane does not run pieces together."""
        chunk = work.chunk
        most = scores.at_once if self._plane.batched else 1
        scored_pieces, tokens = list[tuple[int, bytes]](), tuple[Token, ...]()
        try:
            piece, _ = self._piece(work)
            along = self._along() if most < chunk.length else {}
            for first in range(0, chunk.length, most):
                count = min(most, chunk.length - first)
                part = piece if count == chunk.length else piece.slice(first, count, along)
                [outputs] = self._plane.run([replace(part, logit_positions=count)])
                logits = outputs["result/0"][0]
                scored_pieces += scores.scores_of(chunk.start + first, logits)
            if chunk.sample:
                tokens = tuple(_choose(work.session, chunk, logits))
        except PLANE_ERRORS as error:
            return _broken(error)
        return Outcome(tokens=tokens, scores=tuple(scored_pieces))

    def _along(self) -> dict[str, tuple[int, int]]:
        """The sequence dimension of each input, and the rows of a position there. ValueError where one has none."""
        axes = {}
        for given in self._plane.stage.graph.inputs:
            axis = sequence_axis(given.type)
            if axis is None:
                raise ValueError(f"echo: {given.name} is of no position, so a chunk cannot be run in parts")
            axes[given.name] = axis, rows_per_position(given.type, axis)
        return axes

    def _piece(self, work: Work[StageSession]) -> tuple[Piece, memoryview]:
        """The piece for the plane, and the bytes of the chunk's token ids, if it has any."""
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
        # Guesses, and tokens of the completion that are prefilled again, must have the bits of positions that ran singly.
        again = self._plane.batched and chunk.length > 1 and chunk.start >= work.session.opening.first
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
    """Called at the last stage: whether the chunk follows a rejected guess."""
    chunk, sampled = work.chunk, work.session.sampled
    if not chunk.sample:
        return False
    guessed = zip(range(chunk.end - len(chunk.guesses), sampled.next), chunk.guesses, strict=False)
    return chunk.start >= sampled.next or not all(sampled.holds(*guess) for guess in guessed)


def _choose(session: StageSession, chunk: Chunk, logits: torch.Tensor) -> Iterator[Token]:
    """Sample the tokens after the chunk's positions, up to the first rejected guess. logits: (positions or 1, vocabulary), of the last
    positions."""
    opening, counts, sampled = session.opening, session.counts, session.sampled
    constraint = session.constraint
    first = max(chunk.start, sampled.next - 1) if chunk.guesses else chunk.end - 1
    for place in range(first - chunk.end, 0):
        position, row = chunk.end + place + 1, logits[place]
        allowed = None if constraint is None else constraint.allowed()
        if session.suppressed is not None:
            allowed = session.suppressed.of(allowed, first=position == opening.first)
        if session.withheld is not None:
            allowed = session.withheld.of(allowed, position)
        token = sample(row, opening.sampling, position, counts, allowed)
        complete = constraint is not None and constraint.push(token)
        sampled.push(token)
        if counts is not None:
            counts.push(token)
        raw = row.to(device="cpu", dtype=torch.float32).numpy().tobytes() if opening.logits else b""
        probable = None if opening.top_logprobs is None else logprobs(row, token, opening.top_logprobs)
        yield Token(position, token, raw, probable, guessed=-place <= len(chunk.guesses), complete=complete)
        if complete or (place < -1 and chunk.guesses[place + 1] != token):
            return


def _broken(error: Exception) -> Exception:
    """An error that is not retried: evicting sessions does not help if the device itself is out of memory."""
    return RuntimeError(str(error)) if isinstance(error, MemoryError) else error
