"""How a model is chatted with: its own template and special tokens, which travel with its job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import (
    CHAT_FILES,
    CHAT_TEMPLATE_FILE,
    SPECIAL_TOKENS_FILE,
    special_tokens,
)

if TYPE_CHECKING:
    from fusion.runtime.job.manifest import Manifest
    from fusion.swarm.blobs.blobs import JobBlobs


class NoTemplate(JobError):
    """The model has none: it goes on from texts, and a template that was made up would answer almost right."""


@dataclass(frozen=True)
class ChatFormat:
    template: str
    tokens: Mapping[str, str]

    def variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """What the template is rendered with, as transformers' `apply_chat_template` does it."""
        return {
            **self.tokens,
            **more,
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": True,
        }


async def read_format(blobs: JobBlobs, manifest: Manifest) -> ChatFormat:
    """Of a served model. NoTemplate; JobError for files that are none; BlobError where nobody has them now."""
    files = dict(manifest.files)
    if CHAT_TEMPLATE_FILE not in files:
        raise NoTemplate(f"{manifest.name} has no chat template")
    template = await blobs.read(files[CHAT_TEMPLATE_FILE], CHAT_FILES[CHAT_TEMPLATE_FILE])
    tokens = b"{}"
    if SPECIAL_TOKENS_FILE in files:
        tokens = await blobs.read(files[SPECIAL_TOKENS_FILE], CHAT_FILES[SPECIAL_TOKENS_FILE])
    try:
        said = json.loads(tokens)
        return ChatFormat(template.decode(), special_tokens(said if isinstance(said, dict) else {}))
    except (ValueError, RecursionError):
        raise JobError("the model's chat template cannot be read") from None
