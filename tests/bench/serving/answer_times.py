"""One answer as a user sees it: its tokens, and when each arrived. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Timed:
    """The times of one answer, in seconds of one clock."""

    began: float
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    def add(self, token: int, now: float) -> None:
        self.tokens.append(token)
        self.at.append(now)

    @property
    def first_seconds(self) -> float:
        """The seconds from the request to the first token."""
        return self.at[0] - self.began

    @property
    def token_seconds(self) -> float:
        """The average seconds between tokens after the first; accepted guesses arrive several at once."""
        return (self.at[-1] - self.at[0]) / (len(self.at) - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of `share` of all values does not exceed. ValueError without values."""
    if not values:
        raise ValueError("percentile: of at least one value")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
