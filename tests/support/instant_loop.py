"""Runs a coroutine on a loop whose clock jumps to the next timer when the loop is idle: waiting takes no time.

Calls for the loop's threads run at once. For code that does its I/O in memory.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

LONGEST_SECONDS = 3600.0  # without anything to do: the test hangs


class _Jump(selectors.DefaultSelector):
    """Moves the clock to the next timer instead of sleeping until then."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None or timeout > LONGEST_SECONDS:
                raise RuntimeError("nothing is left to do, and the test has not ended")
            self.seconds += timeout
        return ready


class InstantLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(main)


async def settled() -> None:
    """Wait until the callbacks that are ready now have run, and those that they schedule."""
    for _ in range(10):
        await asyncio.sleep(0)
