"""Work that several callers request at the same time and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

R = TypeVar("R")


class SingleFlight:
    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[Any]] = {}

    async def once(self, key: Hashable, work: Callable[[], Awaitable[R]]) -> R:
        """The result of `work`, shared by all concurrent calls with the same key. The first caller runs it; if that one is cancelled,
        another runs it again."""
        while (running := self._running.get(key)) is not None:
            await asyncio.wait([running])
            if not running.cancelled():
                shared: R = running.result()
                return shared
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._running[key] = future
        try:
            result = await work()
            future.set_result(result)
            return result
        finally:
            del self._running[key]
            future.cancel()
