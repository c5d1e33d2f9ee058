"""From logits to a token id: bias and penalties, then greedy, or temperature, min-p, top-k and top-p with a seed.

Sampling is a pure function of (logits, settings, tokens so far, position): whichever peer runs the last stage, and however often a
position is computed again after a failure, the token is the same.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.serving.requests.prompt_logprobs import packed
from fusion.runtime.serving.requests.request import LEAST_LOGPROB, PROMPT_PIECE_TOKENS, Logprobs
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.penalties import TokenCounts, adjusted

SCORED_BYTES = 64 << 20  # of float32 logits of a prompt's positions, at once
NEAR_DRAWS = 0.05  # of all draws, on either side: how far those of another model may differ


def sample(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    counts: TokenCounts | None = None,
    allowed: torch.Tensor | None = None,
) -> int:
    """The token for `position` (its place in the sequence, the prompt included).

    logits: (vocabulary,), any floating dtype, on any device. `counts`: of the tokens before `position`, where `sampling`
    penalises. `allowed`: (vocabulary,) bool, on the CPU; None: all. JobFailed where the most probable one is not a number.
    """
    if sampling.logit_bias or sampling.penalises:
        logits = adjusted(logits, sampling, position, counts)
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -math.inf)
    if sampling.temperature == 0.0:
        best, index = logits.max(0)
        _check(float(best))
        return int(index)
    probabilities, ids = _probabilities(logits, sampling)
    cumulative = probabilities.cumsum(0)
    target = uniform(sampling.seed, position) * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, target, right=True))
    place = min(place, probabilities.numel() - 1)
    return place if ids is None else int(ids[place])


def guess(sampling: Sampling, logits: torch.Tensor, position: int) -> int:
    """The token that `sample` will most likely return there for the large model's logits, given those of a draft model: the one with most
    of the draws near that of this position. Bias and penalties are ignored."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities, ids = _probabilities(logits, sampling)
    ends = probabilities.cumsum(0)
    target = uniform(sampling.seed, position) * float(ends[-1])
    near = ends.clamp(max=target + NEAR_DRAWS) - (ends - probabilities).clamp(min=target - NEAR_DRAWS)
    place = int(near.argmax())
    return place if ids is None else int(ids[place])


def _probabilities(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities of the tokens that may be drawn, in the order of the cumulative sum, and their ids; None: ids are indices. JobFailed
    where the most probable one is not a number."""
    logits = logits.cpu()
    _check(float(logits.max()))
    ids: torch.Tensor | None = None  # None: indices into `logits` are token ids
    if 0 < sampling.top_k < logits.numel():
        logits, ids = _highest(logits, sampling.top_k, above=-math.inf)
    # Float64 on the CPU: the sum of many small probabilities must not depend on the device.
    scaled = logits.to(torch.float64, copy=True)
    # Largest first set to 0: a tiny temperature then gives -inf for the others, never inf - inf.
    scaled.sub_(scaled.max()).div_(sampling.temperature)
    if sampling.min_p:
        scaled[scaled.exp() < sampling.min_p] = -math.inf
    probabilities = scaled.softmax(0)
    _check(float(probabilities[0]))
    if sampling.top_p < 1.0:
        probabilities, places = _reaching(probabilities, sampling.top_p)
        ids = places if ids is None else ids[places]
    return probabilities, ids


def _reaching(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest probabilities that reach `top_p` together, highest first, and their indices."""
    # All below `least` sum up to at most half of 1 - top_p, so they are never needed. Sorting a large vocabulary whole takes longer than
    # running a small model.
    least = (1 - top_p) / (2 * probabilities.numel())
    places = (probabilities >= least).nonzero().squeeze(1)
    kept_probabilities, order = probabilities[places].sort(descending=True, stable=True)
    # A token stays if the ones before it have not reached top_p yet, so the first always stays.
    kept = max(1, int((kept_probabilities.cumsum(0) - kept_probabilities < top_p).sum()))
    return kept_probabilities[:kept], places[order[:kept]]


def _highest(values: torch.Tensor, count: int, above: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest values, or as many as are above `above`, in descending order, the first of equal ones; and their indices."""
    # `topk` does not define which of equal values it takes.
    least = values.topk(count).values[-1]
    places = ((values >= least) & (values > above)).nonzero().squeeze(1)
    highest, order = values[places].sort(descending=True, stable=True)
    return highest[:count], places[order[:count]]


def logprobs(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """Log-probabilities of `token` and of the `count` most probable tokens (lower ids first among equals), in float64 on the CPU.

    logits: (vocabulary,), unmodified."""
    all_logprobs = logits.to(device="cpu", dtype=torch.float64).log_softmax(0).clamp(min=LEAST_LOGPROB)
    _check(float(all_logprobs[token]))
    if not count:
        return Logprobs(float(all_logprobs[token]))
    values, ids = _highest(all_logprobs, min(count, all_logprobs.numel()), above=-math.inf)
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return Logprobs(float(all_logprobs[token]), tuple(top))


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's own `tokens`, computed at the last stage, each with the `count` most probable ones at its
    position."""

    tokens: Sequence[int]
    count: int
    vocabulary: int

    @property
    def at_once(self) -> int:
        """How many positions' logits are computed at once."""
        return max(1, SCORED_BYTES // (4 * self.vocabulary))

    def wants(self, start: int) -> bool:
        """Whether the position is followed by a token of the prompt."""
        return start + 1 < len(self.tokens)

    def scores_of(self, start: int, logits: torch.Tensor) -> Iterator[tuple[int, bytes]]:
        """Score the tokens that follow the positions from `start` on. logits: (positions, vocabulary). Yields the position of the first
        token and all of them `packed`, PROMPT_PIECE_TOKENS at a time. JobFailed where logits are not numbers."""
        tokens = self.tokens[start + 1 : start + 1 + len(logits)]
        for first in range(0, len(tokens), PROMPT_PIECE_TOKENS):
            some = zip(logits[first : first + PROMPT_PIECE_TOKENS], tokens[first:], strict=False)
            scores = packed(
                (logprobs(row, token, self.count) for row, token in some), min(self.count, self.vocabulary)
            )
            yield start + 1 + first, scores


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on seed and position: 53 bits of a hash."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _check(value: float) -> None:
    if value != value:
        raise JobFailed("the model's logits are not numbers (NaN)")
    if value == -math.inf:
        raise JobFailed("the model's logits allow no token")
