"""The handler of /v1/responses: a chat completion, written as a response."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from fastapi import Request, Response

from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.api import Api
from fusion.runtime.serving.http.errors import attributed_to
from fusion.runtime.serving.http.events import EventStream, WholeAnswer, event
from fusion.runtime.serving.http.responses.builder import ResponseBuilder
from fusion.runtime.serving.http.responses.schema import ResponsesRequest
from fusion.runtime.serving.http.shapes import Json, json_text
from fusion.runtime.serving.requests.request import Answer

# Field of a chat request -> the field of a responses request that it was made of.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "json_schema": "text",
    "response_format": "text",
}


class Responses:
    """Raises as `Api` does."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def answer(self, request: Request, body: ResponsesRequest) -> Response:
        return await self._api.cancel_on_disconnect(request, self._answer(request, body))

    async def _answer(self, request: Request, body: ResponsesRequest) -> Response:
        with attributed_to("input", {**NAMES, **body.chat.client_names}):
            model, requests = await self._api.chat_requests(request, body.chat)
            prompt_tokens = sum(len(each.prompt_ids or ()) for each in requests)
            name = body.model or model.manifest.name
            response = ResponseBuilder(body, name, int(time.time()), prompt_tokens)
            parts = self._api.parts(request, requests)
            if body.stream:
                first = await anext(parts)  # an error before it still gets a status code of its own

                def failed(error: BaseException) -> bytes:
                    return b"".join(map(typed_event, response.fail(self._api.failed(error))))

                return EventStream(_events(response, first, parts), parts, self._api.closing, failed)
            async with AsyncExitStack() as resources:
                resources.push_async_callback(parts.aclose)
                ended = False
                while not ended:
                    part = await anext(parts)
                    response.add(part)
                    ended = isinstance(part.output, Answer)
                return WholeAnswer([json_text(response.whole)], resources.pop_all())


async def _events(
    response: ResponseBuilder, first: Part, parts: AsyncGenerator[Part]
) -> AsyncGenerator[bytes]:
    for each in response.begin():
        yield typed_event(each)
    part: Part | None = first
    while part is not None:
        for each in response.add(part):
            yield typed_event(each)
        part = await anext(parts, None)


def typed_event(fields: Json) -> bytes:
    return f"event: {fields['type']}\n".encode() + event(fields)
