"""The client side of `/fusion/generate/1` and `/2`: send a request to any peer, receive pieces as they are generated.

If the gateway vanishes or falls silent, another one gets the request with the tokens so far and generates the same rest.
If it answers pings but sends no token for long, another is tried beside it, and the first to send the next token goes on: the
gateway may be prefilling a long prompt, or may never send anything.
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
from fusion.runtime.serving.requests.silence import SILENT_SECONDS, watching_liveness
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

GATEWAY_TRIES = 5  # gateways that may fail during one request
# Without a token, before a second gateway is tried; gateways that wait for memory at a stage, or for a takeover, give up sooner.
PATIENCE_SECONDS = 150.0
SLOWEST_BYTES_PER_SECOND = 16 << 10  # uplink of a client, over which a long prompt may take a while

GrantsFor = Callable[[JobId], Awaitable[tuple[bytes, ...]]]

_Pieces = AsyncGenerator[Piece | Answer, None]

# Finds a gateway outside of the excluded ones; None where there is none.
Another = Callable[[frozenset[PeerId]], Awaitable[PeerId | None]]


async def generate(
    transport: Transport,
    peer: PeerId,
    request: GenerateRequest,
    another: Another | None = None,
    grants: GrantsFor | None = None,
) -> _Pieces:
    """Send the request to `peer`, which need not serve the model itself. Yields pieces, then one Answer. `another` finds a gateway to
    fail over to; `grants` fetches the grants with which we may prompt a job that is not open to all.

    Raises RemoteError with the gateway's one line; PeerUnreachable, StreamBroken or StreamClosed where it vanished or is silent
    and `another` finds no other. Close the iterator (`contextlib.aclosing`) to stop early: the swarm then frees the session.
    """
    request = request.drawn(secrets.randbelow)  # else every gateway would draw a seed of its own
    hedged = _HedgedRequest(transport, request, another, grants)
    hedged.request_from(peer)
    try:
        while True:
            piece = await hedged.next()
            yield piece
            if isinstance(piece, Answer):
                return
    finally:
        await hedged.aclose()


class _HedgedRequest:
    """One completion, requested from one gateway, or from a second one beside a slow one (a hedged request: Dean and Barroso, The
    Tail at Scale, 2013)."""

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
        self._excluded: frozenset[PeerId] = frozenset()  # and who has sent no token for long
        self._pending: dict[asyncio.Future[Piece | Answer], tuple[PeerId, _Pieces]] = {}

    def request_from(self, peer: PeerId) -> None:
        """Request what follows the tokens so far from this peer as well."""
        request = replace(self._request, answered=tuple(self._tokens))
        self._await_piece(peer, _pieces_from(self._transport, peer, request))

    async def next(self) -> Piece | Answer:
        """The next piece; every gateway but the one that sent it is dropped. Raises the error of the last gateway that is left."""
        while True:
            patience = PATIENCE_SECONDS if len(self._pending) == 1 else None
            done, _ = await asyncio.wait(self._pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                [(slow, _)] = self._pending.values()
                with suppress(SwarmError):  # the slow one may still send it
                    if (other := await self._other(slow)) is not None:
                        self.request_from(other)
                continue
            task = done.pop()
            peer, pieces = self._pending.pop(task)
            if (error := task.exception()) is None:
                await self.aclose()
                if isinstance(piece := task.result(), Piece):
                    self._tokens.append(piece.id)
                    self._await_piece(peer, pieces)
                return piece
            if not self._pending:
                await self._fail_over(peer, error)

    async def aclose(self) -> None:
        """Drop all gateways."""
        await cancel_all(self._pending)
        for _, pieces in self._pending.values():
            await pieces.aclose()
        self._pending.clear()

    def _await_piece(self, peer: PeerId, pieces: _Pieces) -> None:
        self._pending[asyncio.ensure_future(anext(pieces))] = peer, pieces

    async def _fail_over(self, peer: PeerId, error: BaseException) -> None:
        """Fail over from `peer`. Raises the error where there is no other gateway."""
        match error:
            case NotAdmitted():
                others = [PeerId(each) for each in error.ask if each not in self._excluded and each != peer]
                if others and len(self._excluded) < GATEWAY_TRIES:
                    self._excluded |= {peer}
                    self.request_from(others[0])
                    return
                fetch_grants = None if self._request.grants else self._grants
                if fetch_grants is not None and (shown := await fetch_grants(JobId(error.job))):
                    self._request = replace(self._request, grants=shown)
                    self.request_from(peer)
                    return
            case PeerUnreachable() | UnknownProtocol() | StreamBroken() | StreamClosed():
                if (other := await self._other(peer)) is not None:
                    self.request_from(other)
                    return
        raise error

    async def _other(self, instead: PeerId) -> PeerId | None:
        """A gateway that has not been tried, in place of this one."""
        self._excluded |= {instead}
        if self._another is None or len(self._excluded) >= GATEWAY_TRIES or len(self._tokens) > MAX_ANSWERED:
            return None
        return await self._another(self._excluded)


def another_peer(directory: Directory) -> Another:
    """Finds any working peer of the swarm."""

    async def find(excluded: frozenset[PeerId]) -> PeerId | None:
        peers = [p.peer for p in await directory.peers() if p.role == "peer" and p.peer not in excluded]
        return random.choice(peers) if peers else None

    return find


async def complete(
    transport: Transport, peer: PeerId, request: GenerateRequest, another: Another | None = None
) -> Answer:
    """As `generate`, but returns only the Answer."""
    async with aclosing(generate(transport, peer, request, another)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                return piece
    raise JobFailed("the gateway ended without an answer")


async def _pieces_from(transport: Transport, peer: PeerId, request: GenerateRequest) -> _Pieces:
    """The pieces and the Answer of one gateway."""
    tokens = list(request.answered)
    stream = await transport.open(peer, (GENERATE_MORE if request.newer else GENERATE).name)
    try:
        header, prompt = request.to_frame()
        await _send(stream, header, prompt)
        async with watching_liveness(transport, peer, stream) as received:
            while True:
                frame = checked(await stream.receive())
                received()
                if frame.kind == "done":
                    yield _answer(frame, tokens)
                    return
                if frame.kind != "token":
                    raise FrameError(f"gateways send token and done, not {frame.kind!r:.40}")
                # What is kept of a completion is bounded by what was requested.
                if len(tokens) >= request.most_tokens:
                    raise FrameError(f"{friendly_name(peer)} sends more than {request.most_tokens} tokens")
                piece = _piece(frame, len(tokens), request.top_logprobs)
                tokens.append(piece.id)
                yield piece
    finally:
        stream.abort()


async def _send(stream: Stream, header: dict[str, Any], prompt: bytes) -> None:
    """Send the request. StreamBroken where the peer does not read it: a frozen peer keeps its connections."""
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
