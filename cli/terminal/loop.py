"""One event loop a command: uvloop where there is one, and stop requests that let `async with` blocks end in order.

A command whose main thread reads from the terminal has it in a thread of its own (`LoopThread`)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, Generic, Self, TextIO, TypeVar

from fusion.cli.terminal import errors
from fusion.cli.terminal.logs import configure_logging

T = TypeVar("T")
log = logging.getLogger(__name__)

PARENT_POLL_SECONDS = 0.5
_LOOK_SECONDS = 0.2  # for signals: one that comes just before Python begins to wait does not end the wait
# A peer with nothing to hand over that was asked to stop is gone in 5 s, whatever blocks it.
STOP_BUDGET_SECONDS = 4.8
THREAD_SECONDS = 2.0


def run(main: Coroutine[Any, Any, T], *, debug: bool = False) -> T:
    """Run `main` to its end. The first Ctrl-C cancels it and raises KeyboardInterrupt once it has ended; what it had a thread
    compute, for which nobody waits any more, keeps the process for THREAD_SECONDS at most."""
    configure_logging(debug)
    runner = asyncio.Runner(loop_factory=_new_loop)
    deadline = threading.Timer(THREAD_SECONDS, _leave, (sys.stderr,))
    deadline.daemon = True
    try:
        return runner.run(main)
    except KeyboardInterrupt:
        deadline.start()
        raise
    finally:
        runner.close()  # waits for threads
        deadline.cancel()


def run_until_stopped(
    main: Coroutine[Any, Any, None],
    *,
    parent: int | None = None,
    debug: bool = False,
    extra_seconds: Callable[[], float] = lambda: 0.0,
) -> None:
    """Run `main` until it ends or is asked to stop: by SIGINT, SIGTERM, a terminal that is closed, or the end of the process
    `parent`, which started us. It is then cancelled and has STOP_BUDGET_SECONDS, and what `extra_seconds` says at that moment, to hand
    over and close; a second signal, or the end of that time, ends the process at once."""
    configure_logging(debug)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_until_stopped(main, parent, extra_seconds))


def _leave(stderr: TextIO) -> None:
    sys.stderr = stderr  # the thread that is left behind may have it elsewhere, as capturing a model does
    os._exit(errors.report(KeyboardInterrupt(), debug=False))


def _give_up(seconds: float) -> None:
    # Not through sys.stderr: the thread that is blocked may hold it.
    with suppress(OSError):
        os.write(2, f"fusion-peer: it did not close in {seconds:.1f} s, and was ended at once\n".encode())
    os._exit(errors.FAILED)


class LoopThread:
    """An event loop beside the main thread, as long as the block lasts: it goes on while that waits for the user."""

    def __init__(self, *, debug: bool = False) -> None:
        configure_logging(debug)
        self._thread = threading.Thread(target=self._main, name="loop")
        self._running: futures.Future[asyncio.AbstractEventLoop] = futures.Future()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._loop = self._running.result()
        except BaseException:  # Ctrl-C: nobody would end the thread, and Python waits for it
            self._running.add_done_callback(self._end)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._running)
        self._thread.join()

    def _end(self, running: futures.Future[asyncio.AbstractEventLoop]) -> None:
        running.result().call_soon_threadsafe(self._ending.set)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there. Whatever interrupts the wait for it (Ctrl-C) cancels it, and is raised once it has ended."""
        ended: futures.Future[T] = futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _hand_on(task, ended))

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it was begun
                work.close()
                ended.set_exception(asyncio.CancelledError())

        try:
            self._loop.call_soon_threadsafe(start)
            while not futures.wait([ended], _LOOK_SECONDS).done:
                pass
        except BaseException:
            self._loop.call_soon_threadsafe(stop)
            futures.wait([ended])
            raise
        return ended.result()

    @contextmanager
    def opened(self, resource: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """`async with resource` there: one task opens and closes it."""
        held = self.run(_Held.open(resource))
        try:
            yield held.resource
        finally:
            self.run(held.close())

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(self._until_ending())

    async def _until_ending(self) -> None:
        self._ending = asyncio.Event()
        self._running.set_result(asyncio.get_running_loop())
        await self._ending.wait()


class _Held(Generic[T]):
    """A resource that a task of its own has opened and will close."""

    def __init__(self, resource: T, closing: asyncio.Event, task: asyncio.Task[None]) -> None:
        self.resource = resource
        self._closing = closing
        self._task = task

    @classmethod
    async def open(cls, opening: AbstractAsyncContextManager[T]) -> _Held[T]:
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        closing = asyncio.Event()

        async def hold() -> None:
            async with opening as resource:
                found.set_result(resource)
                await closing.wait()

        task = asyncio.create_task(hold())
        try:
            await asyncio.wait((found, task), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        if task.done():
            await task
        return cls(found.result(), closing, task)

    async def close(self) -> None:
        self._closing.set()
        await self._task


def _hand_on(task: asyncio.Task[T], ended: futures.Future[T]) -> None:
    if task.cancelled():
        ended.set_exception(asyncio.CancelledError())  # `futures.wait` does not end with a `cancel`
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


async def _until_stopped(
    main: Coroutine[Any, Any, None], parent: int | None, extra_seconds: Callable[[], float]
) -> None:
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(main)
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            os._exit(130)
        asked = True
        # A thread, because what blocks may be the loop itself or the wait for other threads after it.
        seconds = STOP_BUDGET_SECONDS + extra_seconds()
        deadline = threading.Timer(seconds, _give_up, (seconds,))
        deadline.daemon = True
        deadline.start()
        if not loop.is_closed():
            loop.call_soon_threadsafe(work.cancel)

    def hang_up() -> None:
        if not asked:  # shell and kernel may both say that the terminal is gone: it asks for no haste
            stop()

    _on_signal(loop, signal.SIGINT, stop)
    _on_signal(loop, signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` leaves it
        _on_signal(loop, signal.SIGHUP, hang_up)
    watcher = asyncio.ensure_future(wait_until_orphaned(parent)) if parent is not None else None
    if watcher is not None:
        watcher.add_done_callback(lambda ended: None if ended.cancelled() or asked else stop())
    try:
        try:
            await work
        except asyncio.CancelledError:
            if not asked:
                raise RuntimeError("it was cancelled from within") from None
    finally:
        if watcher is not None:
            watcher.cancel()


def _on_signal(loop: asyncio.AbstractEventLoop, number: signal.Signals, ask: Callable[[], None]) -> None:
    """Have `ask` called in the main thread, between two bytecodes of whatever it runs."""
    # The loop calls handlers of its own only once it runs again, but with one it is woken by the signal.
    loop.add_signal_handler(number, lambda: None)
    signal.signal(number, lambda number, frame: ask())


async def wait_until_orphaned(parent: int) -> None:
    """Until the process `parent`, which started us, is gone."""
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_POLL_SECONDS)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # Windows has none
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    loop.set_exception_handler(_log_in_one_line)
    return loop


def _log_in_one_line(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What nobody awaited, such as a library's own task that p2pd's end broke: a line, no traceback."""
    error = context.get("exception")
    log.debug("%s: %r", context.get("message", "in the event loop"), error, exc_info=error)
