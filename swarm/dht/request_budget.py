"""A token bucket for each account: how much of our event loop others may use.

Knows neither requests nor their costs, which callers give in tokens, about a tenth of a millisecond of the loop each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachetools import LRUCache


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    per_second: float = 300.0  # tokens: 3 % of a core
    burst: float = 6000.0  # a new peer announces a thousand blobs
    accounts: int = 4096  # remembered, the last used

    def __post_init__(self) -> None:
        for name in ("per_second", "burst", "accounts"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


def refilled(left: float, seconds: float, config: BudgetConfig) -> float:
    """The tokens in a bucket `seconds` after there were `left`."""
    return min(config.burst, left + max(0.0, seconds) * config.per_second)


class RequestBudget:
    """`spend` for each request, before any work on it; `charge` afterwards for what it cost beyond that."""

    def __init__(
        self, config: BudgetConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config or BudgetConfig()
        self._clock = clock
        self._left: LRUCache[str, tuple[float, float]] = LRUCache(self._config.accounts)  # tokens, and when

    def spend(self, account: str, tokens: float) -> bool:
        """Take tokens if `account` has them; whether it did. More than the burst can never be paid."""
        return spend_all([(self, account)], tokens)

    def charge(self, account: str, tokens: float) -> None:
        """Take tokens afterwards. `account` may go into debt, and cannot spend until that is refilled."""
        self._left[account] = (self._has(account) - tokens, self._clock())

    def _has(self, account: str) -> float:
        left, then = self._left.get(account, (self._config.burst, self._clock()))
        return refilled(left, self._clock() - then, self._config)


def spend_all(accounts: Sequence[tuple[RequestBudget, str]], tokens: float) -> bool:
    """Take tokens from each of these accounts if all have them; whether it did. All or none: a peer without tokens must not use up,
    by refused requests, those of the network that it shares with others."""
    left = [budget._has(account) for budget, account in accounts]
    paid = all(tokens <= each for each in left)
    for (budget, account), each in zip(accounts, left, strict=True):
        budget._left[account] = (each - tokens if paid else each, budget._clock())
    return paid
