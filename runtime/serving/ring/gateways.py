"""The gateways' side of one stage: each gateway has a stream, and its sessions end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.protocol import MAX_PROMPT_BYTES
from fusion.runtime.serving.requests.header_fields import unpack_tokens, whole
from fusion.runtime.serving.ring.drafting import Drafting
from fusion.runtime.serving.ring.frames import RingPlan
from fusion.runtime.serving.ring.links import RingPosition
from fusion.runtime.serving.ring.prefix import checked_chain
from fusion.runtime.serving.ring.session import Feed
from fusion.runtime.serving.ring.stage_session import StageSession
from fusion.runtime.serving.ring.stage_sessions import StageSessions
from fusion.swarm.errors import FrameError, StaleTerm
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.transport import Frame, PeerId, Stream, checked


class Gateways:
    """`fed(session)` is called when a session has received its prompt; `doubt(peer)` when the link to a peer may have become slow."""

    def __init__(
        self,
        plan: RingPlan,
        position: RingPosition,
        sessions: StageSessions,
        fed: Callable[[StageSession], None],
        doubt: Callable[[PeerId], None],
        drafting: Drafting,
    ) -> None:
        self._plan = plan
        self._position = position
        self._sessions = sessions
        self._fed = fed
        self._doubt = doubt
        self._drafting = drafting
        self._streams: dict[QueuedStream, Callable[[], str | None]] = {}
        self._commands = {
            "open": self._open,
            "prompt": self._prompt,
            "close": self._close,
            "ping": self._ping,
            "slow": self._slow,
        }

    def leaving(self) -> None:
        """Announce to all gateways that this stage is about to leave."""
        for stream in self._streams:
            stream.post("leaving", {})

    async def aclose(self) -> None:
        await asyncio.gather(*(stream.aclose() for stream in self._streams))

    async def attend(
        self, incoming: Stream, refusal: Callable[[], str | None] = lambda: None, *, batches: bool = False
    ) -> None:
        """Serve one gateway. `refusal` returns why it may not prompt the model, or None; `batches`: it accepts joined frames."""
        incoming.allow(MAX_PROMPT_BYTES)
        stream = QueuedStream(incoming, on_frame=lambda frame: self._command(stream, checked(frame)))
        if batches:
            self._sessions.taking.add(stream)
        self._streams[stream] = refusal
        try:
            await stream.wait()
        finally:
            del self._streams[stream]
            for session in self._sessions:
                if session.gateway is stream:
                    self._sessions.drop(session)  # its gateway has gone
            await stream.aclose()

    def _command(self, stream: QueuedStream, frame: Frame) -> None:
        command = self._commands.get(frame.kind)
        if command is None:
            known = ", ".join(self._commands)
            raise FrameError(f"gateways send {known}, not {frame.kind!r:.40}")
        try:
            command(stream, frame)
        except (JobError, StaleTerm) as error:
            self._sessions.refuse(stream, frame, error)

    def _open(self, stream: QueuedStream, frame: Frame) -> None:
        if (reason := self._streams[stream]()) is not None:
            raise JobError(f"{self._position.name}: {reason}")
        self._sessions.open(stream, frame.header, frame.payload)

    def _prompt(self, stream: QueuedStream, frame: Frame) -> None:
        session = self._sessions.named(frame.header)
        if session is None:
            return  # closed while the frame was in flight
        if session.gateway is not stream or not self._plan.first:
            raise JobError("prompt: to the first stage, from the gateway that opens the session")
        if session.ready:
            self._begin(session, frame)
        else:
            self._sessions.wait(session.id, session.gateway_peer, frame, self._begin_early)

    def _begin_early(self, session: StageSession, frame: Frame) -> None:
        try:
            self._begin(session, frame)
        except JobError as error:
            self._sessions.refuse(session.gateway, frame, error)

    def _begin(self, session: StageSession, frame: Frame) -> None:
        """Start a session with its prompt. JobError where it does not match the opening."""
        if session.feed is not None:
            raise JobError("prompt: one for each session")
        serve = self._position.serve
        source, payload = self._source(session, frame.payload)
        tokens = unpack_tokens(payload)
        if len(tokens) != session.opening.prompt_length:
            raise JobError(
                f"prompt: {session.opening.prompt_length} tokens were announced, not {len(tokens)}"
            )
        if min(tokens) < 0 or max(tokens) >= serve.vocabulary:
            raise JobError(f"prompt: tokens are 0 to {serve.vocabulary - 1}")
        start = whole(frame.header, "from", 0)
        if not 0 <= start <= min(session.held, len(tokens) - 1):
            raise JobError(f"from: 0 to the {session.held} positions that are held, less than the prompt has")
        session.source = source
        session.feed = Feed(
            tokens,
            recompute=serve.cache == "recompute",
            answered=session.opening.answered,
            drafter=self._drafting.drafter(session, tokens) if frame.header.get("guesses") is True else None,
            start=start,
            capacity=session.opening.capacity,
        )
        self._fed(session)

    def _source(self, session: StageSession, payload: memoryview) -> tuple[memoryview | None, memoryview]:
        """The source in a prompt's payload, and the rest."""
        serve, length = self._position.serve, session.opening.source
        if serve.source is None:
            return None, payload
        size = length * serve.source.unit_bytes
        source, rest = payload[:size], payload[size:]
        if not serve.source.channels:
            tokens = unpack_tokens(source)
            if len(tokens) != length or min(tokens) < 0 or max(tokens) >= serve.vocabulary:
                raise JobError(f"source: {length} tokens from 0 to {serve.vocabulary - 1}")
        return source, rest

    def _close(self, stream: QueuedStream, frame: Frame) -> None:
        session = self._sessions.named(frame.header)
        if session is not None and session.gateway is stream:
            self._sessions.drop(session, completed=True, chain=checked_chain(frame.header))

    def _ping(self, stream: QueuedStream, frame: Frame) -> None:
        """Answer that this stage is alive, and how many chunks of the session it has run."""
        session = self._sessions.named(frame.header)
        if session is None:
            raise StaleTerm(f"{self._sessions.here} does not know this session")
        if session.gateway is stream:
            self._sessions.record_activity(session)
        stream.post("pong", {"session": session.id, "ran": session.ran})

    def _slow(self, stream: QueuedStream, frame: Frame) -> None:
        """The gateway reports that tokens have become slower: have the links to the stages that we feed measured."""
        session = self._sessions.named(frame.header)
        if session is not None:
            for parcel, _ in session.hops:
                self._doubt(session.opening.route[parcel.consumer].peer)
