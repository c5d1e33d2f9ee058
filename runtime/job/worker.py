"""The one thread that runs torch work of one device, so that the asyncio loop never waits for arithmetic.

Calls run one at a time: those of one job in the order in which they were made, those of several by what each has had of
the device (`fusion.runtime.device.share`). Cancelling an awaiting task does not stop a call that has begun
(arithmetic cannot be interrupted); a call that has not begun is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch

from fusion.runtime.device.share import NOBODY, DeviceShare, Waiting, Whose

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Call:
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[Any]  # of the loop's own thread


class Worker:
    """A thread that computes on `device` ("cpu", "cuda", "cuda:1") with `threads` threads inside an operator.

    ValueError for a thread count below one, or a device that this machine does not have.
    """

    def __init__(self, threads: int = 1, device: str = "cpu") -> None:
        if threads < 1:
            raise ValueError(f"threads: at least 1, not {threads}")
        self.device = checked_device(device)
        self.threads = threads
        self._whose = NOBODY
        self._queue = _Queue(
            f"fusion-{device}", lambda: _prepare(threads, torch.device(device).type == "cuda")
        )

    def of(self, whose: Whose) -> Self:
        """The same thread, for the calls of one job."""
        worker = copy(self)
        worker._whose = whose
        return worker

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args, **kwargs)` in the worker thread; its exception is raised here. RuntimeError once it is closed."""
        # A ThreadPoolExecutor and its futures take three times as long to hand a call over and back, for every hop of a token.
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        self._queue.submit(self._whose, _Call(partial(function, *args, **kwargs), loop, outcome))
        try:
            return await outcome
        finally:
            del outcome  # an error that it holds would hold it

    @staticmethod
    def load_optimizers() -> None:
        """What torch loads with the first optimizer of a process: hundreds of modules, seconds in which nothing else would run
        on the device. For another thread."""
        import torch._dynamo  # noqa: F401

    async def aclose(self) -> None:
        """Drop what has not begun and wait for what has. Idempotent."""
        await self._queue.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class _Queue:
    """What waits for the one thread, which begins with the first call. Which call it runs is chosen when it is free."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._name = name
        self._prepare = prepare
        self._changed = Condition()
        self._share = DeviceShare(time.monotonic)
        self._calls: dict[int, tuple[Waiting, _Call]] = {}  # in order, by id of the first
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, whose: Whose, call: _Call) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("the worker is closed")
            waiting = self._share.arrives(whose)
            self._calls[id(waiting)] = waiting, call
            self._changed.notify()
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    async def aclose(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            dropped, self._calls = list(self._calls.values()), {}
            self._changed.notify()
        for _, call in dropped:
            call.outcome.cancel()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # --- the thread

    def _work(self) -> None:
        self._prepare()
        while (chosen := self._next()) is not None:
            waiting, call = chosen
            _do(call, partial(self._ended, waiting.whose, time.monotonic()))
            del chosen, waiting, call  # or what they hold would stay until the next one

    def _ended(self, whose: Whose, began: float) -> None:
        with self._changed:
            self._share.ends(whose, time.monotonic() - began)

    def _next(self) -> tuple[Waiting, _Call] | None:
        """The call to run now; None once the queue is closed."""
        with self._changed:
            while True:
                self._calls = {
                    key: each for key, each in self._calls.items() if not each[1].outcome.cancelled()
                }
                waiting = [each for each, _ in self._calls.values()]
                if not waiting:
                    if self._closed:
                        return None
                    self._changed.wait()
                    continue
                choice = self._share.choose(waiting)
                if isinstance(choice, float):
                    self._changed.wait(choice)
                    continue
                found = self._calls.pop(id(choice))
                self._share.begins(choice, [each for each in waiting if each is not choice])
                return found


def _do(call: _Call, ended: Callable[[], None]) -> None:
    try:
        settle = partial(_give, call.outcome, call.function())
    except BaseException as error:  # whoever waits for the call raises it
        settle = partial(_fail, call.outcome, error)
    ended()
    with suppress(RuntimeError):  # the loop is closed
        call.loop.call_soon_threadsafe(settle)
    del call, settle  # an error's traceback holds this frame, which would hold the error


def _give(outcome: asyncio.Future[Any], value: object) -> None:
    if not outcome.done():  # nobody waits for it any more
        outcome.set_result(value)


def _fail(outcome: asyncio.Future[Any], error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)


def _prepare(threads: int, cuda: bool) -> None:
    """Run in the worker thread: the thread count of an operator belongs to the thread that calls it."""
    torch.set_num_threads(threads)
    if cuda:
        # The same numbers as on a CPU, to float32's precision, and the same from run to run.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)


def checked_device(name: str) -> str:
    """`name`, if torch can compute on that device here; ValueError in one line otherwise."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f'device: "cpu", "cuda" or "cuda:<index>", not "{name}"') from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f'device: this machine has {count} CUDA devices; "{name}" is not one of them')
    elif device.type != "cpu":
        raise ValueError(f'device: "cpu", "cuda" or "cuda:<index>", not "{name}"')
    return name
