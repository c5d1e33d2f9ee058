"""Responses on their way to a client: as server-sent events, or whole. A client that disconnects ends its request."""

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
from fusion.runtime.serving.http.generation_fields import Settings
from fusion.runtime.serving.http.route import RouteReporter
from fusion.runtime.serving.http.shapes import Heading, Json, Shape, json_text, usage
from fusion.runtime.serving.requests.request import Answer

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# Line ends that JSON does not escape; clients that read events with `str.splitlines` would split one there.
LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
PART_BYTES = 256 << 10  # of a whole response, sent before other tasks get a turn
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ClientDisconnected(Exception):
    """The client closed its connection."""


def event(value: object) -> bytes:
    encoded = json_text(value)
    for end, escaped in LINE_ENDS.items():
        encoded = encoded.replace(end, escaped)
    return b"data: " + encoded + b"\n\n"


async def cancel_on_disconnect(receive: Receive, closing: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled where the client disconnects (ClientDisconnected) or the peer stops (ApiError). The body
    of the request must have been read."""
    working = asyncio.ensure_future(work)
    leaving = [asyncio.ensure_future(_disconnected(receive)), asyncio.ensure_future(closing.wait())]
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
    raise ClientDisconnected


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends each of `events`; where they raise, what `failed` makes of the exception. Closes them and their `source` in any case."""

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
                await cancel_on_disconnect(receive, self._closing, self._send(send))
            except ClientDisconnected:
                return
            except Exception as error:
                await _body(send, self._failed(error))
            await _body(send, b"", more=False)

    async def _send(self, send: Send) -> None:
        async for each in self._events:
            await _body(send, each)


class WholeAnswer(Response):
    """A whole response, from the `parts` of its JSON. `resources` are released once the client has received it, or has disconnected."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes], resources: AsyncExitStack | None = None) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, parts)))})
        self._parts = parts
        self._resources = resources or AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
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
    """The server-sent events of a stream; `prompt_tokens` (usage) and the route where `body` asks for them."""
    more: Json = {"usage": None} if body.usage_at_the_end else {}
    reporter = RouteReporter(context) if body.reports_route else None
    kind = shape.chunk_object

    def chunk(choice: Json) -> bytes:
        return event(heading.object(kind, [choice], **more))

    def on_route(hops: Json) -> bytes:
        return event(heading.object(kind, [], route=hops, **more))

    ends, begun = list[Answer](), set[int]()
    part: Part | None = first
    with nullcontext() if reporter is None else reporter:
        while part is not None:
            for hops in () if reporter is None else reporter.changes(part):
                yield on_route(hops)
            if part.choice not in begun:
                begun.add(part.choice)
                for choice in shape.begin(part.choice):
                    yield chunk(choice)
            for choice in shape.chunks(part):
                yield chunk(choice)
            if isinstance(part.output, Answer):
                ends.append(part.output)
            part = await anext(parts, None)
        for hops in () if reporter is None else await reporter.last_changes():
            yield on_route(hops)
    if body.usage_at_the_end:
        yield event(heading.object(kind, [], usage=usage(prompt_tokens, ends)))
    yield DONE


def _body(send: Send, data: bytes, *, more: bool = True) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": data, "more_body": more})
