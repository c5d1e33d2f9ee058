"""Log-probabilities of a prompt's own tokens as bytes, a few numbers for each token: never a whole vocabulary. Loads no torch.

Of each token its own log-probability, float64, then the ids of the most probable ones, int64, and their log-probabilities, float64;
all of them little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.request import LEAST_LOGPROB, PROMPT_PIECE_TOKENS, Logprobs


def _form(count: int) -> struct.Struct:
    return struct.Struct(f"<d{count}q{count}d")


def packed(told: Iterable[Logprobs], count: int) -> bytes:
    """`count`: of the most probable ones of each token."""
    form = _form(count)
    return b"".join(
        form.pack(each.chosen, *(token for token, _ in each.top), *(value for _, value in each.top))
        for each in told
    )


def unpacked(payload: memoryview, count: int, vocabulary: int) -> list[Logprobs]:
    """JobError where it is not that, of 1 to PROMPT_PIECE_TOKENS tokens and a model of so many."""
    form = _form(count)
    if not 0 < len(payload) <= PROMPT_PIECE_TOKENS * form.size or len(payload) % form.size:
        raise JobError(f"prompt_logprobs: {form.size} bytes for each of 1 to {PROMPT_PIECE_TOKENS} tokens")
    found = []
    for chosen, *rest in form.iter_unpack(payload):
        ids, values = rest[:count], rest[count:]
        if not all(LEAST_LOGPROB <= value <= 0.0 for value in (chosen, *values)):
            raise JobError(f"prompt_logprobs: between {LEAST_LOGPROB:g} and 0")
        if not all(0 <= token < vocabulary for token in ids):
            raise JobError("prompt_logprobs: tokens that the model does not have")
        found.append(Logprobs(chosen, tuple(zip(ids, values, strict=True))))
    return found
