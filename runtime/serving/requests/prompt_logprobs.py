"""Log-probabilities of a prompt's own tokens as bytes. Loads no torch.

For each token its own log-probability, float64, then the ids of the most probable tokens, int64, and their log-probabilities,
float64; all little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.request import LEAST_LOGPROB, PROMPT_PIECE_TOKENS, Logprobs


def _layout(count: int) -> struct.Struct:
    return struct.Struct(f"<d{count}q{count}d")


def packed(logprobs: Iterable[Logprobs], count: int) -> bytes:
    """`count`: how many of the most probable tokens each has."""
    layout = _layout(count)
    return b"".join(
        layout.pack(each.chosen, *(token for token, _ in each.top), *(value for _, value in each.top))
        for each in logprobs
    )


def unpacked(payload: memoryview, count: int, vocabulary: int) -> list[Logprobs]:
    """The inverse of `packed`. JobError for a payload that is not of 1 to PROMPT_PIECE_TOKENS tokens of the vocabulary."""
    layout = _layout(count)
    if not 0 < len(payload) <= PROMPT_PIECE_TOKENS * layout.size or len(payload) % layout.size:
        raise JobError(f"prompt_logprobs: {layout.size} bytes for each of 1 to {PROMPT_PIECE_TOKENS} tokens")
    logprobs = []
    for chosen, *rest in layout.iter_unpack(payload):
        ids, values = rest[:count], rest[count:]
        if not all(LEAST_LOGPROB <= value <= 0.0 for value in (chosen, *values)):
            raise JobError(f"prompt_logprobs: between {LEAST_LOGPROB:g} and 0")
        if not all(0 <= token < vocabulary for token in ids):
            raise JobError("prompt_logprobs: tokens that the model does not have")
        logprobs.append(Logprobs(chosen, tuple(zip(ids, values, strict=True))))
    return logprobs
