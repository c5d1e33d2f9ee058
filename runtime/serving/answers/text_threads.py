"""Text to token ids and back, by the tokenizers of models: not in the loop, as their files come from strangers and may be slow on
purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from cachetools import LRUCache

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.requests.request import GenerateRequest, check_size
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


class ModelTexts:
    """For each `holder`, whose share of the threads it takes. A tokenizer from somebody else runs in a thread; bytes take no time. All
    raise JobFailed where a tokenizer takes too long."""

    def __init__(self) -> None:
        # Apart from each other: a prompt takes seconds where it is long, and the text of every answer would wait for it.
        self._prompts, self._answers = TextThreads(), TextThreads()

    def close(self) -> None:
        """Wait for nothing."""
        self._prompts.close()
        self._answers.close()

    def of_prompt(
        self, model: ServedModel, holder: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """What `function` makes of a whole prompt, or of as much text."""
        return self._run(self._prompts, model, holder, function, *args, **kwargs)

    def of_answer(
        self, model: ServedModel, holder: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """What `function` makes of a few tokens."""
        return self._run(self._answers, model, holder, function, *args, **kwargs)

    async def encode(
        self, model: ServedModel, holder: PeerId, text: str, *, plain: bool = True
    ) -> tuple[int, ...]:
        """As `Text.encode`, one text of a `holder` at a time. JobError for a text that the model cannot take."""
        self.check(model, text)
        return tuple(await self.of_prompt(model, holder, model.text.encode, text, plain=plain))

    def check(self, model: ServedModel, text: str) -> None:
        """JobError for a text that the model cannot take, whatever tokens are made of it."""
        check_size(GenerateRequest(prompt=text), model.serve.longest_prompt)

    async def spell(self, model: ServedModel, holder: PeerId, tokens: Sequence[int]) -> list[bytes]:
        """As `Text.spell`, for each of them."""
        return await self.of_answer(model, holder, lambda: [model.text.spell(token) for token in tokens])

    async def _run(
        self,
        threads: TextThreads,
        model: ServedModel,
        holder: PeerId,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if model.manifest.tokenizer is None:
            return function(*args, **kwargs)
        return await threads.run(model.job, holder, function, *args, **kwargs)
