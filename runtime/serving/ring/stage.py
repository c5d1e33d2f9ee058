"""One stage of a model being served: its place in the decode ring.

A token makes one trip around the ring: the first stage feeds it, each stage runs its part in the worker thread and sends the activations
on, the last one samples and sends the new token to the first stage and to the gateway at once. Settings are sent once, in a session's
`open`; later frames have only the session, the positions and the data. Admission and the contents of a turn are decided in
`fusion.runtime.serving.ring.schedule` and carried out here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.worker import Worker
from fusion.runtime.serving.requests.header_fields import pack_tokens, whole
from fusion.runtime.serving.ring.batches import BATCHES, BY_ITSELF, MAX_BYTES, TurnFrames, frames_of
from fusion.runtime.serving.ring.constraint import Constrain, unconstrained
from fusion.runtime.serving.ring.drafting import Drafting
from fusion.runtime.serving.ring.frames import Parcel, RingPlan
from fusion.runtime.serving.ring.gateways import Gateways
from fusion.runtime.serving.ring.links import (
    ACKS,
    GATEWAY,
    FullLinks,
    GrantsOf,
    RingPosition,
    no_grants,
    prompt_bytes,
)
from fusion.runtime.serving.ring.schedule import Work
from fusion.runtime.serving.ring.session import Chunk, SessionId, guessed_tokens
from fusion.runtime.serving.ring.stage_session import Outcome, StageRunner, StageSession, Token
from fusion.runtime.serving.ring.stage_sessions import StageSessions
from fusion.swarm.errors import FrameError, StaleTerm, SwarmError
from fusion.swarm.transport import Frame, PeerId, Stream, Transport

DRAIN_SECONDS = 3.0  # for sessions to move when this stage leaves
SCORED_POSITIONS = 128  # in a chunk of a prompt whose log-probabilities are requested
UNSENT_BYTES = 128 << 20  # of chunks for far ends that do not read
UNREAD_BYTES = 64 << 20  # of tokens, with their logits and log-probabilities, for gateways that do not read

Turn = tuple[Work[StageSession], ...]


class RingStage:
    """Serves one stage until `run` is cancelled. `attend` handles each incoming ring stream of this stage."""

    def __init__(
        self,
        transport: Transport,
        worker: Worker,
        runner: StageRunner,
        plan: RingPlan,
        position: RingPosition,
        doubt: Callable[[PeerId], None] = lambda peer: None,
        clock: Callable[[], float] = time.monotonic,
        chain: GrantsOf = no_grants,
        constrain: Constrain = unconstrained,
    ) -> None:
        """`constrain` opens completions with a schema; `chain`: our grants in a job; `doubt` is called with a peer whose link may have
        become slow."""
        self._worker = worker
        self._clock = clock
        self._runner = runner
        self._plan = plan
        self._position = position
        self._arrived = asyncio.Event()  # work arrived, or waiting work may run now
        self._sessions = StageSessions(
            transport, worker, self._runner, plan, position, clock, chain, constrain, self._arrived.set
        )
        self._schedule = self._sessions.schedule
        self._drafting = Drafting(worker, runner, self._schedule, clock)
        self._gateways = Gateways(plan, position, self._sessions, self._advance, doubt, self._drafting)
        self._leaving = False
        self._streams: set[Stream] = set()
        self._full = FullLinks(self._arrived.set, UNSENT_BYTES)
        self._unread = FullLinks(lambda: None, UNREAD_BYTES)
        self._tokens = 0

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def running(self) -> bool:
        return self._sessions.running

    @property
    def tokens(self) -> int:
        """Tokens passed since the start."""
        return self._tokens

    async def run(self) -> None:
        """Serve until cancelled; then notify the gateways, and end every stream. After `leave` sessions have DRAIN_SECONDS to move
        first."""
        async with asyncio.TaskGroup() as tasks:
            self._sessions.start(tasks)
            self._full.start(tasks)
            self._unread.start(tasks)
            turning = tasks.create_task(self._run_turns())
            try:
                await asyncio.wait([turning])
            except asyncio.CancelledError:
                if self._leaving and not turning.done():
                    await self._drain()
                raise
            finally:
                self._sessions.stop()
                for stream in self._streams:
                    stream.abort()
                await asyncio.gather(self._sessions.aclose(), self._gateways.aclose())

    def hold(self, term: int) -> None:
        """This replica has become the owner: accept sessions under the new term too."""
        self._sessions.terms.add(term)

    def shed(self, bytes_: int) -> None:
        """Evict so many bytes of retained prefixes: another stage of this peer needs the memory."""
        self._sessions.memory.shed(bytes_)

    def leave(self) -> None:
        """When `run` is cancelled another peer will hold the stage already: drain the sessions then."""
        self._leaving = True

    def stay(self) -> None:
        """Undo `leave`: no peer took the stage over."""
        self._leaving = False

    async def _drain(self) -> None:
        self._sessions.leaving = True
        self._gateways.leaving()
        emptied = asyncio.create_task(self._sessions.emptied())
        await asyncio.wait([emptied], timeout=DRAIN_SECONDS)
        emptied.cancel()

    async def attend(
        self,
        stream: Stream,
        sender: int,
        refusal: Callable[[], str | None] = lambda: None,
        *,
        batches: bool = False,
        acks: bool = False,
    ) -> None:
        """Handle one incoming stream of a gateway or another stage until it ends. `refusal` returns why the other end may not take part
        in the job, or None; it is called again before each session. `batches`: the other end accepts joined frames; `acks`:
        acknowledgements of prompt bytes."""
        if (reason := refusal()) is not None:
            raise JobError(f"{self._position.name}: {reason}")
        if not self.running:
            raise StaleTerm(f"stage {self._plan.index} of {self._position.name} is not served here now")
        if sender == GATEWAY:
            await self._gateways.attend(stream, refusal, batches=batches)
            return
        if batches:
            await stream.send(BATCHES, {ACKS: True} if acks else {})
        if fed := self._plan.incoming_by(sender):
            stream.allow(max(MAX_BYTES, *(parcel.most_bytes(self._position.serve) for parcel in fed)))
        self._streams.add(stream)
        received = acked = 0  # of prompts
        try:
            while True:
                frame = await stream.receive()
                match frame.kind:
                    case "chunk":
                        received += prompt_bytes(frame)
                        await self._take_chunk(sender, stream.remote, frame)
                    case "chunks":
                        for each in frames_of(frame, partial(self._size_of, sender)):
                            received += prompt_bytes(each)
                            await self._take_chunk(sender, stream.remote, each)
                    case "token":
                        self._take_token(stream.remote, frame.header)
                    case "tokens":
                        for each in frames_of(frame):
                            self._take_token(stream.remote, each.header)
                    case _:
                        raise FrameError(f"stages send chunks and tokens, not {frame.kind!r:.40}")
                if acks and received > acked:
                    acked = received
                    await stream.send("ack", {"bytes": received})
        finally:
            self._streams.discard(stream)

    # --- received frames

    async def _take_chunk(self, sender: int, remote: PeerId, frame: Frame) -> None:
        while not self._schedule.has_room:
            self._sessions.room.clear()
            await self._sessions.room.wait()
        session = self._sessions.named(frame.header)
        if session is not None and session.ready:
            self._put_in(sender, remote, session, frame)
            return
        if session is not None and not self._feeds(session, sender, remote):
            return
        name = SessionId(frame.header["session"])
        self._sessions.wait(name, remote, frame, partial(self._put_in_early, sender, remote))

    def _put_in_early(self, sender: int, remote: PeerId, session: StageSession, frame: Frame) -> None:
        try:
            self._put_in(sender, remote, session, frame)
        except (SwarmError, ValueError) as error:
            self._sessions.fail_with(session, error)

    def _feeds(self, session: StageSession, sender: int, remote: PeerId) -> bool:
        """Whether the session's route has that peer at stage `sender`. StaleTerm where that stage never feeds this one."""
        if not self._plan.incoming_by(sender):
            raise self._not_fed_by(sender)
        return session.opening.route[sender].peer == remote

    def _put_in(self, sender: int, remote: PeerId, session: StageSession, frame: Frame) -> None:
        """Queue a chunk of an open session. Raises FrameError, JobError, StaleTerm for what no stage may send. A chunk that only does not
        fit the session fails the session and not the stream, which other sessions share: the gateway may have sent this stage and the
        sender different openings."""
        if not self._feeds(session, sender, remote):
            return
        serve = self._position.serve
        source = 0 if serve.source is None else serve.source.length
        chunk = Chunk.from_header(frame.header, serve.max_sequence, serve.vocabulary, source)
        plan = self._plan.of(chunk.start)
        parcel = self._parcel(plan, sender)
        if len(frame.payload) != parcel.size_bytes(chunk.length):
            raise FrameError(f"{len(frame.payload)} bytes; {parcel.size_bytes(chunk.length)} were to come")
        try:
            chunk.check_in(session.opening)
            if len(plan.incoming) > 1:
                sent = session.take_part(chunk, sender, frame.payload, len(plan.incoming))
                if sent is None:
                    self._sessions.account_parts(session)
                    return
                parts = tuple((p, sent[p.producer].payload) for p in plan.incoming)
            else:
                parts = ((parcel, frame.payload),)
            ready = session.in_order(Work(session, chunk, memoryview(b""), parts))
        except FrameError as error:
            self._sessions.fail_with(session, error)
            return
        self._sessions.account_parts(session)
        for work in ready:
            self._schedule.add(work)
            self._arrived.set()

    def _parcel(self, plan: RingPlan, sender: int) -> Parcel:
        """The parcel of that stage in this plan. StaleTerm where it has none."""
        parcel = next((each for each in plan.incoming if each.producer == sender), None)
        if parcel is None:
            raise self._not_fed_by(sender)
        return parcel

    def _size_of(self, sender: int, header: Mapping[str, Any]) -> int:
        return self._parcel(self._plan.of(whole(header, "start", 0)), sender).size_of(header)

    def _not_fed_by(self, sender: int) -> StaleTerm:
        return StaleTerm(f"stage {sender} does not feed stage {self._plan.index} in this session")

    def _take_token(self, remote: PeerId, header: Mapping[str, Any]) -> None:
        session = self._sessions.named(header)
        if session is None:
            return  # closed while the frame was in flight
        if not self._plan.first:
            raise StaleTerm("the first stage takes tokens")
        if session.opening.route[-1].peer != remote or session.feed is None:
            return  # the gateway sent different routes
        more = guessed_tokens(header, "more", self._position.serve.vocabulary)
        token = whole(header, "id", -1)
        if not 0 <= token < self._position.serve.vocabulary:
            raise FrameError(f"token {token} is not in the vocabulary")
        position = whole(header, "position", -1)
        try:
            if position + len(more) >= session.opening.capacity:
                raise JobError(f"token for position {position}, which is not in the session")
            self._feed(session, position, [token, *more])
        except JobError as error:  # fails the session, not the stream
            self._sessions.fail_with(session, error)

    def _feed(self, session: StageSession, position: int, tokens: Sequence[int]) -> None:
        """Called at the first stage when tokens were sampled, from `position` on."""
        assert session.feed is not None
        for place, token in enumerate(tokens, position):
            session.feed.push(place, token)
        self._tokens += len(tokens)
        self._drafting.returned(session, position + len(tokens) - 1)
        self._advance(session)
        if self._drafting.running:
            self._arrived.set()  # more may be guessed now

    def _advance(self, session: StageSession) -> None:
        """Called at the first stage: queue the session's next chunk, if there is one, and guesses behind it."""
        feed, schedule = session.feed, self._schedule
        assert feed is not None
        if session.source is not None:
            length, source = session.opening.source, session.source
            session.source = None
            schedule.add(Work(session, Chunk(-length, length, sample=False), source))
            self._arrived.set()
            return
        chunk_positions = self._position.serve.prefill_chunk
        most = chunk_positions
        # Positions of the completion run singly, so they may be cut anywhere
        if self._runner.chunk_invariant or feed.answering:
            most = schedule.prefill_positions(
                session, most, feed.fed, feed.prompt_positions,
                fed=feed.prompt_fed, round_trip_seconds=self._sessions.round_trip_seconds(session),
            )  # fmt: skip
            # The last stage computes logits for each position
            if session.opening.prompt_logprobs is not None:
                most = min(most, SCORED_POSITIONS)
        while not session.closed and (step := feed.next(most, schedule.guesses(session))) is not None:
            chunk, ids = step
            schedule.add(Work(session, chunk, memoryview(pack_tokens(ids))))
            self._drafting.fed(session, chunk)
            self._arrived.set()
            if not chunk.sample:
                return  # the prompt's next chunk is queued behind those of others

    # --- turns

    async def _run_turns(self) -> None:
        """Run turns; the output of each is sent while the next one runs. A short turn runs in the event loop's thread if the loop was idle
        since the last one."""
        over: tuple[Turn, Sequence[Outcome | Exception]] | None = None
        waited = False  # since the last turn
        while True:
            began = self._clock()
            turn = self._waiting_turn(began)
            computing = self._submit(turn, here=waited) if turn else None
            if over is not None:
                await self._pass_all_on(*over)
                over = None
            elif computing is None:
                await self._wait_for_work(began)
                waited = True
            if computing is not None:
                outcomes = await self._worker.result(computing)
                now = self._clock()
                self._schedule.took(turn, now - began, now)
                for work, outcome in zip(turn, outcomes, strict=True):
                    if isinstance(outcome, MemoryError):
                        self._schedule.hold(work.session)
                over, waited = (turn, outcomes), False

    def _submit(self, turn: Turn, *, here: bool) -> asyncio.Future[list[Outcome | Exception]]:
        if here and not self._runner.compiles and self._schedule.is_short(turn):
            return self._worker.submit_short(partial(self._runner.run, turn))
        return self._worker.submit(self._runner.run, turn)

    def _waiting_turn(self, now: float) -> Turn:
        """The chunks to run now; empty where none may."""
        turn = self._schedule.next_turn(now, self._clear, self._sessions.in_window)
        self._sessions.room.set()
        return turn

    async def _wait_for_work(self, now: float) -> None:
        """Nothing may run `now`: run the draft model, or wait."""
        self._arrived.clear()
        if not await self._draft():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._schedule.rest(now) or None):
                    await self._arrived.wait()

    def _clear(self, session: StageSession) -> bool:
        """Whether the session's links have room: else its output would wait, and with it that of the whole turn."""
        return self._full.clear(link for _, link in (*session.hops, *session.source_hops))

    async def _draft(self) -> bool:
        """Run the draft model, as nothing else waits. Whether it ran."""
        drafted = await self._drafting.step()
        for session in drafted:
            self._advance(session)
        return bool(drafted)

    async def _pass_all_on(self, turn: Turn, outcomes: Sequence[Outcome | Exception]) -> None:
        """Send the outputs of a turn: chunks to the next stages, tokens to the first stage and the gateways. Waits only for memory, where a
        chunk had none."""
        tokens, chunks = (TurnFrames(kind, self._sessions.taking) for kind in ("token", "chunk"))
        failed: list[tuple[Work[StageSession], Exception]] = []
        for work, outcome in zip(turn, outcomes, strict=True):
            if work.session.closed or work.session.ended:  # guesses may follow the last token of a completion
                continue
            if isinstance(outcome, Exception):
                self._worker.doubt(outcome)
                failed.append((work, outcome))
            else:
                self._pass_on(work, outcome, tokens, chunks)
        tokens.post()
        chunks.post()
        self._full.look(chunks.links)
        self._unread.look(tokens.links)
        for work, error in failed:
            if work.session.closed:
                continue
            if isinstance(error, MemoryError) and await self._sessions.make_room(work.session):
                self._schedule.add(work, again=True)
                self._arrived.set()
            else:
                self._sessions.fail_with(work.session, error)

    def _pass_on(
        self, work: Work[StageSession], outcome: Outcome, tokens: TurnFrames, chunks: TurnFrames
    ) -> None:
        session, chunk = work.session, work.chunk
        self._sessions.record_activity(session, ran=chunk.end)
        for (
            position,
            scores,
        ) in outcome.scores:  # before the first token, which goes out once the turn is over
            header = {"session": session.id, "position": position}
            session.gateway.post("prompt_logprobs", header, [scores])
            self._unread.look([session.gateway])
        if outcome.tokens:
            self._answer(session, outcome.tokens, tokens)
        hops = session.hops if chunk.start >= 0 else session.source_hops
        if hops:
            header = {"session": session.id, **chunk.to_header()}
            for (parcel, link), payload in zip(hops, outcome.sends, strict=True):
                size_bytes = parcel.size_bytes(chunk.length)
                chunks.put(link, header, payload, size_bytes)
                if not chunk.sample:
                    self._sessions.count_sent(link, size_bytes)
        if session.feed is not None and not chunk.sample:
            self._advance(session)  # the prompt's next chunk, queued behind those of others

    def _answer(self, session: StageSession, tokens: Sequence[Token], frames: TurnFrames) -> None:
        """Send sampled tokens: to the first stage first, as the ring waits for it."""
        opening, serve = session.opening, self._position.serve
        finishes = [
            "stop" if token.complete else opening.finish(token.id, token.position, serve.end_tokens)
            for token in tokens
        ]
        ends = next((place for place, finish in enumerate(finishes) if finish), None)
        if ends is not None:
            session.ended, tokens = True, tokens[: ends + 1]
        elif session.back is not None:
            header = {"session": session.id, "id": tokens[0].id, "position": tokens[0].position}
            more = {"more": [token.id for token in tokens[1:]]} if len(tokens) > 1 else {}
            frames.put(session.back, {**header, **more})
        elif session.feed is not None:
            self._feed(session, tokens[0].position, [token.id for token in tokens])
        for token, finish in zip(tokens, finishes, strict=False):
            header = {"session": session.id, "id": token.id, "position": token.position, "finish": finish}
            if token.guessed:
                header["guessed"] = True
            if token.logprobs is not None:
                header |= token.logprobs.to_header()
            logits = (token.logits,) if token.logits else ()
            frames.put(session.gateway, header, logits, BY_ITSELF if logits else 0)
