"""What the route of responses does: the answer of a chat, written as a response."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from fastapi import Request, Response

from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.api import Api
from fusion.runtime.serving.http.errors import attributed_to
from fusion.runtime.serving.http.events import EventStream, WholeAnswer, event
from fusion.runtime.serving.http.responses.schema import ResponsesRequest
from fusion.runtime.serving.http.responses.told import ToldResponse
from fusion.runtime.serving.http.shapes import Json, json_text
from fusion.runtime.serving.requests.request import Answer

# What a chat calls a field, and what a request for a response does.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "json_schema": "text",
    "response_format": "text",
}


class Responses:
    """Beside the routes of `api`. Raises as it does."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def answer(self, request: Request, body: ResponsesRequest) -> Response:
        return await self._api.while_there(request, self._answer(request, body))

    async def _answer(self, request: Request, body: ResponsesRequest) -> Response:
        with attributed_to("input", {**NAMES, **body.chat.called}):
            model, asked = await self._api.chat_requests(request, body.chat)
            prompt_tokens = sum(len(each.prompt_ids or ()) for each in asked)
            name = body.model or model.manifest.name
            told = ToldResponse(body, name, int(time.time()), prompt_tokens)
            parts = self._api.parts(request, asked)
            if body.stream:
                first = await anext(parts)  # what goes wrong before it has a status of its own

                def failed(error: BaseException) -> bytes:
                    return b"".join(map(typed_event, told.fail(self._api.failed(error))))

                return EventStream(_events(told, first, parts), parts, self._api.closing, failed)
            async with AsyncExitStack() as held:
                held.push_async_callback(parts.aclose)
                ended = False
                while not ended:
                    part = await anext(parts)
                    told.tell(part)
                    ended = isinstance(part.said, Answer)
                return WholeAnswer([json_text(told.whole)], held.pop_all())


async def _events(told: ToldResponse, first: Part, parts: AsyncGenerator[Part]) -> AsyncGenerator[bytes]:
    for each in told.begin():
        yield typed_event(each)
    part: Part | None = first
    while part is not None:
        for each in told.tell(part):
            yield typed_event(each)
        part = await anext(parts, None)


def typed_event(said: Json) -> bytes:
    return f"event: {said['type']}\n".encode() + event(said)
