"""Tokenization and detokenization by the models' tokenizers, in threads: they come from strangers and may be slow on purpose."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from cachetools import LRUCache

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.requests.request import GenerateRequest, check_size
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

THREADS = 4
LONGEST_SECONDS = 30.0  # for one prompt or one token, including the queue
OVERDUE = 12  # models, at most, whose overdue calls are no longer counted
REMEMBERED_MODELS = 1024

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """A few threads for all models, one call of a model at a time. Each tenant has one call in a model's queue; its further calls wait
    behind that one and hold up no other tenant. A call cannot be cancelled, and a regular expression may take a day: an overdue call
    keeps its thread, at the lowest priority and no longer counted, and its model runs no other call until it ends."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest_seconds = longest_seconds
        self._free = asyncio.Semaphore(THREADS)
        self._idle: list[_Thread] = []
        self._closed = False
        self._overdue: set[JobId] = set()
        self._turns: LRUCache[JobId, asyncio.Lock] = LRUCache(REMEMBERED_MODELS)
        self._lines: WeakValueDictionary[tuple[JobId, PeerId], asyncio.Lock] = WeakValueDictionary()

    async def run(
        self, model: JobId, tenant: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(*args, **kwargs)` for the tenant; JobFailed where queue and call take too long together."""
        late = f"the model's tokenizer gave nothing for {self._longest_seconds:g} seconds"
        if model in self._overdue:
            raise JobFailed(late)
        line = self._lines.setdefault((model, tenant), asyncio.Lock())
        try:
            async with asyncio.timeout(self._longest_seconds), line:
                turn: asyncio.Lock = self._turns.setdefault(model, asyncio.Lock())
                await turn.acquire()
                try:
                    await self._free.acquire()
                except asyncio.CancelledError:
                    turn.release()
                    raise
                return await asyncio.shield(self._begin(model, turn, partial(function, *args, **kwargs)))
        except TimeoutError:
            raise JobFailed(late) from None

    def _begin(self, model: JobId, turn: asyncio.Lock, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call. The model's lock is released when it ends, even if nobody waits for it any more."""
        thread = self._idle.pop() if self._idle else _Thread()
        future: asyncio.Future[T] = asyncio.wrap_future(thread.submit(call))
        given_up = asyncio.get_running_loop().call_later(self._longest_seconds, self._give_up, model, thread)

        def ended(_: asyncio.Future[T]) -> None:
            given_up.cancel()
            turn.release()
            if thread.last:
                self._overdue.discard(model)
                return
            self._free.release()
            if self._closed:
                thread.end()
            else:
                self._idle.append(thread)

        future.add_done_callback(ended)
        return future

    def _give_up(self, model: JobId, thread: _Thread) -> None:
        if len(self._overdue) < OVERDUE:
            self._overdue.add(model)
            thread.let_go()
            self._free.release()

    def close(self) -> None:
        """Does not wait for calls that run."""
        self._closed = True
        while self._idle:
            self._idle.pop().end()


class _Thread:
    """Runs one call at a time. A daemon, unlike the threads of an executor: the process does not wait for a call that never ends."""

    def __init__(self) -> None:
        self.last = False  # the call that runs is its last one
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fusion-text", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def let_go(self) -> None:
        """End with the running call, at the lowest priority."""
        self.last = True
        self.end()
        # Elsewhere threads have no priority of their own
        if sys.platform == "linux" and self._thread.native_id is not None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._thread.native_id, 19)

    def end(self) -> None:
        """End once the queued calls have ended."""
        self._calls.put(None)

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            future, call = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # raised where the future is awaited
                future.set_exception(error)
            del given, future, call


class ModelTexts:
    """Texts of all models; calls share the threads fairly between tenants. Tokenizers run in a thread, byte-level models need none. All raise
    JobFailed where a tokenizer takes too long."""

    def __init__(self) -> None:
        # Separate threads: tokenizing a long prompt takes seconds, and detokenization must not wait for it.
        self._prompts, self._answers = TextThreads(), TextThreads()

    def close(self) -> None:
        """Does not wait for calls that run."""
        self._prompts.close()
        self._answers.close()

    def of_prompt(
        self, model: ServedModel, tenant: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """Run `function` on a whole prompt, or on a text as long."""
        return self._run(self._prompts, model, tenant, function, *args, **kwargs)

    def of_answer(
        self, model: ServedModel, tenant: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """Run `function` on a few tokens."""
        return self._run(self._answers, model, tenant, function, *args, **kwargs)

    async def encode(
        self, model: ServedModel, tenant: PeerId, text: str, *, plain: bool = True
    ) -> tuple[int, ...]:
        """As `Text.encode`, one text of a tenant at a time. JobError for a text that is too long for the model."""
        self.check(model, text)
        return tuple(await self.of_prompt(model, tenant, model.text.encode, text, plain=plain))

    def check(self, model: ServedModel, text: str) -> None:
        """JobError for a text that is too long for the model, however it is tokenized."""
        check_size(GenerateRequest(prompt=text), model.serve.longest_prompt)

    async def spell(self, model: ServedModel, tenant: PeerId, tokens: Sequence[int]) -> list[bytes]:
        """As `Text.spell`, for each token."""
        return await self.of_answer(model, tenant, lambda: [model.text.spell(token) for token in tokens])

    async def _run(
        self,
        threads: TextThreads,
        model: ServedModel,
        tenant: PeerId,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if model.manifest.tokenizer is None:
            return function(*args, **kwargs)
        return await threads.run(model.job, tenant, function, *args, **kwargs)
