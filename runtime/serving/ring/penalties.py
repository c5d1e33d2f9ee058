"""Logit bias, and penalties for the tokens so far."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.serving.requests.header_fields import TOKEN_BYTES, unpack_tokens
from fusion.runtime.serving.requests.sampling_params import Sampling, check_biases
from fusion.runtime.serving.ring.session import Opening


class TokenCounts:
    """The tokens of a session so far, and how often its completion has each."""

    def __init__(self, tokens: Sequence[int], answered: int) -> None:
        """The last `answered` of `tokens` belong to the completion: earlier sessions generated them."""
        self._tokens = array("q", tokens)
        self._prompt_length = len(tokens) - answered
        self._counted = 0  # of the tokens; the rest is counted when needed, in the worker thread
        self._places: dict[int, int] = {}
        self._ids, self._times = array("q"), array("q")

    def __len__(self) -> int:
        """Tokens of prompt and completion."""
        return len(self._tokens)

    def push(self, token: int) -> None:
        """Add a token of the completion."""
        self._tokens.append(token)

    def counted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct tokens, and how often the completion has each: two int64 tensors (tokens,)."""
        for place in range(self._counted, len(self._tokens)):
            token = self._tokens[place]
            known = self._places.setdefault(token, len(self._ids))
            if known == len(self._ids):
                self._ids.append(token)
                self._times.append(0)
            self._times[known] += place >= self._prompt_length
        self._counted = len(self._tokens)
        ids, times = (torch.frombuffer(each, dtype=torch.int64).clone() for each in (self._ids, self._times))
        return ids, times


def prompt_of(opening: Opening, payload: memoryview, vocabulary: int) -> list[int]:
    """The prompt's tokens in an opening's payload at the last stage, where the settings need them; else empty. JobError where they, or
    a token of `logit_bias`, are not in the vocabulary."""
    check_biases(opening.sampling, vocabulary)
    if not opening.reads_prompt:
        return []
    if len(payload) != TOKEN_BYTES * opening.prompt_length:
        raise JobError(
            f"open: penalties, schemas and prompt_logprobs need the {opening.prompt_length} tokens of the prompt"
        )
    tokens = unpack_tokens(payload)
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise JobError(f"open: tokens are 0 to {vocabulary - 1}")
    return tokens


def adjusted(
    logits: torch.Tensor, sampling: Sampling, position: int, counts: TokenCounts | None
) -> torch.Tensor:
    """A copy of the logits with bias and penalties, float64 on the CPU. `counts`: of all tokens before `position`, needed where
    `sampling` penalises; else JobFailed.

    Repetition as in `transformers`, over prompt and completion; frequency and presence as in vLLM, over the completion."""
    adjusted_logits = logits.to(device="cpu", dtype=torch.float64, copy=True)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        adjusted_logits[torch.tensor(ids)] += torch.tensor(values, dtype=torch.float64)
    if sampling.penalises:
        if counts is None or len(counts) != position:
            raise JobFailed(f"penalties for position {position} need the tokens before it")
        tokens, times = counts.counted()
        seen, penalty = adjusted_logits[tokens], sampling.repetition_penalty
        seen = torch.where(seen > 0, seen / penalty, seen * penalty)
        seen -= sampling.frequency_penalty * times.double()
        seen -= sampling.presence_penalty * (times > 0).double()
        adjusted_logits[tokens] = seen
    return adjusted_logits
