"""From logits to a token id: bias and penalties, then greedy, or temperature, min-p, top-k and top-p with a seed.

A draw is a pure function of (logits, settings, tokens so far, position): whichever peer holds the last stage, and however
often a position is computed again after a failure, the same token comes out.
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

SCORED_BYTES = 64 << 20  # of logits of a prompt's positions, in float32, that are there at once
NEAR_DRAWS = 0.05  # of all, on either side: so far another model's may lie apart


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
    """What `sample` may give there for logits that differ somewhat from these, those of a smaller model: the token that has most of the
    draws next to the one of this position. Bias and penalties are passed over."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities, ids = _probabilities(logits, sampling)
    ends = probabilities.cumsum(0)
    target = uniform(sampling.seed, position) * float(ends[-1])
    near = ends.clamp(max=target + NEAR_DRAWS) - (ends - probabilities).clamp(min=target - NEAR_DRAWS)
    place = int(near.argmax())
    return place if ids is None else int(ids[place])


def _probabilities(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the tokens that may be drawn, in the order in which draws go through them, and their ids; None: these are their places.
    JobFailed where the most probable one is not a number."""
    logits = logits.cpu()
    _check(float(logits.max()))
    ids: torch.Tensor | None = None  # None: places in `logits` are token ids
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
    """The fewest that reach `top_p` together, the most probable first, and their places."""
    # All that are less probable have half of what is left of 1 at most, together. To sort them too takes longer, of a large
    # vocabulary, than to run a small model.
    least = (1 - top_p) / (2 * probabilities.numel())
    places = (probabilities >= least).nonzero().squeeze(1)
    found, order = probabilities[places].sort(descending=True, stable=True)
    # A token stays if the ones before it have not reached top_p yet, so the first always stays.
    kept = max(1, int((found.cumsum(0) - found < top_p).sum()))
    return found[:kept], places[order[:kept]]


def _highest(values: torch.Tensor, count: int, above: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest, or as many as are above `above`, in descending order, of equal ones the first; and their places."""
    # `topk` does not say which of equal ones it takes.
    least = values.topk(count).values[-1]
    places = ((values >= least) & (values > above)).nonzero().squeeze(1)
    found, order = values[places].sort(descending=True, stable=True)
    return found[:count], places[order[:count]]


def logprobs(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """Of `token` and of the `count` most probable ones (of equally probable ones the lower ids), in float64 on the CPU.

    logits: (vocabulary,), as the model gives them."""
    found = logits.to(device="cpu", dtype=torch.float64).log_softmax(0).clamp(min=LEAST_LOGPROB)
    _check(float(found[token]))
    if not count:
        return Logprobs(float(found[token]))
    values, ids = _highest(found, min(count, found.numel()), above=-math.inf)
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return Logprobs(float(found[token]), tuple(top))


@dataclass(frozen=True)
class PromptScores:
    """At the last stage: what is told of a prompt's own `tokens`, each with `count` of the most probable ones in its place."""

    tokens: Sequence[int]
    count: int
    vocabulary: int

    @property
    def at_once(self) -> int:
        """Of how many positions the logits may be there at once."""
        return max(1, SCORED_BYTES // (4 * self.vocabulary))

    def wants(self, start: int) -> bool:
        """Whether a token of the prompt follows the position."""
        return start + 1 < len(self.tokens)

    def told(self, start: int, logits: torch.Tensor) -> Iterator[tuple[int, bytes]]:
        """Of the tokens that follow positions from `start` on, logits (positions, vocabulary), PROMPT_PIECE_TOKENS at a time: the
        position of the first of them, and all of them `packed`. JobFailed where logits are not numbers."""
        tokens = self.tokens[start + 1 : start + 1 + len(logits)]
        for first in range(0, len(tokens), PROMPT_PIECE_TOKENS):
            some = zip(logits[first : first + PROMPT_PIECE_TOKENS], tokens[first:], strict=False)
            told = packed(
                (logprobs(row, token, self.count) for row, token in some), min(self.count, self.vocabulary)
            )
            yield start + 1 + first, told


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the two and on nothing else: 53 bits of a hash."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _check(value: float) -> None:
    if value != value:
        raise JobFailed("the model's logits are not numbers (NaN)")
    if value == -math.inf:
        raise JobFailed("the model's logits allow no token")
