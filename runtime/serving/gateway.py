"""Any peer answers for any model: from a prompt to a stream of tokens, by way of the ring of stages.

The gateway opens a session on every stage at once, hands the prompt to the first, and then only listens: tokens
come from the last stage. Its link to each stage is also how it learns that one has vanished, and how the stages
learn that it has.

    /fusion/generate/1   generate {model, prompt: "text" | "ids", max_tokens, temperature, top_k, top_p, seed,
                         logits} + the prompt; the answer is `token` {index, id, text} (+ logits) for each token, then
                         `done` {text, finish, prompt_tokens, route, seconds}, or one `error` {message}
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from fusion.runtime.context import Context
from fusion.runtime.errors import JobError, JobFailed, NoRoute
from fusion.runtime.serving.catalog import Catalog, ServedModel
from fusion.runtime.serving.request import (
    MAX_SEED,
    Answer,
    Finish,
    GenerateRequest,
    Piece,
    check_prompt,
    pack_tokens,
    whole,
)
from fusion.runtime.serving.ring_link import GATEWAY, Ends, Link, Links
from fusion.runtime.serving.session import Hop, Opening, SessionId
from fusion.swarm.errors import FrameError, SwarmError
from fusion.swarm.handlers import one_line
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import Frame, Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    open_seconds: float = 30.0  # for all stages to reserve memory and reach each other
    stall_seconds: float = 300.0  # without a token, before the generation is given up
    max_sessions: int = 256

    def __post_init__(self) -> None:
        if min(self.open_seconds, self.stall_seconds) <= 0 or self.max_sessions < 1:
            raise ValueError("open_seconds, stall_seconds and max_sessions must be above 0")


@dataclass(eq=False)
class _Session:
    opening: Opening
    model: ServedModel
    links: dict[int, Link] = field(default_factory=dict)
    # (stage, frame) of `opened`, `token` and `failed`, or why there will be none
    events: asyncio.Queue[tuple[int, Frame] | str] = field(default_factory=asyncio.Queue)

    async def event(self, kind: str, seconds: float) -> tuple[int, Frame]:
        """The next frame, which must be of that kind. JobFailed with the stage's reason, or for silence."""
        try:
            async with asyncio.timeout(seconds):
                event = await self.events.get()
        except TimeoutError:
            raise JobFailed(
                f"{self.model.manifest.name}: no answer from its stages in {seconds:.0f} s"
            ) from None
        if isinstance(event, str):
            raise JobFailed(event)
        stage, frame = event
        if frame.kind == "failed":
            message = str(frame.header.get("message", ""))[:300]
            raise JobFailed(message or f"stage {stage} of {self.model.manifest.name} failed")
        if frame.kind != kind:
            raise JobFailed(
                f"stage {stage} of {self.model.manifest.name} sent {frame.kind!r:.40}, not {kind}"
            )
        return stage, frame


class Gateway:
    """Runs generations; `attend` does so for a client on the other side of a stream."""

    def __init__(self, context: Context, config: GatewayConfig | None = None) -> None:
        self._config = config or GatewayConfig()
        self._catalog = Catalog(context)
        self._links = Links(context.transport, on_frame=self._heard, on_end=self._lost)
        self._sessions: dict[SessionId, _Session] = {}

    async def aclose(self) -> None:
        await self._links.aclose()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Answer, None]:
        """Pieces, then one Answer. Raises JobError (the request), NoRoute, JobFailed (a stage), SwarmError.

        Close the iterator (`contextlib.aclosing`) to stop: that frees the session on every stage.
        """
        began = time.monotonic()
        model = await self._catalog.find(request.model)
        if request.prompt is not None:
            prompt = await asyncio.to_thread(model.text.encode, request.prompt)
        else:
            prompt = list(request.prompt_ids or ())
        check_prompt(prompt, request.max_tokens, model.serve.vocabulary, model.serve.max_sequence)
        tokens: list[int] = []
        texts: list[str] = []
        finish: Finish = ""
        async with self._session(model, request, prompt) as session:
            stream = model.text.stream(prompt)
            session.links[0].post("prompt", {"session": session.opening.session}, [pack_tokens(prompt)])
            while not finish:
                _, frame = await session.event("token", self._config.stall_seconds)
                token, finish = whole(frame.header, "id", -1), _finish(frame)
                texts.append("" if finish == "stop" else stream.push(token))  # an end token is not text
                yield Piece(index=len(tokens), id=token, text=texts[-1], logits=bytes(frame.payload))
                tokens.append(token)
            texts.append(stream.finish())
        yield Answer(
            text="".join(texts),
            tokens=tuple(tokens),
            finish=finish,
            prompt_tokens=len(prompt),
            route=tuple(hop.peer for hop in session.opening.route),
            seconds=time.monotonic() - began,
        )

    # --- sessions

    @asynccontextmanager
    async def _session(
        self, model: ServedModel, request: GenerateRequest, prompt: list[int]
    ) -> AsyncIterator[_Session]:
        """A session that is open on every stage; closed on all of them at the end, whatever happens."""
        if len(self._sessions) >= self._config.max_sessions:
            raise JobFailed(f"this peer answers {self._config.max_sessions} requests already; ask another")
        sampling = request.sampling
        if not request.seeded:
            sampling = replace(sampling, seed=secrets.randbelow(MAX_SEED))
        for again in (True, False):
            route, remembered = await self._catalog.route(model)
            opening = Opening(
                session=SessionId(secrets.token_hex(8)),
                route=route,
                prompt_length=len(prompt),
                max_tokens=request.max_tokens,
                sampling=sampling,
                logits=request.logits,
            )
            session = _Session(opening, model)
            self._sessions[opening.session] = session
            try:
                try:
                    await self._open(session)
                except (NoRoute, JobFailed):
                    self._catalog.forget_route(model.job)
                    if remembered and again:
                        continue  # the route was not fresh: look once more
                    raise
                yield session
                return
            except JobFailed:
                self._catalog.forget_route(model.job)
                raise
            finally:
                del self._sessions[opening.session]
                for link in session.links.values():
                    link.post("close", {"session": opening.session})

    async def _open(self, session: _Session) -> None:
        opening, model = session.opening, session.model
        try:
            async with asyncio.timeout(self._config.open_seconds):
                await asyncio.gather(*(self._reach(session, i, hop) for i, hop in enumerate(opening.route)))
        except TimeoutError:
            missing = next(i for i in range(len(opening.route)) if i not in session.links)
            raise NoRoute(f"stage {missing} of {model.manifest.name} cannot be reached: timed out") from None
        header = opening.to_header()
        for link in session.links.values():
            link.post("open", header)
        waiting = set(session.links)
        while waiting:
            stage, _ = await session.event("opened", self._config.open_seconds)
            waiting.discard(stage)

    async def _reach(self, session: _Session, stage: int, hop: Hop) -> None:
        try:
            link = await self._links.to(Ends(session.model.job, GATEWAY, stage, hop.peer))
        except SwarmError as error:
            where = f"stage {stage} of {session.model.manifest.name} on {friendly_name(hop.peer)}"
            raise NoRoute(f"{where} cannot be reached: {one_line(error)}") from None
        session.links[stage] = link

    def _heard(self, ends: Ends, frame: Frame) -> None:
        name = frame.header.get("session")
        session = self._sessions.get(SessionId(name)) if isinstance(name, str) else None
        if session is None:
            return  # closed while the frame was under way
        link = session.links.get(ends.stage)
        last = len(session.opening.route) - 1
        if link is None or session.opening.route[ends.stage].peer != ends.peer:
            raise FrameError("a frame for a session of other stages")
        if frame.kind == "token" and ends.stage != last:
            raise FrameError("only the last stage chooses tokens")
        session.events.put_nowait((ends.stage, frame))

    def _lost(self, ends: Ends, reason: str) -> None:
        log.info("ring: stage %d on %s: %s", ends.stage, friendly_name(ends.peer), reason)
        for session in self._sessions.values():
            if session.model.job == ends.job and session.opening.route[ends.stage].peer == ends.peer:
                where = f"stage {ends.stage} of {session.model.manifest.name} on {friendly_name(ends.peer)}"
                session.events.put_nowait(f"{where} vanished; ask again in a few seconds")

    # --- clients

    async def attend(self, client: Stream) -> None:
        """Answer one request of a client. It vanishing, or saying anything more, ends the generation."""
        frame = await client.receive()
        if frame.kind != "generate":
            raise FrameError(f"clients send generate, not {frame.kind!r:.40}")
        answer = asyncio.create_task(self._answer(client, frame))
        gone = asyncio.create_task(client.receive())
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            answer.cancel()
            _, outcome = await asyncio.gather(gone, answer, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    async def _answer(self, client: Stream, frame: Frame) -> None:
        try:
            request = GenerateRequest.from_frame(frame.header, frame.payload)
            async with aclosing(self.generate(request)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        header = {"index": piece.index, "id": piece.id, "text": piece.text}
                        await client.send("token", header, [piece.logits] if piece.logits else ())
                    else:
                        await client.send("done", _done(piece))
        except (JobError, JobFailed, NoRoute) as error:
            with suppress(SwarmError):  # the client may have gone as well
                await client.send("error", {"message": str(error)})


def _finish(frame: Frame) -> Finish:
    match frame.header.get("finish"):
        case "stop":
            return "stop"
        case "length":
            return "length"
    return ""


def _done(answer: Answer) -> dict[str, object]:
    """The client has the tokens already; the text is repeated because the last piece of it may be held back."""
    return {
        "text": answer.text,
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        "route": list(answer.route),
        "seconds": answer.seconds,
    }
