"""What a model is given to read, of a request: its prompt, and for an encoder-decoder a source beside that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.serving.requests.request import pack_tokens
from fusion.runtime.serving.ring.session import check_source


@dataclass(frozen=True)
class Reading:
    """`prompt`: the tokens that the answer follows; `source`: what travels with them, of `length` ids or frames."""

    prompt: Sequence[int]
    source: bytes = b""
    length: int = 0


def reading(serve: ServeConfig, ids: Sequence[int], features: bytes) -> Reading:
    """`ids`: of the request's text, or that it gave. JobError, in one line, where the model cannot read that."""
    config = serve.source
    if config is None:
        if features:
            raise JobError("features: this model takes none; give a prompt")
        return Reading(ids)
    if not config.channels:
        if features:
            raise JobError("features: this model reads text; give a prompt")
        check_source(len(ids), config)
        if any(not 0 <= token < serve.vocabulary for token in ids):
            raise JobError(f"prompt_ids: this model's tokens are 0 to {serve.vocabulary - 1}")
        return Reading(config.start, pack_tokens(ids), len(ids))
    if len(features) != config.length * config.unit_bytes:
        raise JobError(
            f"features: this model takes {config.channels} channels of {config.length} frames in float32, "
            f"{config.length * config.unit_bytes} bytes, not {len(features)}"
        )
    return Reading(ids or config.start, features, config.length)
