"""Text to token ids and back, by the tokenizers of models: not in the loop, as their files come from strangers and may be slow on
purpose."""

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
LONGEST_SECONDS = 30.0  # for one prompt, or the text of one token, and those that wait before it
OVERDUE = 12  # models whose calls take longer and hold up no other model's
REMEMBERED_MODELS = 1024

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """A few threads for all models, of which one model has one at a time. Of each holder one call waits for a model's turn, and its
    others behind that one: they hold up nobody else. A call cannot be stopped, and a regular expression may take a day: one that is
    overdue has no thread of these any more but one for itself, that others go before, and its model has no other call until it ends."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest_seconds = longest_seconds
        self._free = asyncio.Semaphore(THREADS)
        self._idle: list[_Thread] = []
        self._closed = False
        self._overdue: set[JobId] = set()
        self._turns: LRUCache[JobId, asyncio.Lock] = LRUCache(REMEMBERED_MODELS)
        self._lines: WeakValueDictionary[tuple[JobId, PeerId], asyncio.Lock] = WeakValueDictionary()

    async def run(
        self, model: JobId, holder: PeerId, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(*args, **kwargs)` for `holder`, or JobFailed where its turn and the call take too long together."""
        late = f"the model's tokenizer gave nothing for {self._longest_seconds:g} seconds"
        if model in self._overdue:
            raise JobFailed(late)
        line = self._lines.setdefault((model, holder), asyncio.Lock())
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
        """The turn ends with the call, also where nobody waits any more."""
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
        """Wait for nothing."""
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
        if (
            sys.platform == "linux" and self._thread.native_id is not None
        ):  # elsewhere threads have no priority of their own
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
