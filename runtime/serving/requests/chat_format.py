"""A model's chat template and special tokens, which are files of its job."""

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
    """The model has no chat template; with an invented one its completions would be almost right."""


@dataclass(frozen=True)
class ChatFormat:
    template: str
    tokens: Mapping[str, str]
    tool_template: str | None = None  # used instead where there are tools

    def template_for(self, tools: object) -> str:
        """The template that transformers would choose. `tools`: of the variables."""
        return self.tool_template if tools and self.tool_template is not None else self.template

    def variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """The variables of the template, as in transformers' `apply_chat_template`."""
        return {
            **self.tokens,
            "documents": None,
            **more,
            "messages": list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": True,
        }


async def read_format(blobs: JobBlobs, manifest: Manifest) -> ChatFormat:
    """The format of a served model. Raises NoTemplate; JobError for files that are not valid; BlobError where no peer has them now."""
    files = dict(manifest.files)
    if CHAT_TEMPLATE_FILE not in files:
        raise NoTemplate(f"{manifest.name} has no chat template")
    contents = {
        name: await blobs.read(files[name], max_bytes)
        for name, max_bytes in CHAT_FILES.items()
        if name in files
    }
    return format_of(contents)


def format_of(files: Mapping[str, bytes]) -> ChatFormat:
    """The format from the contents of CHAT_FILES. JobError where they are not valid."""
    try:
        special = json.loads(files.get(SPECIAL_TOKENS_FILE, b"{}"))
        tokens = special_tokens(special if isinstance(special, dict) else {})
        tools = files.get(TOOL_TEMPLATE_FILE)
        return ChatFormat(
            files[CHAT_TEMPLATE_FILE].decode(), tokens, None if tools is None else tools.decode()
        )
    except (ValueError, RecursionError):
        raise JobError("the model's chat template cannot be read") from None
