"""The client side of `/fusion/generate/1`: ask any peer for text, get pieces as they are made."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fusion.runtime.errors import JobFailed
from fusion.runtime.serving.request import GENERATE, Answer, GenerateRequest, Piece, number, whole
from fusion.swarm.errors import FrameError
from fusion.swarm.transport import Frame, PeerId, Transport, checked


async def generate(
    transport: Transport, peer: PeerId, request: GenerateRequest
) -> AsyncGenerator[Piece | Answer, None]:
    """Ask `peer`, which need not serve the model itself. Pieces, then one Answer.

    Raises RemoteError with the gateway's one line, PeerUnreachable, StreamBroken. Close the iterator
    (`contextlib.aclosing`) to stop early: the swarm then frees the session.
    """
    stream = await transport.open(peer, GENERATE)
    try:
        header, prompt = request.to_frame()
        await stream.send("generate", header, [prompt])
        tokens: list[int] = []
        while True:
            frame = checked(await stream.receive())
            if frame.kind == "done":
                yield _answer(frame, tokens)
                return
            if frame.kind != "token":
                raise FrameError(f"gateways send token and done, not {frame.kind!r:.40}")
            text = frame.header.get("text", "")
            piece = Piece(
                index=len(tokens),
                id=whole(frame.header, "id", -1),
                text=text if isinstance(text, str) else "",
                logits=bytes(frame.payload),
            )
            tokens.append(piece.id)
            yield piece
    finally:
        stream.abort()


async def complete(transport: Transport, peer: PeerId, request: GenerateRequest) -> Answer:
    """The same, all at once."""
    async with aclosing(generate(transport, peer, request)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                return piece
    raise JobFailed("the gateway ended without an answer")


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
    )
