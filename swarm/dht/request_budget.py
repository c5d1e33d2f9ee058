"""How much of us each of the others may use: a token bucket each.

Knows neither requests nor what they cost: costs are in tokens, about a tenth of a millisecond of our loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachetools import LRUCache


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    per_second: float = 300.0  # tokens: 3 % of a core
    burst: float = 6000.0  # a peer that has just come announces a thousand blobs
    accounts: int = 4096  # remembered; those that asked last

    def __post_init__(self) -> None:
        for name in ("per_second", "burst", "accounts"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


def refilled(left: float, seconds: float, config: BudgetConfig) -> float:
    """What is in a bucket `seconds` after `left` was."""
    return min(config.burst, left + max(0.0, seconds) * config.per_second)


class RequestBudget:
    """`spend` for each request, before anything is done for it; `charge` for what it turned out to cost beside that."""

    def __init__(
        self, config: BudgetConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config or BudgetConfig()
        self._clock = clock
        self._left: LRUCache[str, tuple[float, float]] = LRUCache(self._config.accounts)  # and when it was so

    def spend(self, account: str, tokens: float) -> bool:
        """Whether `account` can pay; if so, it has. What costs more than the burst never can be paid."""
        return spend_all([(self, account)], tokens)

    def charge(self, account: str, tokens: float) -> None:
        """For what is known only afterwards; `account` may be in debt, and pays nothing more until that is gone."""
        self._left[account] = (self._has(account) - tokens, self._clock())

    def _has(self, account: str) -> float:
        left, then = self._left.get(account, (self._config.burst, self._clock()))
        return refilled(left, self._clock() - then, self._config)


def spend_all(accounts: Sequence[tuple[RequestBudget, str]], tokens: float) -> bool:
    """Whether each of these accounts can pay; if so, they all have. Where one cannot, none is charged: who has nothing left
    would else use up, with requests that are refused, what it shares with others."""
    left = [budget._has(account) for budget, account in accounts]
    paid = all(tokens <= each for each in left)
    for (budget, account), each in zip(accounts, left, strict=True):
        budget._left[account] = (each - tokens if paid else each, budget._clock())
    return paid
