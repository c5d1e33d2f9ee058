"""What a session's settings add to the logits, and take off for the tokens that it has already."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.serving.requests.header_fields import unpack_tokens
from fusion.runtime.serving.requests.sampling_params import Sampling, check_biases
from fusion.runtime.serving.ring.session import Opening


class TokenCounts:
    """The tokens of a session so far, and how often its answer has each."""

    def __init__(self, tokens: Sequence[int], answered: int) -> None:
        """The last `answered` of `tokens` belong to the answer: sessions before this one gave them."""
        self._tokens = array("q", tokens)
        self._prompt_length = len(tokens) - answered
        self._counted = 0  # of the tokens; the others are when it is asked, in the worker thread
        self._places: dict[int, int] = {}
        self._ids, self._times = array("q"), array("q")

    def __len__(self) -> int:
        """Tokens of prompt and answer."""
        return len(self._tokens)

    def push(self, token: int) -> None:
        """The answer has one more."""
        self._tokens.append(token)

    def counted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(different tokens,) twice, int64: each of them once, and how often the answer has it."""
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
    """The tokens that come with the opening of a session whose settings need them, as the last stage takes them; none for
    others. JobError where they, or a bias, are not this model's."""
    check_biases(opening.sampling, vocabulary)
    if not opening.reads_prompt:
        return []
    if len(payload) != 8 * opening.prompt_length:
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
    """Logits with bias and penalties, float64 on the CPU: a copy. `counts`: where `sampling` penalises, of all tokens before
    `position`; JobFailed where they are of others.

    Repetition as in `transformers`, over prompt and answer; frequency and presence as in vLLM, over the answer."""
    found = logits.to(device="cpu", dtype=torch.float64, copy=True)
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        found[torch.tensor(ids)] += torch.tensor(values, dtype=torch.float64)
    if sampling.penalises:
        if counts is None or len(counts) != position:
            raise JobFailed(f"penalties for position {position} need the tokens before it")
        tokens, times = counts.counted()
        seen, penalty = found[tokens], sampling.repetition_penalty
        seen = torch.where(seen > 0, seen / penalty, seen * penalty)
        seen -= sampling.frequency_penalty * times.double()
        seen -= sampling.presence_penalty * (times > 0).double()
        found[tokens] = seen
    return found
