"""The client side of `/fusion/generate/1` and `/2`: ask any peer for text, get pieces as they are made.

Where the peer that was asked vanishes or falls silent another one goes on: it is told the tokens so far and gives the same rest.
Where it says that it is there and sends no token for long, another is asked beside it, and whoever sends the next one goes on:
it may have a long prompt to run, or it may never send anything.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.protocol import GENERATE, GENERATE_MORE
from fusion.runtime.serving.requests.header_fields import number, whole
from fusion.runtime.serving.requests.request import MAX_ANSWERED, Answer, GenerateRequest, Logprobs, Piece
from fusion.runtime.serving.requests.silence import SILENT_SECONDS, listening
from fusion.swarm.cancelling import cancel_all
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import (
    FrameError,
    NotAdmitted,
    PeerUnreachable,
    StreamBroken,
    StreamClosed,
    SwarmError,
    UnknownProtocol,
)
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, checked

GATEWAY_TRIES = 5  # peers that may vanish under one answer
# Without a token; a gateway gives up sooner that waits for a stage without memory, or for one that somebody is to take over.
PATIENCE_SECONDS = 150.0
SLOWEST_BYTES_PER_SECOND = 16 << 10  # of a client's way to the swarm, on which a long prompt may take a while

GrantsFor = Callable[[JobId], Awaitable[tuple[bytes, ...]]]

_Pieces = AsyncGenerator[Piece | Answer, None]

# Another gateway to ask than those that have vanished; None where there is none.
Another = Callable[[frozenset[PeerId]], Awaitable[PeerId | None]]


async def generate(
    transport: Transport,
    peer: PeerId,
    request: GenerateRequest,
    another: Another | None = None,
    grants: GrantsFor | None = None,
) -> _Pieces:
    """Ask `peer`, which need not serve the model itself. Pieces, then one Answer. `grants`: what we can show of why we may
    prompt the model of a job that is not for everybody.

    Raises RemoteError with the gateway's one line; PeerUnreachable, StreamBroken or StreamClosed where it vanished, or is silent,
    and `another` knows of no other. Close the iterator (`contextlib.aclosing`) to stop early: the swarm then frees
    the session.
    """
    request = request.drawn(secrets.randbelow)  # or the next gateway would draw another one than this one
    asking = _Asking(transport, request, another, grants)
    asking.ask(peer)
    try:
        while True:
            piece = await asking.next()
            yield piece
            if isinstance(piece, Answer):
                return
    finally:
        await asking.aclose()


class _Asking:
    """One answer, and who is asked for it now: a gateway, or a second one beside it."""

    def __init__(
        self,
        transport: Transport,
        request: GenerateRequest,
        another: Another | None,
        grants: GrantsFor | None,
    ) -> None:
        self._transport = transport
        self._request = request
        self._another = another
        self._grants = grants
        self._tokens = list(request.answered)
        self._gone: frozenset[PeerId] = frozenset()  # and who has sent no token for long
        self._asked: dict[asyncio.Future[Piece | Answer], tuple[PeerId, _Pieces]] = {}

    def ask(self, peer: PeerId) -> None:
        """Also this one, for what comes after the tokens so far."""
        request = replace(self._request, answered=tuple(self._tokens))
        self._wait_for(peer, _ask(self._transport, peer, request))

    async def next(self) -> Piece | Answer:
        """What comes next; nobody but who sends it is asked from then on. Raises what went wrong with the last who was asked."""
        while True:
            patience = PATIENCE_SECONDS if len(self._asked) == 1 else None
            done, _ = await asyncio.wait(self._asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                [(slow, _)] = self._asked.values()
                with suppress(SwarmError):  # who is asked already may send it yet
                    if (other := await self._other(slow)) is not None:
                        self.ask(other)
                continue
            task = done.pop()
            peer, pieces = self._asked.pop(task)
            if (error := task.exception()) is None:
                await self.aclose()
                if isinstance(piece := task.result(), Piece):
                    self._tokens.append(piece.id)
                    self._wait_for(peer, pieces)
                return piece
            if not self._asked:
                await self._after(peer, error)

    async def aclose(self) -> None:
        """Leave everybody."""
        await cancel_all(self._asked)
        for _, pieces in self._asked.values():
            await pieces.aclose()
        self._asked.clear()

    def _wait_for(self, peer: PeerId, pieces: _Pieces) -> None:
        self._asked[asyncio.ensure_future(anext(pieces))] = peer, pieces

    async def _after(self, peer: PeerId, error: BaseException) -> None:
        """Ask whoever may do better than `peer`. Raises the error where there is nobody."""
        match error:
            case NotAdmitted():
                others = [PeerId(each) for each in error.ask if each not in self._gone and each != peer]
                if others and len(self._gone) < GATEWAY_TRIES:
                    self._gone |= {peer}
                    self.ask(others[0])
                    return
                asks = None if self._request.grants else self._grants
                if asks is not None and (shown := await asks(JobId(error.job))):
                    self._request = replace(self._request, grants=shown)
                    self.ask(peer)
                    return
            case PeerUnreachable() | UnknownProtocol() | StreamBroken() | StreamClosed():
                if (other := await self._other(peer)) is not None:
                    self.ask(other)
                    return
        raise error

    async def _other(self, instead: PeerId) -> PeerId | None:
        """Another gateway than this one, and than all that were asked before."""
        self._gone |= {instead}
        if self._another is None or len(self._gone) >= GATEWAY_TRIES or len(self._tokens) > MAX_ANSWERED:
            return None
        return await self._another(self._gone)


def another_peer(directory: Directory) -> Another:
    """Any working peer of the swarm; the one that was asked first is as good as any other."""

    async def find(gone: frozenset[PeerId]) -> PeerId | None:
        peers = [p.peer for p in await directory.peers() if p.role == "peer" and p.peer not in gone]
        return random.choice(peers) if peers else None

    return find


async def complete(
    transport: Transport, peer: PeerId, request: GenerateRequest, another: Another | None = None
) -> Answer:
    """The same, all at once."""
    async with aclosing(generate(transport, peer, request, another)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                return piece
    raise JobFailed("the gateway ended without an answer")


async def _ask(transport: Transport, peer: PeerId, request: GenerateRequest) -> _Pieces:
    """One gateway's part of the answer."""
    tokens = list(request.answered)
    stream = await transport.open(peer, (GENERATE_MORE if request.newer else GENERATE).name)
    try:
        header, prompt = request.to_frame()
        await _send(stream, header, prompt)
        async with listening(transport, peer, stream) as received:
            while True:
                frame = checked(await stream.receive())
                received()
                if frame.kind == "done":
                    yield _answer(frame, tokens)
                    return
                if frame.kind != "token":
                    raise FrameError(f"gateways send token and done, not {frame.kind!r:.40}")
                # What is kept of an answer is bounded by what was asked for.
                if len(tokens) >= request.most_tokens:
                    raise FrameError(f"{friendly_name(peer)} sends more than {request.most_tokens} tokens")
                piece = _piece(frame, len(tokens), request.top_logprobs)
                tokens.append(piece.id)
                yield piece
    finally:
        stream.abort()


async def _send(stream: Stream, header: dict[str, Any], prompt: bytes) -> None:
    """The question. StreamBroken where the peer does not read it: one that is frozen keeps its connections."""
    try:
        async with asyncio.timeout(SILENT_SECONDS + len(prompt) / SLOWEST_BYTES_PER_SECOND):
            await stream.send("generate", header, [prompt])
    except TimeoutError:
        raise StreamBroken(f"{friendly_name(stream.remote)} does not read what it is asked") from None


def _piece(frame: Frame, index: int, top_logprobs: int | None) -> Piece:
    text = frame.header.get("text", "")
    probable = None if top_logprobs is None else Logprobs.from_header(frame.header, top_logprobs)
    return Piece(
        index=index,
        id=whole(frame.header, "id", -1),
        text=text if isinstance(text, str) else "",
        logits=bytes(frame.payload),
        logprob=None if probable is None else probable.chosen,
        top_logprobs=() if probable is None else probable.top,
    )


def _answer(frame: Frame, tokens: list[int]) -> Answer:
    header = frame.header
    route = header.get("route")
    return Answer(
        text=str(header.get("text", "")),
        tokens=tuple(tokens),
        finish="stop" if header.get("finish") == "stop" else "length",
        prompt_tokens=whole(header, "prompt_tokens", 0),
        route=tuple(PeerId(str(peer)) for peer in route) if isinstance(route, list) else (),
        seconds=number(header, "seconds", 0.0),
        cached_tokens=whole(header, "cached_tokens", 0),
    )
