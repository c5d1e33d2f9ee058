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
    TOOL_TEMPLATE_FILE,
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
    tool_template: str | None = None  # in its place where tools are given

    def template_for(self, tools: object) -> str:
        """As transformers chooses it. `tools`: of the variables."""
        return self.tool_template if tools and self.tool_template is not None else self.template

    def variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """What the template is rendered with, as transformers' `apply_chat_template` does it."""
        return {
            **self.tokens,
            "documents": None,
            **more,
            "messages": list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": True,
        }


async def read_format(blobs: JobBlobs, manifest: Manifest) -> ChatFormat:
    """Of a served model. NoTemplate; JobError for files that are none; BlobError where nobody has them now."""
    files = dict(manifest.files)
    if CHAT_TEMPLATE_FILE not in files:
        raise NoTemplate(f"{manifest.name} has no chat template")
    given = {name: await blobs.read(files[name], most) for name, most in CHAT_FILES.items() if name in files}
    return format_of(given)


def format_of(files: Mapping[str, bytes]) -> ChatFormat:
    """Of the contents of CHAT_FILES. JobError for files that are none."""
    try:
        said = json.loads(files.get(SPECIAL_TOKENS_FILE, b"{}"))
        tokens = special_tokens(said if isinstance(said, dict) else {})
        tools = files.get(TOOL_TEMPLATE_FILE)
        return ChatFormat(
            files[CHAT_TEMPLATE_FILE].decode(), tokens, None if tools is None else tools.decode()
        )
    except (ValueError, RecursionError):
        raise JobError("the model's chat template cannot be read") from None
