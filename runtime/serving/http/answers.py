"""The answers to one request, side by side, each in a place of its own among those that the gateway gives at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fusion.runtime.serving.answers.gateway import Gateway
from fusion.runtime.serving.http.errors import Busy
from fusion.runtime.serving.http.metrics import Metrics
from fusion.runtime.serving.requests.header_fields import TOKEN_BYTES
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece, PromptPiece
from fusion.swarm.cancelling import cancel_all
from fusion.swarm.transport import PeerId
from fusion.swarm.turns import Turn

WAITING_PARTS = 64  # that a client has not read yet, before its answers wait for it


@dataclass(frozen=True)
class Part:
    """Of answer number `choice`: tokens of its prompt, a token, or its end."""

    choice: int
    said: PromptPiece | Piece | Answer


async def parts(
    gateway: Gateway, asked: Sequence[GenerateRequest], holder: PeerId, metrics: Metrics
) -> AsyncGenerator[Part]:
    """All of them as they come, until each has its Answer. Raises Busy, and as `Gateway.generate` does, whichever answer
    fails first. Close it to stop: that frees every session. Answers keep their places until it is closed or asked for more
    than there are."""
    places = _places(gateway, asked, holder)
    queue = _Parts()
    tasks = [
        asyncio.create_task(_answer(gateway, choice, request, holder, place, queue, metrics))
        for choice, (request, place) in enumerate(zip(asked, places, strict=True))
    ]
    for place, task in zip(places, tasks, strict=True):
        place.add_done_callback(lambda _, task=task: task.cancel())  # type: ignore[misc]
    left = len(tasks)
    try:
        while left:
            part = await queue.get()
            left -= isinstance(part.said, Answer)
            yield part
    finally:
        await cancel_all(tasks)
        for place in places:
            gateway.leave(place, completed=not left)


def _places(gateway: Gateway, asked: Sequence[GenerateRequest], holder: PeerId) -> list[Turn]:
    places = list[Turn]()
    for request in asked:
        place = gateway.place(holder, TOKEN_BYTES * len(request.prompt_ids or ()))
        if place is None or any(each.done() for each in places):  # we had to give way to ourselves
            for each in (*places, place):
                if each is not None:
                    gateway.leave(each, completed=False)
            raise Busy
        places.append(place)
    return places


async def _answer(
    gateway: Gateway,
    choice: int,
    request: GenerateRequest,
    holder: PeerId,
    place: Turn,
    queue: _Parts,
    metrics: Metrics,
) -> None:
    try:
        with metrics.answer() as measured:
            async with aclosing(gateway.generate(request, holder=holder)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        measured.token()
                        gateway.use(place)
                    elif isinstance(piece, Answer):
                        measured.prompt(piece.prompt_tokens, piece.cached_tokens)
                    await queue.put(Part(choice, piece))
    except asyncio.CancelledError:
        if not place.done():
            raise
        queue.fail(Busy())
    except Exception as error:  # the one who reads the queue raises it
        queue.fail(error)


class _Parts:
    """What is to be read next. Parts wait for room; what went wrong does not, as nobody may be left to make some."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Part | Exception] = asyncio.Queue()
        self._room = asyncio.Semaphore(WAITING_PARTS)

    async def put(self, part: Part) -> None:
        await self._room.acquire()
        self._queue.put_nowait(part)

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    async def get(self) -> Part:
        """Raises what went wrong, in its turn."""
        part = await self._queue.get()
        if isinstance(part, Exception):
            raise part
        self._room.release()
        return part
