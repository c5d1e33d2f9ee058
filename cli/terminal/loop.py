"""One event loop a command: uvloop where there is one, and stop requests that let `async with` blocks end in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fusion.cli.terminal.logs import configure_logging

T = TypeVar("T")
log = logging.getLogger(__name__)

PARENT_POLL_SECONDS = 0.5
STOP_BUDGET_SECONDS = (
    4.8  # a peer with nothing to hand over that was asked to stop is gone in 5 s, whatever blocks it
)


def run(main: Coroutine[Any, Any, T], *, debug: bool = False) -> T:
    """Run `main` to its end. The first Ctrl-C cancels it and raises KeyboardInterrupt once it has ended."""
    configure_logging(debug)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(main)


def run_until_stopped(
    main: Coroutine[Any, Any, None],
    *,
    parent: int | None = None,
    debug: bool = False,
    extra_seconds: Callable[[], float] = lambda: 0.0,
) -> None:
    """Run `main` until it ends or is asked to stop: by SIGINT, SIGTERM, or the end of the process `parent`, which
    started us. It is then cancelled and has STOP_BUDGET_SECONDS, and what `extra_seconds` says at that moment, to hand
    over and close; a second signal, or the end of that time, ends the process at once."""
    configure_logging(debug)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_until_stopped(main, parent, extra_seconds))


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
        deadline = threading.Timer(STOP_BUDGET_SECONDS + extra_seconds(), os._exit, (1,))
        deadline.daemon = True
        deadline.start()
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
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
    loop.set_exception_handler(_tell_in_one_line)
    return loop


def _tell_in_one_line(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What nobody awaited, such as a library's own task that p2pd's end broke: a line, no traceback."""
    error = context.get("exception")
    log.debug("%s: %r", context.get("message", "in the event loop"), error, exc_info=error)
