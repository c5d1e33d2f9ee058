"""Which tokens end a completion, and from which index on, by vLLM's names. Pure; loads no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.errors import JobError

MAX_STOP_TOKENS = 64
WITH_ENDS = "+ends"  # suffix of the kind of a prompt with other ends than the model's


@dataclass(frozen=True, kw_only=True)
class Ends:
    """JobError names the field that is out of range."""

    ignore_eos: bool = False  # the model's end tokens do not end it
    # None of the first so many tokens ends the completion: end tokens are masked, and no stop string ends in them.
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end it as well, and are not part of the text

    def __post_init__(self) -> None:
        if not 0 <= self.min_tokens < 2**63:
            raise JobError(f"min_tokens: 0 or more, not {self.min_tokens}")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise JobError(
                f"stop_token_ids: at most {MAX_STOP_TOKENS} tokens, not {len(self.stop_token_ids)}"
            )
        if not all(0 <= token < 2**63 for token in self.stop_token_ids):
            raise JobError("stop_token_ids: token ids are 0 or more")

    def tokens(self, end_tokens: Collection[int]) -> frozenset[int]:
        """All tokens that end a completion of a model with these end tokens."""
        return frozenset((*self.stop_token_ids, *(() if self.ignore_eos else end_tokens)))

    def end_with(self, token: int, index: int, end_tokens: Collection[int]) -> bool:
        """Whether a completion ends with `token`, its number `index` from 0."""
        ends = token in self.stop_token_ids or (not self.ignore_eos and token in end_tokens)
        return ends and index >= self.min_tokens

    def check_vocabulary(self, vocabulary: int) -> None:
        """JobError in one line for a stop token outside of the vocabulary."""
        for token in self.stop_token_ids:
            if token >= vocabulary:
                raise JobError(f"stop_token_ids: this model's tokens are 0 to {vocabulary - 1}, not {token}")

    def to_header(self) -> dict[str, Any]:
        """Only the fields that are set: older releases know none of them."""
        return {
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"min_tokens": self.min_tokens} if self.min_tokens else {}),
            **({"stop_token_ids": list(self.stop_token_ids)} if self.stop_token_ids else {}),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Ends:
        least, ids = header.get("min_tokens", 0), header.get("stop_token_ids", [])
        if type(least) is not int:
            raise JobError(f"min_tokens: a whole number, not {type(least).__name__}")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise JobError("stop_token_ids: a list of token ids")
        return cls(ignore_eos=header.get("ignore_eos") is True, min_tokens=least, stop_token_ids=tuple(ids))


MODELS_OWN = Ends()  # the end tokens of the model, at any time
