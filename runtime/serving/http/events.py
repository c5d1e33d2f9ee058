"""Answers on their way to a client: as server-sent events while they are made, or at once. Whoever goes away ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fusion.runtime.job.context import Context
from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.route import RouteReporter
from fusion.runtime.serving.http.schema import Settings
from fusion.runtime.serving.http.shapes import Heading, Json, Shape, json_text, usage
from fusion.runtime.serving.requests.request import Answer

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# The ends of lines that JSON leaves in texts; clients that read events with `str.splitlines` would end one there.
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
PART_BYTES = 256 << 10  # of an answer at once, that is sent between two looks at others
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """There is nobody to answer any more."""


def event(value: object) -> bytes:
    said = json_text(value)
    for end, escaped in LINE_ENDS.items():
        said = said.replace(end, escaped)
    return b"data: " + said + b"\n\n"


async def unless_gone(receive: Receive, closing: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled where the client goes away (ClientGone) or the peer stops (ApiError). The body of
    the request has been read."""
    working = asyncio.ensure_future(work)
    leaving = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(closing.wait())]
    try:
        await asyncio.wait((working, *leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        for task in (working, *leaving):
            task.cancel()
        await asyncio.gather(working, *leaving, return_exceptions=True)
    if closing.is_set():
        raise ApiError(503, "this peer is stopping: ask another one", code="stopping")
    raise ClientGone


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends each of `events`, and what `failed` makes of an exception where they end with one. They and their `source` are closed
    whatever happens."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        source: AsyncGenerator[Any],
        closing: asyncio.Event,
        failed: Callable[[BaseException], bytes],
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._closing = closing
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await unless_gone(receive, self._closing, self._send(send))
            except ClientGone:
                return
            except Exception as error:
                await _body(send, self._failed(error))
            await _body(send, b"", more=False)

    async def _send(self, send: Send) -> None:
        async for each in self._events:
            await _body(send, each)


class WholeAnswer(Response):
    """An answer at once, from the `parts` of its JSON. `held`: what it takes here, which is closed once the client has it, or has
    gone."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], held: AsyncExitStack | None = None) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, parts)))})
        self._parts = parts
        self._held = held or AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            sending, size = list[bytes](), 0
            for part in self._parts:
                sending.append(part)
                size += len(part)
                if size >= PART_BYTES:
                    await _body(send, b"".join(sending))
                    await asyncio.sleep(0)
                    sending, size = [], 0
            await _body(send, b"".join(sending), more=False)


async def events_of(
    first: Part,
    parts: AsyncGenerator[Part],
    heading: Heading,
    shape: Shape,
    body: Settings,
    prompt_tokens: int,
    context: Context,
) -> AsyncGenerator[bytes]:
    """`prompt_tokens` and the route are told of where `body` asks for it."""
    more: Json = {"usage": None} if body.usage_at_the_end else {}
    reporter = RouteReporter(context) if body.reports_route else None
    kind = shape.chunk_object

    def chunk(choice: Json) -> bytes:
        return event(heading.object(kind, [choice], **more))

    def on_route(found: Json) -> bytes:
        return event(heading.object(kind, [], route=found, **more))

    ends, begun = list[Answer](), set[int]()
    part: Part | None = first
    with nullcontext() if reporter is None else reporter:
        while part is not None:
            for found in () if reporter is None else reporter.news(part):
                yield on_route(found)
            if part.choice not in begun:
                begun.add(part.choice)
                for choice in shape.begin(part.choice):
                    yield chunk(choice)
            for choice in shape.chunks(part):
                yield chunk(choice)
            if isinstance(part.said, Answer):
                ends.append(part.said)
            part = await anext(parts, None)
        for found in () if reporter is None else await reporter.last_news():
            yield on_route(found)
    if body.usage_at_the_end:
        yield event(heading.object(kind, [], usage=usage(prompt_tokens, ends)))
    yield DONE


def _body(send: Send, data: bytes, *, more: bool = True) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": data, "more_body": more})
