"""The variables of a model's chat template for a request, and a cache of the models' formats."""

from __future__ import annotations

from typing import Any

from cachetools import LRUCache

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.http.body import parse
from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.schema import ChatRequest, Message
from fusion.runtime.serving.requests.chat_format import ChatFormat, NoTemplate, read_format
from fusion.swarm.directory.records import JobId

MAX_FORMATS = 64
MAX_ARGUMENTS = 1 << 20  # characters of all calls together, which are JSON in JSON


def variables(form: ChatFormat, request: ChatRequest) -> dict[str, Any]:
    """The variables that the model's template is rendered with. ApiError (400) where the arguments of tool calls are too long."""
    calls = (call for message in request.messages for call in message.tool_calls or ())
    arguments = (call.function.arguments for call in calls)
    if sum(len(each) for each in arguments if isinstance(each, str)) > MAX_ARGUMENTS:
        error_line = f"messages: at most {MAX_ARGUMENTS} characters of arguments in all tool_calls together"
        raise ApiError(400, error_line, param="messages")
    tools = [tool.model_dump(exclude_unset=True) for tool in request.offered_tools]
    messages = [_message(message) for message in request.messages]
    effort = request.reasoning_effort  # which the templates of some models know by this name
    more = {"documents": request.documents, **({} if effort is None else {"reasoning_effort": effort})}
    return form.variables(messages, tools, {**more, **(request.chat_template_kwargs or {})})


class ChatFormats:
    """Chat formats by job, fetched when first needed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: LRUCache[JobId, ChatFormat] = LRUCache(MAX_FORMATS)

    async def of(self, model: ServedModel) -> ChatFormat:
        """ApiError (400) for a model without a template, or one that generates nothing; BlobError where no peer has it now."""
        form = self._known.get(model.job)
        if form is None:
            form = self._known[model.job] = await self._read(model)
        return form

    async def _read(self, model: ServedModel) -> ChatFormat:
        name = model.manifest.name
        if model.serve.outputs:
            instead = "/v1/embeddings" if model.serve.embeds else f"it with: fusion-peer run {name}"
            raise ApiError(400, f"model: {name} generates nothing; ask {instead}", param="model")
        try:
            return await read_format(self._context.blobs.of(model.job), model.manifest)
        except NoTemplate as error:
            raise ApiError(
                400,
                f"messages: {error}; it goes on from a text: ask /v1/completions",
                param="messages",
                code="no_chat_template",
            ) from None
        except JobError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from None


def _message(message: Message) -> dict[str, Any]:
    # `developer` is OpenAI's newer word; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    return fields


def _arguments(arguments: str | dict[str, Any]) -> Any:
    """Templates expect an object, OpenAI sends its JSON as text, which clients that assemble a stream leave empty where a call has no
    arguments. Text that is not valid JSON, or over the limits of a body, stays text."""
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            return parse(arguments.encode())
        except ApiError:
            return arguments
    return arguments
