"""Long loops that let others run: what strangers say may be hundreds of keys, or thousands of records, and a loop that is held up
renews no lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def yielding(items: Iterable[Item], every: int) -> AsyncIterator[Item]:
    """One after the other; the event loop runs whatever else is ready after so many of them."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % every == 0:
            await asyncio.sleep(0)
