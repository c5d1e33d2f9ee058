"""Measures how long a loop is blocked, in calls of a function: no clock is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any


class Calls:
    """`most` is the largest number of calls of the `counted` functions between two turns of another task."""

    def __init__(self) -> None:
        self.most = 0
        self._since = 0

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._since += 1
            return function(*args)

        return call

    @asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        others = asyncio.create_task(self._others())
        try:
            yield
        finally:
            others.cancel()

    async def _others(self) -> None:
        while True:
            self.most, self._since = max(self.most, self._since), 0
            await asyncio.sleep(0)
