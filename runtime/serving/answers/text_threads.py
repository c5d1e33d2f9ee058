"""Where the tokenizers of models run: not in the loop, as their files come from strangers and may be slow on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from cachetools import LRUCache

from fusion.runtime.job.errors import JobFailed
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

THREADS = 4
LONGEST_SECONDS = 30.0  # for one prompt, or the text of one token, and those that wait before it
REMEMBERED_MODELS = 1024

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """A few threads for all models, of which one model has one at a time. Of each holder one call waits for a model's turn, and its
    others behind that one: they hold up nobody else."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest_seconds = longest_seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fusion-text")
        self._turns: LRUCache[JobId, asyncio.Lock] = LRUCache(REMEMBERED_MODELS)
        self._lines: WeakValueDictionary[tuple[JobId, PeerId], asyncio.Lock] = WeakValueDictionary()

    async def run(
        self, model: JobId, holder: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(*args, **kwargs)` for `holder`, or JobFailed where its turn and the call take too long together."""
        line = self._lines.setdefault((model, holder), asyncio.Lock())
        try:
            async with asyncio.timeout(self._longest_seconds), line:
                turn: asyncio.Lock = self._turns.setdefault(model, asyncio.Lock())
                await turn.acquire()
                future = asyncio.wrap_future(self._pool.submit(function, *args, **kwargs))
                # A call cannot be stopped: the turn ends with it, also where nobody waits any more.
                future.add_done_callback(lambda _: turn.release())
                return await asyncio.shield(future)
        except TimeoutError:
            raise JobFailed(
                f"the model's tokenizer gave nothing for {self._longest_seconds:g} seconds"
            ) from None

    def close(self) -> None:
        """Wait for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
