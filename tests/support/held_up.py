"""How long a loop is held up, in calls of what makes it so: no clock is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any


class Calls:
    """`most`: calls of what was `counted` between two turns of somebody else."""

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
