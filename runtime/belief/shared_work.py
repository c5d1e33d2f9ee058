"""Work that many callers request and that is done once for all of them: strangers may request it as often as they like."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from fusion.swarm.cancelling import cancel_all

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


@dataclass(eq=False)
class _Shared(Generic[K, R]):
    key: K
    began: float
    task: asyncio.Task[R]
    waiters: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)  # once another may begin


class SharedWork(Generic[K, R]):
    """At most one run at a time for each key. Its result or failure also serves calls within `pause_seconds` after it. The work is
    a task of its own: if one of the callers ran it, a stranger that hangs up would cancel it for the others. `clock`: monotonic
    seconds."""

    def __init__(self, clock: Callable[[], float], pause_seconds: float) -> None:
        self._clock = clock
        self._pause_seconds = pause_seconds
        self._shared: dict[K, _Shared[K, R]] = {}

    async def aclose(self) -> None:
        await cancel_all(shared.task for shared in self._shared.values())

    async def get(self, key: K, work: Callable[[], Coroutine[Any, Any, R]], since: float = -math.inf) -> R:
        """The result of `work`, or of a run for the same key that began at `since` or later. Raises what the run raises."""
        while (shared := self._shared.get(key)) is not None and shared.began < since:
            await shared.over.wait()
        return await self._join(shared or self._begin(key, work()))

    def _begin(self, key: K, work: Coroutine[Any, Any, R]) -> _Shared[K, R]:
        task = asyncio.create_task(work)
        shared = self._shared[key] = _Shared(key, self._clock(), task)
        task.add_done_callback(partial(self._done, shared))
        return shared

    async def _join(self, shared: _Shared[K, R]) -> R:
        shared.waiters += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiters -= 1
            if not shared.waiters and not shared.task.done():
                shared.task.cancel()
                self._end(shared)

    def _done(self, shared: _Shared[K, R], task: asyncio.Task[R]) -> None:
        if task.cancelled():
            self._end(shared)
        else:
            task.exception()  # marks it as retrieved; each waiter gets it, too
            asyncio.get_running_loop().call_later(self._pause_seconds, self._end, shared)

    def _end(self, shared: _Shared[K, R]) -> None:
        if self._shared.get(shared.key) is shared:
            del self._shared[shared.key]
        shared.over.set()
