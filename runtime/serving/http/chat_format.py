"""What a chat's request says to a model's template, and the formats of the models that were asked for."""

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
    """What the model's template is rendered with. ApiError (400) where calls have too long arguments."""
    calls = (call for message in request.messages for call in message.tool_calls or ())
    given = (call.function.arguments for call in calls)
    if sum(len(each) for each in given if isinstance(each, str)) > MAX_ARGUMENTS:
        said = f"messages: at most {MAX_ARGUMENTS} characters of arguments in all tool_calls together"
        raise ApiError(400, said, param="messages")
    tools = [tool.model_dump(exclude_unset=True) for tool in request.offered_tools]
    messages = [_message(message) for message in request.messages]
    effort = request.reasoning_effort  # which the templates of some models know by this name
    more = {"documents": request.documents, **({} if effort is None else {"reasoning_effort": effort})}
    return form.variables(messages, tools, {**more, **(request.chat_template_kwargs or {})})


class ChatFormats:
    """By job, fetched when they are first asked for."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: LRUCache[JobId, ChatFormat] = LRUCache(MAX_FORMATS)

    async def of(self, model: ServedModel) -> ChatFormat:
        """ApiError (400) for a model without a template, or one that says nothing; BlobError where nobody has it now."""
        found = self._known.get(model.job)
        if found is None:
            found = self._known[model.job] = await self._read(model)
        return found

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
    said: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            said[name] = value
    return said


def _arguments(given: str | dict[str, Any]) -> Any:
    """As templates want them: an object, where OpenAI has its text, which clients that put a stream together leave empty where a
    call has none. What a body may not hold stays text."""
    if isinstance(given, str):
        if not given.strip():
            return {}
        try:
            return parse(given.encode())
        except ApiError:
            return given
    return given
