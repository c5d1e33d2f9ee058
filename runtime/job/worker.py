"""The thread that runs torch work of one device, so that only short calls (`submit_short`) block the asyncio loop.

Calls run one at a time: those of one job in the order in which they were made, those of several jobs by fair queueing
(`fusion.runtime.device.share`). A long call yields between two operators (`rest`): calls of other jobs may then run before it
goes on, in another thread. Cancelling an awaiting task does not stop a call that has begun; a call that has not begun is
dropped.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cache, partial
from threading import Condition, Lock, Thread, get_native_id, local
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch

from fusion.runtime.device.lost_device import DeviceLost, is_device_error
from fusion.runtime.device.share import NOBODY, Caller, DeviceShare, Waiting
from fusion.swarm.printable import error_line

SLICE_SECONDS = 0.01  # for which a call runs before it may yield
IDLE_THREADS = 4  # kept for calls that run while others have yielded
NICE = 5  # added to the process's nice value for a thread that computes

P = ParamSpec("P")
T = TypeVar("T")

_here = local()


def rest() -> bool:
    """Yield between two operators of a call, in the thread that runs it: calls of other jobs run now, if it is their turn. Whether
    the slice was over. Does nothing in other threads."""
    here: Callable[[], bool] | None = getattr(_here, "rest", None)
    return here is not None and here()


@dataclass(frozen=True, eq=False)
class _Call:
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[Any]  # of the loop's own thread


class Worker:
    """A thread that computes on `device` ("cpu", "cuda", "cuda:1") with `threads` threads inside an operator. `clock`: monotonic seconds, by
    which jobs share the device.

    ValueError for a thread count below one, or a device that this machine does not have.
    """

    def __init__(
        self, threads: int = 1, device: str = "cpu", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads: at least 1, not {threads}")
        self.device = checked_device(device)
        self._caller = NOBODY
        self._queue = _Queue(f"fusion-{device}", lambda: _prepare(threads, torch.device(device)), clock)
        self._loss = _Loss()

    def of(self, caller: Caller) -> Self:
        """The same thread, for the calls of one job."""
        worker = copy(self)
        worker._caller = caller
        return worker

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args, **kwargs)` in the worker thread; its exception is raised here. RuntimeError once it is closed."""
        return await self.result(self.submit(function, *args, **kwargs))

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As `run`, without waiting: `result` awaits its result. RuntimeError once it is closed."""
        call = self._call(partial(function, *args, **kwargs))
        self._queue.submit(self._caller, call)
        return call.outcome

    def submit_short(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """As `submit`, for a call of less than SLICE_SECONDS: it has run in the event loop's own thread when this returns, if the
        device is free for it. To hand a call over and back takes some hundred microseconds, above all to wake the threads up."""
        call = self._call(function)
        self._queue.submit(self._caller, call, here=self.device == "cpu")
        return call.outcome

    def _call(self, function: Callable[[], T]) -> _Call:
        # A ThreadPoolExecutor and its futures take three times as long to hand a call over and back, for every hop of a token.
        loop = asyncio.get_running_loop()
        return _Call(function, loop, loop.create_future())

    async def result(self, outcome: asyncio.Future[T]) -> T:
        """Of a call that was submitted; its exception is raised here."""
        try:
            return await outcome
        except RuntimeError as error:
            self.doubt(error)
            raise
        finally:
            del outcome  # an error that it holds would hold it

    def doubt(self, error: BaseException) -> None:
        """Probe whether the device still computes, if `error`, raised by a call on it, may be a device error. `result` does so with
        what it raises."""
        loss = self._loss
        if is_device_error(error) and not self.is_lost and (loss.looking is None or loss.looking.done()):
            loss.looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            await self.of(NOBODY).run(probe, torch.device(self.device))
        except RuntimeError as error:
            if is_device_error(error):
                line = f'the device "{self.device}" computes no more ({error_line(error)}); start this peer again'
                self._loss.error = DeviceLost(line)
                self._loss.known.set()

    @property
    def is_lost(self) -> bool:
        """Whether the device computes no more, for as long as this process lives."""
        return self._loss.error is not None

    async def lost(self) -> DeviceLost:
        """Wait until it computes no more; gives the error."""
        await self._loss.known.wait()
        assert self._loss.error is not None, "it was set before"
        return self._loss.error

    def between_parts(self, look: Callable[[], None]) -> None:
        """From now on `look()` is called in the thread that computes, after each slice of a call."""
        self._queue.look = look

    async def aclose(self) -> None:
        """Drop the calls that have not begun and wait for the others. Idempotent."""
        await self._queue.aclose()
        if self._loss.looking is not None:
            self._loss.looking.cancel()
            await asyncio.wait([self._loss.looking])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


@dataclass(eq=False)
class _Loss:
    """Whether the device is lost, shared by all copies of its worker (`of`)."""

    known: asyncio.Event = field(default_factory=asyncio.Event)
    error: DeviceLost | None = None
    looking: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _Thread:
    """A thread of the device's. One of them has the device, the others wait for it."""

    turn: Condition
    next: tuple[Waiting, _Call] | None = None  # to run next


class _Queue:
    """The calls that wait for a device, which one thread has at a time. When the device is free, the thread that had it last
    chooses the next call. There is one thread, and one more for each call that has yielded, which keeps its own until it ends."""

    def __init__(self, name: str, prepare: Callable[[], None], clock: Callable[[], float]) -> None:
        self._name = name
        self._prepare = prepare
        self._clock = clock
        self._lock = Lock()
        self._changed = Condition(self._lock)  # for the thread that has the device
        self._share = DeviceShare(clock)
        self._calls: dict[int, tuple[Waiting, _Call]] = {}  # in order, by id of the first
        self._resting: dict[int, tuple[Waiting, _Thread]] = {}  # calls that have begun and yielded, the same
        self._holder: _Thread | None = None
        self._idle: list[_Thread] = []
        self._threads: list[Thread] = []
        self._closed = False
        self._caller, self._began = NOBODY, 0.0  # of the call that runs; since when, without a yield
        self._prepare_here = cache(prepare)  # of the event loop's thread
        self.look: Callable[[], None] = lambda: None

    def submit(self, caller: Caller, call: _Call, *, here: bool = False) -> None:
        """`here`: run the call in this thread before this returns, if the device is idle, no call waits and it is not held free for
        another job."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker is closed")
            free = not self._calls and not self._resting and self._share.idle
            waiting = self._share.arrives(caller)
            here = here and free and self._share.choose([waiting]) is waiting
            if here:
                self._begins(waiting, [])
            else:
                self._calls[id(waiting)] = waiting, call
                self._changed.notify()
                if self._holder is None:
                    self._holder = self._new_thread()
        if here:
            _settle(call, self._prepare_here)()
            self._ended()
        del call  # as in `_do`

    async def aclose(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            dropped, self._calls = list(self._calls.values()), {}
            self._changed.notify()
            for thread in self._idle:
                thread.turn.notify()
        for _, call in dropped:
            call.outcome.cancel()
        while self._threads:
            await asyncio.to_thread(self._threads.pop().join)

    # --- the threads

    def rest(self, thread: _Thread) -> bool:
        """Yield in a call, between two operators, to calls whose turn it is. False, at once, before SLICE_SECONDS."""
        if self._clock() - self._began < SLICE_SECONDS:
            return False
        self.look()
        with self._lock:
            waiting = self._share.yields(self._caller, self._clock() - self._began)
            self._resting[id(waiting)] = waiting, thread
            self._schedule(thread)
            while self._holder is not thread:
                thread.turn.wait()
        return True

    def _work(self, thread: _Thread) -> None:
        _lower_priority()
        prepare = cache(self._prepare)  # in the first call, which raises what is wrong with the device
        _here.rest = partial(self.rest, thread)
        while (chosen := self._next(thread)) is not None:
            _do(chosen[1], prepare, self._ended)
            del chosen  # or what it holds would stay until the next one
            if self._clock() - self._began >= SLICE_SECONDS:
                self.look()

    def _begins(self, call: Waiting, waiting: Sequence[Waiting]) -> None:
        self._share.begins(call, waiting)
        self._caller, self._began = call.caller, self._clock()

    def _ended(self) -> None:
        with self._lock:
            self._share.ends(self._caller, self._clock() - self._began)
            self._changed.notify()  # for calls that were submitted while it ran in the event loop's thread

    def _next(self, thread: _Thread) -> tuple[Waiting, _Call] | None:
        """The call that this thread runs now; None where the thread is to end."""
        with self._lock:
            if self._holder is thread and thread.next is None and not self._schedule(thread):
                return None
            if self._holder is not thread:
                if len(self._idle) >= IDLE_THREADS:
                    return None
                self._idle.append(thread)
                while thread.next is None and not self._closed:
                    thread.turn.wait()
            chosen, thread.next = thread.next, None
            return chosen

    def _schedule(self, thread: _Thread) -> bool:
        """Choose the call that runs now, and give its thread the device, which `thread` has. False once the queue is closed and
        empty."""
        while True:
            self._calls = {key: each for key, each in self._calls.items() if not each[1].outcome.cancelled()}
            waiting = [each for each, _ in (*self._resting.values(), *self._calls.values())]
            if not waiting and self._closed:
                return False
            choice = self._share.choose(waiting) if waiting and self._share.idle else None
            if isinstance(choice, Waiting):
                break
            self._changed.wait(choice)
        self._begins(choice, [each for each in waiting if each is not choice])
        if (resting := self._resting.pop(id(choice), None)) is not None:
            self._holder = resting[1]
        else:
            if any(thread is other for _, other in self._resting.values()):
                thread = self._idle.pop() if self._idle else self._new_thread()
            thread.next = self._calls.pop(id(choice))
            self._holder = thread
        self._holder.turn.notify()
        return True

    def _new_thread(self) -> _Thread:
        thread = _Thread(Condition(self._lock))
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(Thread(target=self._work, args=(thread,), name=self._name, daemon=True))
        self._threads[-1].start()
        return thread


def _lower_priority() -> None:
    """Below the event loop and libp2p's daemon, which need a core for some hundred microseconds at a time, and whose messages other
    peers wait for. On Linux only, where each thread has a priority of its own, which those that it starts inherit."""
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, get_native_id())
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), own + NICE)  # the kernel caps it at 19


def _do(call: _Call, prepare: Callable[[], None], ended: Callable[[], None]) -> None:
    settle = _settle(call, prepare)
    with suppress(RuntimeError):  # the loop is closed
        call.loop.call_soon_threadsafe(settle)
    ended()  # while the loop wakes up
    del call, settle  # an error's traceback holds this frame, which would hold the error


def _settle(call: _Call, prepare: Callable[[], None]) -> Callable[[], None]:
    """Run the call. Gives a function for the loop's thread that sets its outcome."""
    try:
        prepare()
        return partial(_give, call.outcome, call.function())
    except BaseException as error:  # awaiting the call raises it
        return partial(_fail, call.outcome, error)
    finally:
        del call


def _give(outcome: asyncio.Future[Any], value: object) -> None:
    if not outcome.done():  # it is, where its waiter was cancelled
        outcome.set_result(value)


def _fail(outcome: asyncio.Future[Any], error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)


def _prepare(threads: int, device: torch.device) -> None:
    """Run in the worker thread: the thread count of an operator, and the GPU that kernels run on, belong to the thread that calls."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        # The same numbers as on a CPU, to float32's precision, and the same from run to run.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)


def probe(device: torch.device) -> None:
    """In the worker's thread: a tiny computation, which raises what every other one would."""
    float(torch.ones(2, device=device).sum())
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
