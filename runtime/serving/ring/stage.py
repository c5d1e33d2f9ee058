"""One stage of a model being served: its place in the decode ring.

A token makes one trip around the ring: the first stage feeds it, each stage runs its part in the worker thread and
passes the activations on, the last one samples and hands the new token to the first stage and to the gateway at
once. What a session's `open` fixed is not said again: a frame carries the session, the positions and the data.

Which sessions are taken and what a turn runs is decided in `fusion.runtime.serving.ring.schedule`; here it is carried out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.worker import Worker
from fusion.runtime.planes.plane import DecodingStage
from fusion.runtime.serving.requests.request import pack_tokens, whole
from fusion.runtime.serving.ring.frames import RingPlan
from fusion.runtime.serving.ring.gateways import Gateways
from fusion.runtime.serving.ring.links import GATEWAY, RingPosition, ShownGrants, no_grants
from fusion.runtime.serving.ring.schedule import Work
from fusion.runtime.serving.ring.session import Chunk, FailedReason
from fusion.runtime.serving.ring.stage_session import Outcome, StageRunner, StageSession
from fusion.runtime.serving.ring.stage_sessions import StageSessions
from fusion.swarm.errors import FrameError, StaleTerm
from fusion.swarm.printable import error_line
from fusion.swarm.transport import Frame, PeerId, Stream, Transport

log = logging.getLogger(__name__)

SEE_OFF_SECONDS = 3.0  # for sessions to move when we leave

Turn = tuple[Work[StageSession], ...]


class RingStage:
    """Serves one stage until `run` is cancelled. `attend` takes each incoming ring stream that is for this stage."""

    def __init__(
        self,
        transport: Transport,
        worker: Worker,
        plane: DecodingStage,
        plan: RingPlan,
        position: RingPosition,
        account: Callable[[], None] = lambda: None,
        doubt: Callable[[PeerId], None] = lambda peer: None,
        clock: Callable[[], float] = time.monotonic,
        chain: ShownGrants = no_grants,
    ) -> None:
        """`chain`: the grants that we show other stages. `account` runs in the worker thread when sessions have come or gone: MemoryError (one line) where the peer
        would hold more than it lends. `doubt` is told of a peer whose link may have become slow."""
        self._worker = worker
        self._runner = StageRunner(plane, plan, position.serve.max_sequence, account)
        self._plan = plan
        self._position = position
        self._incoming = {parcel.producer: parcel for parcel in plan.incoming}
        self._sessions = StageSessions(transport, worker, self._runner, plan, position, clock, chain)
        self._schedule = self._sessions.schedule
        self._gateways = Gateways(plan, position, self._sessions, self._advance, doubt)
        self._arrived, self._room = asyncio.Event(), asyncio.Event()  # work came; some was taken
        self._leaving = False
        self._streams: set[Stream] = set()
        self._tokens = 0

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def running(self) -> bool:
        return self._sessions.running

    @property
    def tokens(self) -> int:
        """Passed since the start."""
        return self._tokens

    async def run(self) -> None:
        """Serve until cancelled; then tell the gateways, and end every stream. After `leave` the sessions have a
        moment to move first."""
        async with asyncio.TaskGroup() as tasks:
            self._sessions.start(tasks)
            turning = tasks.create_task(self._turn_for_ever(tasks))
            try:
                await asyncio.wait([turning])
            except asyncio.CancelledError:
                if self._leaving and not turning.done():
                    await self._see_off()
                raise
            finally:
                self._sessions.stop()
                for stream in self._streams:
                    stream.abort()
                await asyncio.gather(self._sessions.aclose(), self._gateways.aclose())

    def hold(self, term: int) -> None:
        """We own now what we ran as a replica: sessions may know us by this term too."""
        self._sessions.terms.add(term)

    def leave(self) -> None:
        """When `run` is cancelled another peer will hold the stage already: serve the sessions until they moved."""
        self._leaving = True

    async def _see_off(self) -> None:
        self._sessions.leaving = True
        self._gateways.leaving()
        emptied = asyncio.create_task(self._sessions.emptied())
        await asyncio.wait([emptied], timeout=SEE_OFF_SECONDS)
        emptied.cancel()

    async def attend(
        self, stream: Stream, sender: int, refusal: Callable[[], str | None] = lambda: None
    ) -> None:
        """Answer one incoming stream of a gateway or of another stage until it ends. `refusal`: why the other end may not
        take part in the job, if so; it is asked again before each session."""
        if (refused := refusal()) is not None:
            raise JobError(f"{self._position.name}: {refused}")
        if not self.running:
            raise StaleTerm(f"stage {self._plan.index} of {self._position.name} is not served here now")
        if sender == GATEWAY:
            await self._gateways.attend(stream, refusal)
            return
        if sender in self._incoming:
            stream.allow(self._incoming[sender].size_bytes(self._position.serve.max_sequence))
        self._streams.add(stream)
        try:
            while True:
                frame = await stream.receive()
                if frame.kind == "chunk":
                    await self._take_chunk(sender, stream.remote, frame)
                elif frame.kind == "token":
                    self._take_token(stream.remote, frame.header)
                else:
                    raise FrameError(f"stages send chunks and tokens, not {frame.kind!r:.40}")
        finally:
            self._streams.discard(stream)

    # --- what comes in

    async def _take_chunk(self, sender: int, remote: PeerId, frame: Frame) -> None:
        session = self._sessions.named(frame.header)
        if session is None or not session.ready:
            return  # closed while the frame was under way
        parcel = self._incoming.get(sender)
        if parcel is None or session.opening.route[sender].peer != remote:
            raise StaleTerm(f"stage {sender} does not feed stage {self._plan.index} in this session")
        start, length = whole(frame.header, "start", -1), whole(frame.header, "length", 0)
        if start < 0 or length < 1 or start + length > session.opening.capacity:
            raise FrameError(f"positions {start} to {start + length} are not in the session")
        if len(frame.payload) != parcel.size_bytes(length):
            raise FrameError(f"{len(frame.payload)} bytes; {parcel.size_bytes(length)} were to come")
        chunk = Chunk(start, length, frame.header.get("sample") is True)
        if len(self._incoming) > 1:
            shares = session.parts.setdefault(chunk.end, {})
            shares[sender] = frame
            if len(shares) < len(self._incoming):
                return
            del session.parts[chunk.end]
            parts = tuple((p, shares[p.producer].payload) for p in self._plan.incoming)
        else:
            parts = ((parcel, frame.payload),)
        while not self._schedule.has_room:
            self._room.clear()
            await self._room.wait()
        self._schedule.add(Work(session, chunk, memoryview(b""), parts))
        self._arrived.set()

    def _take_token(self, remote: PeerId, header: Mapping[str, Any]) -> None:
        session = self._sessions.named(header)
        if session is None:
            return  # closed while the frame was under way
        if session.opening.route[-1].peer != remote or session.feed is None:
            raise StaleTerm("only the last stage chooses tokens, and the first one takes them")
        token = whole(header, "id", -1)
        if not 0 <= token < self._position.serve.vocabulary:
            raise FrameError(f"token {token} is not in the vocabulary")
        session.feed.push(whole(header, "position", -1), token)
        self._advance(session)

    def _advance(self, session: StageSession) -> None:
        """Put in the session's next chunk, if the first stage knows one."""
        feed = session.feed
        assert feed is not None
        most = self._schedule.prefill_positions(session, self._position.serve.prefill_chunk, feed.fed)
        step = feed.next(most)
        if step is not None and not session.closed:
            chunk, ids = step
            self._tokens += chunk.sample
            self._schedule.add(Work(session, chunk, memoryview(pack_tokens(ids))))
            self._arrived.set()

    # --- turns

    async def _turn_for_ever(self, tasks: asyncio.TaskGroup) -> None:
        """What a turn gave is passed on while the next one runs."""
        passing: asyncio.Task[None] | None = None
        while True:
            turn = await self._next()
            outcomes = await self._worker.run(self._runner.run, turn)
            if passing is not None:
                await asyncio.wait([passing])
            passing = tasks.create_task(self._pass_all_on(turn, outcomes))

    async def _next(self) -> Turn:
        while True:
            turn = self._schedule.next_turn()
            self._room.set()
            if turn:
                return turn
            self._arrived.clear()
            await self._arrived.wait()

    async def _pass_all_on(self, turn: Turn, outcomes: Sequence[Outcome | Exception]) -> None:
        for work, outcome in zip(turn, outcomes, strict=True):
            if work.session.closed:
                continue
            if not isinstance(outcome, Exception):
                await self._pass_on(work, outcome)
            elif isinstance(outcome, MemoryError) and await self._sessions.make_room(work.session):
                self._schedule.add(work, again=True)
                self._arrived.set()
            else:
                self._fail(work.session, outcome)

    def _fail(self, session: StageSession, error: Exception) -> None:
        log.warning("session %s: %s", session.id, error_line(error))
        reason: FailedReason = "full" if isinstance(error, MemoryError) else "broken"
        self._sessions.fail(session, f"{self._sessions.here}: {error_line(error)}", reason)

    async def _pass_on(self, work: Work[StageSession], outcome: Outcome) -> None:
        """What a chunk gave goes to the next stages; the last one's token around the ring."""
        session, chunk = work.session, work.chunk
        self._sessions.heard(session, ran=True)
        if outcome.token is not None:
            self._answer(session, chunk.end, outcome.token, outcome)
        if session.hops:
            header = {
                "session": session.id,
                "start": chunk.start,
                "length": chunk.length,
                "sample": chunk.sample,
            }
            for (_, link), payload in zip(session.hops, outcome.sends, strict=True):
                await link.send("chunk", header, payload)
        if session.feed is not None and not chunk.sample:
            self._advance(session)  # the prompt's next chunk, behind what others have waiting

    def _answer(self, session: StageSession, position: int, token: int, outcome: Outcome) -> None:
        """The last stage chose `token`: to the first stage first, it is what the ring waits for."""
        opening = session.opening
        finish = opening.finish(token, position, self._position.serve.end_tokens)
        header = {"session": session.id, "id": token, "position": position}
        if not finish:
            if session.back is not None:
                session.back.post("token", header)
            elif session.feed is not None:
                session.feed.push(position, token)
                self._advance(session)
        probable = {} if outcome.logprobs is None else outcome.logprobs.to_header()
        payload = (outcome.logits,) if outcome.logits else ()
        session.gateway.post("token", {**header, "finish": finish, **probable}, payload)
