"""What the routes do: find the model, make a prompt of what was said, ask the gateway, write the answer."""

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
from fusion.runtime.serving.http import answers, asking
from fusion.runtime.serving.http.chat_format import ChatFormats, variables
from fusion.runtime.serving.http.errors import ApiError, Busy, api_error, attributed_to, invalid
from fusion.runtime.serving.http.events import EventStream, WholeAnswer, event, events_of, unless_gone
from fusion.runtime.serving.http.metrics import Metrics
from fusion.runtime.serving.http.schema import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    Settings,
)
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
    """Each of its coroutines answers one request. Raises ApiError, and what the gateway raises."""

    def __init__(self, context: Context, gateway: Gateway, metrics: Metrics) -> None:
        self.closing = asyncio.Event()  # set when the peer stops: no answer goes on
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
        """Those that the swarm serves, as far as this peer knows, by the names that they can be asked for."""
        served = [each for each in await self._gateway.catalog.served() if each.manifest is not None]
        names = Counter(each.named.name for each in served)
        return sorted((_model(each, names) for each in served), key=lambda model: str(model["id"]))

    async def model(self, name: str) -> Json:
        found = (await self.find(name)).manifest
        return _described(name, found.launched_at, found.author)

    async def find(self, name: str) -> ServedModel:
        try:
            return await self._gateway.catalog.find(name)
        except JobError as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from None

    # --- answers

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        return await self.while_there(request, self._complete(request, body))

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return await self.while_there(request, self._chat(request, body))

    async def while_there(self, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """What `work` answers, unless the client goes away or this peer stops before."""
        return await unless_gone(request.receive, self.closing, work)

    async def _complete(self, request: Request, body: CompletionRequest) -> Response:
        with attributed_to("prompt"):
            model = await self.find(body.model)
            plain = body.add_special_tokens is not False
            prompts = [await self._tokens(request, model, prompt, plain) for prompt in body.prompts]
            said = body.max_tokens
            most = [min(COMPLETION_TOKENS, _left(model, p)) if said is None else said for p in prompts]
            asked = asking.requests(body, model.job, prompts, most, body.logprobs, self._context.random)
            spelling: dict[int, bytes] = {}
            return await self._reply(request, body, model, CompletionShape(spelling), asked, spelling)

    async def _tokens(
        self, request: Request, model: ServedModel, prompt: str | tuple[int, ...], plain: bool
    ) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self._gateway.texts.encode(model, request.state.holder, prompt, plain=plain)
        check_length(len(prompt), model.serve.longest_prompt)  # each of `n` answers looks at all of them
        return prompt

    async def _chat(self, request: Request, body: ChatRequest) -> Response:
        with attributed_to("messages", body.called):
            model, asked = await self.chat_requests(request, body)
            spelling: dict[int, bytes] = {}
            several = body.parallel_tool_calls is not False
            reader = ChatReader(body.tool_names, several=several, must=body.must_call)
            return await self._reply(request, body, model, ChatShape(reader, spelling), asked, spelling)

    async def chat_requests(
        self, request: Request, body: ChatRequest
    ) -> tuple[ServedModel, list[GenerateRequest]]:
        """The model that a chat is with, and what its gateway is asked."""
        model = await self.find(body.model)
        text = await self._text(model, body)
        prompt = await self._gateway.texts.encode(model, request.state.holder, text, plain=False)
        most = body.tokens or min(CHAT_TOKENS, _left(model, prompt))
        top = (body.top_logprobs or 0) if body.logprobs else None
        return model, asking.requests(body, model.job, [prompt], [most], top, self._context.random)

    def parts(self, request: Request, asked: Sequence[GenerateRequest]) -> AsyncGenerator[answers.Part]:
        """The answers of the gateway, as `answers.parts` gives them."""
        return answers.parts(self._gateway, asked, request.state.holder, self._metrics)

    async def _text(self, model: ServedModel, body: ChatRequest) -> str:
        """The messages as the model's own template writes them."""
        form, positions = await self._formats.of(model), model.serve.longest_prompt
        given, most = variables(form, body), positions * MAX_TOKEN_BYTES
        try:
            return await self._templates.render(model.job, form.template_for(given["tools"]), given, most)
        except TextTooLong:
            said = f"messages: more than {most} bytes of text; the model takes {positions} positions"
            raise invalid(said) from None
        except TemplateFailed as error:
            said = f"messages: the model's chat template does not take them: {error}"
            raise ApiError(400, said, param="messages", code="chat_template_error") from None
        except TemplatesBusy as error:
            raise Busy(str(error)) from None

    async def _reply(
        self,
        request: Request,
        body: Settings,
        model: ServedModel,
        shape: Shape,
        asked: Sequence[GenerateRequest],
        spelling: dict[int, bytes],
    ) -> Response:
        heading = Heading(
            id=f"{shape.prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=body.model or model.manifest.name,
            fingerprint=f"fp_{model.job[:12]}",
        )
        prompt_tokens = sum(len(each.prompt_ids or ()) for each in asked) // body.answers
        parts = self.parts(request, asked)
        if asked[0].top_logprobs is not None:
            parts = self._spelled(request, model, parts, spelling)
        if body.stream:
            first = await anext(parts)  # what goes wrong before it has a status of its own
            events = events_of(first, parts, heading, shape, body, prompt_tokens, self._context)
            return EventStream(events, parts, self.closing, lambda error: event(self.failed(error).body))
        ends: dict[int, Answer] = {}
        async with AsyncExitStack() as held:
            held.push_async_callback(parts.aclose)
            while len(ends) < len(asked):
                part = await anext(parts)
                if isinstance(part.said, Answer):
                    ends[part.choice] = part.said
                else:
                    shape.keep(part.choice, part.said)
            choices = [shape.whole(i, ends[i]) for i in range(len(asked))]
            used = usage(prompt_tokens, list(ends.values()))
            whole = json_parts(heading.object(shape.whole_object, choices, usage=used))
            return WholeAnswer(whole, held.pop_all())

    async def _spelled(
        self,
        request: Request,
        model: ServedModel,
        parts: AsyncGenerator[answers.Part],
        spelling: dict[int, bytes],
    ) -> AsyncGenerator[answers.Part]:
        """The same, with every token that they tell of in `spelling` by then."""
        async with aclosing(parts):
            async for part in parts:
                if not isinstance(part.said, Answer):
                    told = _told(part.said)
                    if tokens := list(told - spelling.keys()):
                        spelled = await self._gateway.texts.spell(model, request.state.holder, tokens)
                        spelling.update(zip(tokens, spelled, strict=True))
                yield part

    def failed(self, error: BaseException) -> ApiError:
        """What to answer where `error` ended a request; the log has it if it is a mistake of ours."""
        answer = api_error(error)
        if answer.status == 500:
            log.error(
                "a request failed: %r", error, exc_info=error if log.isEnabledFor(logging.DEBUG) else None
            )
        return answer


def _told(piece: PromptPiece | Piece) -> set[int]:
    """The tokens that its log-probabilities name."""
    if isinstance(piece, Piece):
        return {piece.id, *(token for token, _ in piece.top_logprobs)}
    return {*piece.ids, *(token for each in piece.logprobs if each is not None for token, _ in each.top)}


def _left(model: ServedModel, prompt: Sequence[int]) -> int:
    """Positions for an answer; at least 1, so that a prompt that is too long is told so."""
    source = model.serve.source
    # An encoder-decoder reads the prompt, and answers from its start
    follows = prompt if source is None else source.start
    return max(1, model.serve.max_sequence - len(follows))


def _model(known: Known, names: Counter[str]) -> Json:
    named = known.named
    return _described(
        named.name if names[named.name] == 1 else named.full, named.launched_at, str(named.author)
    )


def _described(name: str, created: int, author: str) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": author}
