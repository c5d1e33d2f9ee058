"""One answer as a user sees it: its tokens, and when each came. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Timed:
    """Seconds of one clock."""

    began: float
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    def add(self, token: int, now: float) -> None:
        self.tokens.append(token)
        self.at.append(now)

    @property
    def first_seconds(self) -> float:
        """From the question to the first token."""
        return self.at[0] - self.began

    @property
    def token_seconds(self) -> float:
        """Of each token after the first, on average: guesses that hold come several at once."""
        return (self.at[-1] - self.at[0]) / (len(self.at) - 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not pass; ValueError for none."""
    if not values:
        raise ValueError("percentile: of at least one value")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
