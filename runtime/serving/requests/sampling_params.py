"""Sampling parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.header_fields import number, pairs, whole

MAX_SEED = (1 << 63) - 1
MAX_BIASES = 1024  # entries of `logit_bias`

# Parameters that older releases do not know: sent only where they are set.
_NEWER = {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample each token. JobError names the field that is out of range.

    In this order, as in vLLM: `logit_bias`, penalties, `temperature`, `min_p`, `top_k`, `top_p`. Greedy is the largest
    logit after the penalties."""

    temperature: float = 0.0  # 0: greedy; then min_p, top_k, top_p and seed do nothing
    top_k: int = 0  # keep only the k most probable tokens; 0: all
    top_p: float = 1.0  # keep the fewest tokens whose probabilities reach this sum; 1: all
    seed: int = 0
    # Keep the tokens of at least this share of the most probable one's probability; 0: all.
    min_p: float = 0.0
    # Positive logits of tokens in prompt and completion are divided by it, others multiplied (CTRL, arXiv 1909.05858); 1: not.
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each occurrence in the completion
    presence_penalty: float = 0.0  # subtracted from the logit of each token in the completion
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise JobError(f"temperature: between 0 (greedy) and 100, not {self.temperature}")
        if self.top_k < 0:
            raise JobError(f"top_k: 0 (all tokens) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise JobError(f"top_p: above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed <= MAX_SEED:
            raise JobError(f"seed: between 0 and 2**63 - 1, not {self.seed}")
        if not 0.0 <= self.min_p <= 1.0:
            raise JobError(f"min_p: between 0 (all tokens) and 1, not {self.min_p}")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise JobError(
                f"repetition_penalty: between 0.01 and 100 (1: none), not {self.repetition_penalty}"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2.0 <= (value := getattr(self, name)) <= 2.0:
                raise JobError(f"{name}: between -2 and 2 (0: none), not {value}")
        if len(self.logit_bias) > MAX_BIASES:
            raise JobError(f"logit_bias: at most {MAX_BIASES} tokens, not {len(self.logit_bias)}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise JobError("logit_bias: each token once")
        for token, bias in self.logit_bias:
            if not 0 <= token < 2**63 or not -100.0 <= bias <= 100.0:
                raise JobError(
                    f"logit_bias: token ids, and between -100 and 100 for each, not {token}={bias}"
                )

    @property
    def penalises(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def newer(self) -> dict[str, Any]:
        """The header fields that older releases do not know, where they are set."""
        fields = {name: getattr(self, name) for name, unset in _NEWER.items() if getattr(self, name) != unset}
        if self.logit_bias:
            fields["logit_bias"] = [list(entry) for entry in self.logit_bias]
        return fields

    def to_header(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            **self.newer,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Sampling:
        return cls(
            temperature=number(header, "temperature", 0.0),
            top_k=whole(header, "top_k", 0),
            top_p=number(header, "top_p", 1.0),
            seed=whole(header, "seed", 0),
            **{name: number(header, name, unset) for name, unset in _NEWER.items()},
            logit_bias=pairs(header, "logit_bias", MAX_BIASES),
        )


GREEDY = Sampling()


def check_biases(sampling: Sampling, vocabulary: int) -> None:
    """JobError in one line where `logit_bias` names a token that the model does not have."""
    for token, _ in sampling.logit_bias:
        if token >= vocabulary:
            raise JobError(f"logit_bias: this model's tokens are 0 to {vocabulary - 1}, not {token}")
