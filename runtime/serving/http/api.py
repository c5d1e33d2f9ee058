"""The handlers of the routes: find the model, build the prompt, call the gateway, write the response."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import Request, Response

from fusion.runtime.belief.naming import Known
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.answers.gateway import Gateway
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.http import answers
from fusion.runtime.serving.http.chat_format import ChatFormats, variables
from fusion.runtime.serving.http.errors import ApiError, Busy, api_error, attributed_to, invalid
from fusion.runtime.serving.http.events import (
    EventStream,
    WholeAnswer,
    cancel_on_disconnect,
    event,
    events_of,
)
from fusion.runtime.serving.http.generate_requests import generate_requests
from fusion.runtime.serving.http.metrics import Metrics
from fusion.runtime.serving.http.schema import COMPLETION_TOKENS, ChatRequest, CompletionRequest
from fusion.runtime.serving.http.shapes import (
    ChatReader,
    ChatShape,
    CompletionShape,
    Heading,
    Json,
    Shape,
    json_parts,
    usage,
)
from fusion.runtime.serving.requests.chat_template import (
    ChatTemplates,
    TemplateFailed,
    TemplatesBusy,
    TextTooLong,
)
from fusion.runtime.serving.requests.request import (
    CHAT_TOKENS,
    MAX_TOKEN_BYTES,
    Answer,
    GenerateRequest,
    Piece,
    PromptPiece,
    check_length,
)

log = logging.getLogger(__name__)


class Api:
    """Each coroutine handles one request. Raises ApiError, and what the gateway raises."""

    def __init__(self, context: Context, gateway: Gateway, metrics: Metrics) -> None:
        self.closing = asyncio.Event()  # set when the peer stops: every response ends
        self._context = context
        self._gateway = gateway
        self._metrics = metrics
        self._formats = ChatFormats(context)
        self._templates = ChatTemplates()

    async def aclose(self) -> None:
        self.closing.set()
        await self._templates.aclose()

    # --- models

    async def models(self) -> list[Json]:
        """The models that the swarm serves, as far as this peer knows, by the names that requests may use."""
        served = [each for each in await self._gateway.catalog.served() if each.manifest is not None]
        names = Counter(each.named.name for each in served)
        return sorted((_listed_model(each, names) for each in served), key=lambda model: str(model["id"]))

    async def model(self, name: str) -> Json:
        manifest = (await self.find(name)).manifest
        return _model_object(name, manifest.launched_at, manifest.author)

    async def find(self, name: str) -> ServedModel:
        try:
            return await self._gateway.catalog.find(name)
        except JobError as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from None

    # --- answers

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        return await self.cancel_on_disconnect(request, self._complete(request, body))

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return await self.cancel_on_disconnect(request, self._chat(request, body))

    async def cancel_on_disconnect(self, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """The response of `work`, which is cancelled if the client disconnects or this peer stops before."""
        return await cancel_on_disconnect(request.receive, self.closing, work)

    async def _complete(self, request: Request, body: CompletionRequest) -> Response:
        with attributed_to("prompt"):
            model = await self.find(body.model)
            plain = body.add_special_tokens is not False
            prompts = [await self._tokens(request, model, prompt, plain) for prompt in body.prompts]
            max_tokens = body.max_tokens
            limits = [
                min(COMPLETION_TOKENS, _positions_left(model, p)) if max_tokens is None else max_tokens
                for p in prompts
            ]
            requests = generate_requests(
                body, model.job, prompts, limits, body.logprobs, self._context.random
            )
            spelling: dict[int, bytes] = {}
            return await self._reply(request, body, model, CompletionShape(spelling), requests, spelling)

    async def _tokens(
        self, request: Request, model: ServedModel, prompt: str | tuple[int, ...], plain: bool
    ) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self._gateway.texts.encode(model, request.state.tenant, prompt, plain=plain)
        check_length(len(prompt), model.serve.longest_prompt)  # each of the `n` completions copies the prompt
        return prompt

    async def _chat(self, request: Request, body: ChatRequest) -> Response:
        with attributed_to("messages", body.client_names):
            model, requests = await self.chat_requests(request, body)
            spelling: dict[int, bytes] = {}
            several = body.parallel_tool_calls is not False
            reader = ChatReader(body.tool_names, several=several, must=body.must_call)
            return await self._reply(request, body, model, ChatShape(reader, spelling), requests, spelling)

    async def chat_requests(
        self, request: Request, body: ChatRequest
    ) -> tuple[ServedModel, list[GenerateRequest]]:
        """The model of a chat, and the requests for the gateway."""
        model = await self.find(body.model)
        text = await self._text(model, body)
        prompt = await self._gateway.texts.encode(model, request.state.tenant, text, plain=False)
        max_tokens = body.tokens or min(CHAT_TOKENS, _positions_left(model, prompt))
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return model, generate_requests(
            body, model.job, [prompt], [max_tokens], top_logprobs, self._context.random
        )

    def parts(self, request: Request, requests: Sequence[GenerateRequest]) -> AsyncGenerator[answers.Part]:
        """As `answers.parts`."""
        return answers.parts(self._gateway, requests, request.state.tenant, self._metrics)

    async def _text(self, model: ServedModel, body: ChatRequest) -> str:
        """The prompt: the messages rendered with the model's own template."""
        form, positions = await self._formats.of(model), model.serve.longest_prompt
        values, max_bytes = variables(form, body), positions * MAX_TOKEN_BYTES
        try:
            return await self._templates.render(
                model.job, form.template_for(values["tools"]), values, max_bytes
            )
        except TextTooLong:
            message = f"messages: more than {max_bytes} bytes of text; the model takes {positions} positions"
            raise invalid(message) from None
        except TemplateFailed as error:
            message = f"messages: the model's chat template does not take them: {error}"
            raise ApiError(400, message, param="messages", code="chat_template_error") from None
        except TemplatesBusy as error:
            raise Busy(str(error)) from None

    async def _reply(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        model: ServedModel,
        shape: Shape,
        requests: Sequence[GenerateRequest],
        spelling: dict[int, bytes],
    ) -> Response:
        heading = Heading(
            id=f"{shape.prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=body.model or model.manifest.name,
            fingerprint=f"fp_{model.job[:12]}",
        )
        prompt_tokens = sum(len(each.prompt_ids or ()) for each in requests) // body.answers
        parts = self.parts(request, requests)
        if requests[0].top_logprobs is not None:
            parts = self._spelled(request, model, parts, spelling)
        if body.stream:
            first = await anext(parts)  # an error before it still gets a status code of its own
            events = events_of(first, parts, heading, shape, body, prompt_tokens, self._context)
            return EventStream(events, parts, self.closing, lambda error: event(self.failed(error).body))
        ends: dict[int, Answer] = {}
        async with AsyncExitStack() as resources:
            resources.push_async_callback(parts.aclose)
            while len(ends) < len(requests):
                part = await anext(parts)
                if isinstance(part.output, Answer):
                    ends[part.choice] = part.output
                else:
                    shape.keep(part.choice, part.output)
            choices = [shape.whole(i, ends[i]) for i in range(len(requests))]
            used = usage(prompt_tokens, list(ends.values()))
            whole = json_parts(heading.object(shape.whole_object, choices, usage=used))
            return WholeAnswer(whole, resources.pop_all())

    async def _spelled(
        self,
        request: Request,
        model: ServedModel,
        parts: AsyncGenerator[answers.Part],
        spelling: dict[int, bytes],
    ) -> AsyncGenerator[answers.Part]:
        """The same parts; by the time that each is yielded `spelling` has every token of its log-probabilities."""
        async with aclosing(parts):
            async for part in parts:
                if not isinstance(part.output, Answer):
                    tokens_named = _logprob_tokens(part.output)
                    if tokens := list(tokens_named - spelling.keys()):
                        spelled = await self._gateway.texts.spell(model, request.state.tenant, tokens)
                        spelling.update(zip(tokens, spelled, strict=True))
                yield part

    def failed(self, error: BaseException) -> ApiError:
        """The response for a request that ended with `error`, which is logged if it is a bug of ours."""
        answer = api_error(error)
        if answer.status == 500:
            log.error(
                "a request failed: %r", error, exc_info=error if log.isEnabledFor(logging.DEBUG) else None
            )
        return answer


def _logprob_tokens(piece: PromptPiece | Piece) -> set[int]:
    """The tokens for which it has log-probabilities."""
    if isinstance(piece, Piece):
        return {piece.id, *(token for token, _ in piece.top_logprobs)}
    return {*piece.ids, *(token for each in piece.logprobs if each is not None for token, _ in each.top)}


def _positions_left(model: ServedModel, prompt: Sequence[int]) -> int:
    """Positions left for the completion; at least 1, so that too long a prompt fails with an error that says so."""
    source = model.serve.source
    # An encoder reads the prompt, and the decoder begins with its start tokens
    follows = prompt if source is None else source.start
    return max(1, model.serve.max_sequence - len(follows))


def _listed_model(known: Known, names: Counter[str]) -> Json:
    named = known.named
    return _model_object(
        named.name if names[named.name] == 1 else named.full, named.launched_at, str(named.author)
    )


def _model_object(name: str, created: int, author: str) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": author}
