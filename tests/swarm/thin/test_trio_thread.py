"""The thread that trio has, seen from asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import trio

from fusion.swarm.thin.trio_thread import TrioThread


def test_a_call_that_is_given_up_leaves_nothing_to_put_away() -> None:
    async def main() -> None:
        thread, errors, unused = TrioThread(), list[dict[str, Any]](), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        await thread.start()
        try:
            waiting = asyncio.create_task(thread.call(trio.sleep_forever, unused=unused.append))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await thread.call(trio.sleep, 0.05)
        finally:
            await thread.aclose()
        assert unused == errors == []

    asyncio.run(main())


def test_whoever_waits_when_the_thread_ends_is_told() -> None:
    async def main() -> None:
        thread = TrioThread()
        await thread.start()
        waiting = asyncio.create_task(thread.call(trio.sleep_forever))
        await asyncio.sleep(0.05)
        await thread.aclose()
        async with asyncio.timeout(5.0):
            with pytest.raises(RuntimeError, match="has ended"):
                await waiting

    asyncio.run(main())
