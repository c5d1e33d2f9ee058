"""Long loops that yield to the event loop: strangers may send hundreds of keys, or thousands of records, and a blocked event loop renews
no lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def yielding(items: Iterable[Item], every: int) -> AsyncIterator[Item]:
    """The items in order; yields to the event loop after `every` of them."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % every == 0:
            await asyncio.sleep(0)
