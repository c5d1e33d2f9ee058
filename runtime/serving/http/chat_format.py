"""How a model is chatted with: its own template and special tokens, which travel with its job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from fusion.runtime.job.context import Context
from fusion.runtime.job.model_files import (
    CHAT_FILES,
    CHAT_TEMPLATE_FILE,
    SPECIAL_TOKENS_FILE,
    special_tokens,
)
from fusion.runtime.serving.answers.catalog import ServedModel
from fusion.runtime.serving.http.errors import ApiError
from fusion.runtime.serving.http.schema import ChatRequest, Message
from fusion.swarm.directory.records import JobId

MAX_FORMATS = 64


@dataclass(frozen=True)
class ChatFormat:
    template: str
    tokens: dict[str, str]

    def variables(self, request: ChatRequest) -> dict[str, Any]:
        """What the template is rendered with, as transformers' `apply_chat_template` does it."""
        tools = [tool.model_dump(exclude_unset=True) for tool in request.offered_tools]
        return {
            **self.tokens,
            **(request.chat_template_kwargs or {}),
            "messages": [_message(message) for message in request.messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": True,
        }


class ChatFormats:
    """By job, fetched when they are first asked for."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: LRUCache[JobId, ChatFormat] = LRUCache(MAX_FORMATS)

    async def of(self, model: ServedModel) -> ChatFormat:
        """ApiError (400) for a model without a template; BlobError where nobody has it now."""
        found = self._known.get(model.job)
        if found is None:
            found = self._known[model.job] = await self._read(model)
        return found

    async def _read(self, model: ServedModel) -> ChatFormat:
        files = dict(model.manifest.files)
        if CHAT_TEMPLATE_FILE not in files:
            raise ApiError(
                400,
                f"messages: {model.manifest.name} has no chat template; it goes on from a text: ask /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        blobs = self._context.blobs.of(model.job)
        template = await blobs.read(files[CHAT_TEMPLATE_FILE], CHAT_FILES[CHAT_TEMPLATE_FILE])
        tokens = b"{}"
        if SPECIAL_TOKENS_FILE in files:
            tokens = await blobs.read(files[SPECIAL_TOKENS_FILE], CHAT_FILES[SPECIAL_TOKENS_FILE])
        try:
            said = json.loads(tokens)
            return ChatFormat(template.decode(), special_tokens(said if isinstance(said, dict) else {}))
        except (ValueError, RecursionError):
            raise ApiError(
                400, "messages: the model's chat template cannot be read", param="messages"
            ) from None


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
    """As templates want them: an object, where OpenAI has its text."""
    if isinstance(given, str):
        try:
            return json.loads(given)
        except (ValueError, RecursionError):
            return given
    return given
