"""The completions of one request, generated concurrently; the gateway admits each by itself."""

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

WAITING_PARTS = 64  # that the client has not read yet, before generation waits for it


@dataclass(frozen=True)
class Part:
    """Output of completion number `choice`: tokens of its prompt, a token, or its end."""

    choice: int
    output: PromptPiece | Piece | Answer


async def parts(
    gateway: Gateway, requests: Sequence[GenerateRequest], tenant: PeerId, metrics: Metrics
) -> AsyncGenerator[Part]:
    """The output of all requests as it is generated, until each has its Answer. Raises Busy, and as `Gateway.generate`, by the first
    completion that fails. Close it to stop: that frees every session. Their admission is released when the generator ends or is
    closed."""
    turns = _admit(gateway, requests, tenant)
    queue = _Parts()
    tasks = [
        asyncio.create_task(_answer(gateway, choice, request, tenant, turn, queue, metrics))
        for choice, (request, turn) in enumerate(zip(requests, turns, strict=True))
    ]
    for turn, task in zip(turns, tasks, strict=True):
        turn.add_done_callback(lambda _, task=task: task.cancel())  # type: ignore[misc]
    left = len(tasks)
    try:
        while left:
            part = await queue.get()
            left -= isinstance(part.output, Answer)
            yield part
    finally:
        await cancel_all(tasks)
        for turn in turns:
            gateway.release(turn, completed=not left)


def _admit(gateway: Gateway, requests: Sequence[GenerateRequest], tenant: PeerId) -> list[Turn]:
    turns = list[Turn]()
    for request in requests:
        turn = gateway.admit(tenant, TOKEN_BYTES * len(request.prompt_ids or ()))
        if turn is None or any(each.done() for each in turns):  # we had to give way to ourselves
            for each in (*turns, turn):
                if each is not None:
                    gateway.release(each, completed=False)
            raise Busy
        turns.append(turn)
    return turns


async def _answer(
    gateway: Gateway,
    choice: int,
    request: GenerateRequest,
    tenant: PeerId,
    turn: Turn,
    queue: _Parts,
    metrics: Metrics,
) -> None:
    try:
        with metrics.answer() as measured:
            async with aclosing(gateway.generate(request, tenant=tenant)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        measured.token()
                        gateway.touch(turn)
                    elif isinstance(piece, Answer):
                        measured.prompt(piece.prompt_tokens, piece.cached_tokens)
                    await queue.put(Part(choice, piece))
    except asyncio.CancelledError:
        if not turn.done():
            raise
        queue.fail(Busy())
    except Exception as error:  # raised to the reader of the queue
        queue.fail(error)


class _Parts:
    """A bounded queue of parts. Errors do not wait for room, as the reader may have stopped making any."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Part | Exception] = asyncio.Queue()
        self._room = asyncio.Semaphore(WAITING_PARTS)

    async def put(self, part: Part) -> None:
        await self._room.acquire()
        self._queue.put_nowait(part)

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    async def get(self) -> Part:
        """The next part. Raises an error in its order."""
        part = await self._queue.get()
        if isinstance(part, Exception):
            raise part
        self._room.release()
        return part
