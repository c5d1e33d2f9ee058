"""An asyncio loop whose time jumps to the next timer, and on which every simulated process has a lane of its own.

A lane stands for one process's event loop: its callbacks run in the order in which they were scheduled. The world's seed
decides which lane runs next. A callback belongs to the lane that its context names, so a task stays in the lane that
created it. A frozen lane keeps its callbacks for later (SIGSTOP). A dead one never runs them, not even `finally` blocks
(SIGKILL).
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import inspect
import random
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from fusion.swarm.clock import Clock

EPOCH_SECONDS = 1_700_000_000.0  # unix time when a world begins

_lane: contextvars.ContextVar[Lane] = contextvars.ContextVar("lane")
_running: VirtualLoop | None = None


class Lane:
    """The callbacks of one simulated process."""

    __slots__ = ("context", "dead", "frozen", "listed", "name", "queue")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Handle] = deque()
        self.frozen = False
        self.dead = False
        self.listed = False  # in the loop's list of runnable lanes
        self.context = contextvars.Context()
        self.context.run(_lane.set, self)


class Handle:
    """A callback that is scheduled: what `call_soon` and `call_at` return."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_when", "lane")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        when: float = 0.0,
    ):
        self._callback: Callable[..., Any] | None = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._when = when
        self.lane = context.get(_lane)

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = None, ()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is its sequence number, so that sets of tasks have the same order in every run of a seed."""

    def __hash__(self) -> int:
        return self._age  # type: ignore[no-any-return]


class _Future(asyncio.Future):  # type: ignore[type-arg]
    def __hash__(self) -> int:
        return self._age  # type: ignore[no-any-return]


def settle(future: asyncio.Future[Any], func: Callable[..., Any], *args: Any) -> None:
    """Call `func(*args)` and set the future's result or exception, unless the future is done already."""
    try:
        result = func(*args)
    except BaseException as error:
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop of one world, used once. `run(until)` runs callbacks until `until()` is true or time is over."""

    def __init__(self, rng: random.Random, unhandled: Callable[[Lane | None, str], None]) -> None:
        self.now = 0.0
        self.turns = 0
        self._rng = rng
        self._unhandled = unhandled
        self._timers: list[tuple[float, int, Handle]] = []
        self._sequence = 0
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._runnable: list[Lane] = []
        self._closed = False
        self.world = Lane("world")

    # --- the loop's interface for asyncio

    def time(self) -> float:
        return self.now

    @property
    def clock(self) -> Clock:
        """The clock of every simulated peer."""
        return Clock(self.time, lambda: self.now + EPOCH_SECONDS)

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        handle = Handle(callback, args, context if context is not None else contextvars.copy_context())
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        handle = Handle(callback, args, context if context is not None else contextvars.copy_context(), when)
        self._sequence += 1
        heapq.heappush(self._timers, (when, self._sequence, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        self._sequence += 1
        future._age = self._sequence  # type: ignore[attr-defined]
        return future

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        self._sequence += 1
        task = _new_task(self._sequence, coro, self, name, context)
        task._log_destroy_pending = False
        self._tasks.add(task)
        if self._closed:
            coro.close()  # it would never begin
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `func` up to 2 ms later, like a thread: also if nobody waits for the result any more."""
        future = self.create_future()
        self.call_later(self._rng.random() * 0.002, settle, future, func, *args)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return _running is self

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._closed:
            return
        error = context.get("exception")
        lane = contextvars.copy_context().get(_lane)
        self._unhandled(lane, f"{context.get('message')}: {error!r}")

    # --- running

    def _enqueue(self, handle: Handle) -> None:
        lane = handle.lane
        if lane is None or self._closed:
            return
        lane.queue.append(handle)
        if not lane.listed and not lane.frozen and not lane.dead:
            lane.listed = True
            self._runnable.append(lane)

    def freeze(self, lane: Lane) -> None:
        if not lane.frozen and not lane.dead:
            lane.frozen = True
            self._unlist(lane)

    def thaw(self, lane: Lane) -> None:
        if lane.frozen and not lane.dead:
            lane.frozen = False
            if lane.queue:
                lane.listed = True
                self._runnable.append(lane)

    def kill(self, lane: Lane) -> None:
        # The callbacks are kept but not run: without a reference a task would be closed, and its `finally` blocks
        # would run.
        lane.dead = True
        self._unlist(lane)

    def _unlist(self, lane: Lane) -> None:
        if lane.listed:
            lane.listed = False
            self._runnable.remove(lane)

    def run(self, until: Callable[[], bool], limit_seconds: float) -> bool:
        """Whether `until()` came true before `limit_seconds` of virtual time had passed."""
        global _running
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        _running = self
        runnable, timers, draw = self._runnable, self._timers, self._rng.random
        try:
            while not until():
                while timers and timers[0][0] <= self.now:
                    handle = heapq.heappop(timers)[2]
                    if not handle._cancelled:
                        self._enqueue(handle)
                if not runnable:
                    if not timers or timers[0][0] > limit_seconds:
                        return False
                    self.now = max(self.now, timers[0][0])
                    continue
                at = int(draw() * len(runnable)) if len(runnable) > 1 else 0
                lane = runnable[at]
                queue = lane.queue
                self.turns += 1
                for _ in range(len(queue)):
                    handle = queue.popleft()
                    if handle._callback is not None:
                        handle._context.run(handle._callback, *handle._args)
                    if lane.dead:
                        break
                if not queue:
                    self._unlist(lane)
            return True
        finally:
            _running = None
            asyncio._set_running_loop(before)

    def close(self) -> None:
        """Drop all timers, callbacks and tasks, so that nothing is left when the next world begins."""
        self._closed = True
        self._timers.clear()
        self._runnable.clear()
        for task in list(self._tasks):
            coroutine = task.get_coro()
            if (
                inspect.iscoroutine(coroutine)
                and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
            ):
                coroutine.close()  # its process ended before it began
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)  # a closed loop drops what `finally` blocks schedule
        try:
            gc.collect()
        finally:
            asyncio._set_running_loop(before)


def _new_task(age: int, coro: Any, loop: VirtualLoop, name: Any, context: Any) -> Any:
    task = _Task.__new__(_Task)
    task._age = age
    task.__init__(coro, loop=loop, name=name, context=context)  # type: ignore[misc]
    return task


def lane_now() -> Lane:
    return _lane.get()


def cpu_seconds() -> float:
    """Processor time of this process, which the world's clock does not affect."""
    return time.process_time()


def wall_seconds() -> float:
    return time.perf_counter()
