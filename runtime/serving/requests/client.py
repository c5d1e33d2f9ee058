"""The client side of `/fusion/generate/1` and `/2`: ask any peer for text, get pieces as they are made.

Where the peer that was asked vanishes or falls silent another one goes on: it is told the tokens so far and gives the same rest.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.protocol import GENERATE, GENERATE_MORE
from fusion.runtime.serving.requests.request import (
    MAX_ANSWERED,
    MAX_SEED,
    Answer,
    GenerateRequest,
    Logprobs,
    Piece,
    number,
    whole,
)
from fusion.runtime.serving.requests.silence import SILENT_SECONDS, listening
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import (
    FrameError,
    NotAdmitted,
    PeerUnreachable,
    StreamBroken,
    StreamClosed,
    UnknownProtocol,
)
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, checked

GATEWAY_TRIES = 5  # peers that may vanish under one answer
SLOWEST_BYTES_PER_SECOND = 16 << 10  # of a client's way to the swarm, on which a long prompt may take a while

GrantsFor = Callable[[JobId], Awaitable[tuple[bytes, ...]]]

# Another gateway to ask than those that have vanished; None where there is none.
Another = Callable[[frozenset[PeerId]], Awaitable[PeerId | None]]


async def generate(
    transport: Transport,
    peer: PeerId,
    request: GenerateRequest,
    another: Another | None = None,
    grants: GrantsFor | None = None,
) -> AsyncGenerator[Piece | Answer, None]:
    """Ask `peer`, which need not serve the model itself. Pieces, then one Answer. `grants`: what we can show of why we may
    prompt the model of a job that is not for everybody.

    Raises RemoteError with the gateway's one line; PeerUnreachable, StreamBroken or StreamClosed where it vanished, or is silent,
    and `another` knows of no other. Close the iterator (`contextlib.aclosing`) to stop early: the swarm then frees
    the session.
    """
    if not request.seeded:  # the next gateway has to draw what this one would have drawn
        seeded = replace(request.sampling, seed=secrets.randbelow(MAX_SEED))
        request = replace(request, sampling=seeded, seeded=True)
    tokens = list(request.answered)
    gone: frozenset[PeerId] = frozenset()
    while True:
        try:
            async with aclosing(_ask(transport, peer, request, tokens)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        except NotAdmitted as error:
            others = [PeerId(each) for each in error.ask if each not in gone and each != peer]
            if others and len(gone) < GATEWAY_TRIES:
                gone |= {peer}
                peer = others[0]
            elif request.grants or grants is None or not (shown := await grants(JobId(error.job))):
                raise
            else:
                request = replace(request, grants=shown)
        except (PeerUnreachable, UnknownProtocol, StreamBroken, StreamClosed):
            gone |= {peer}
            if another is None or len(gone) >= GATEWAY_TRIES or len(tokens) > MAX_ANSWERED:
                raise
            found = await another(gone)
            if found is None:
                raise
            peer, request = found, replace(request, answered=tuple(tokens))


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


async def _ask(
    transport: Transport,
    peer: PeerId,
    request: GenerateRequest,
    tokens: list[int],
) -> AsyncGenerator[Piece | Answer, None]:
    """One gateway's part of the answer, whose tokens are added to `tokens`."""
    stream = await transport.open(peer, (GENERATE_MORE if request.newer else GENERATE).name)
    try:
        header, prompt = request.to_frame()
        await _send(stream, header, prompt)
        async with listening(transport, peer, stream) as heard:
            while True:
                frame = checked(await stream.receive())
                heard()
                if frame.kind == "done":
                    yield _answer(frame, tokens)
                    return
                if frame.kind != "token":
                    raise FrameError(f"gateways send token and done, not {frame.kind!r:.40}")
                if (
                    len(tokens) >= request.max_tokens
                ):  # what is kept of an answer is bounded by what was asked for
                    raise FrameError(f"{friendly_name(peer)} sends more than {request.max_tokens} tokens")
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
