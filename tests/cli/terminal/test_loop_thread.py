"""A loop beside the main thread: results, errors, interruptions and resources come out as if it ran here."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from fusion.cli.terminal.loop import LoopThread


async def where() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()


async def failing() -> None:
    raise ValueError("why")


def test_work_runs_there_and_its_outcome_comes_here() -> None:
    with LoopThread() as loop:
        thread = loop.run(where())
        assert thread is not threading.current_thread() and thread is loop.run(where())
        with pytest.raises(ValueError, match="why"):
            loop.run(failing())
    assert not thread.is_alive()


def test_an_interruption_of_its_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would wait for it, and the user for Python."""
    loop = LoopThread()
    result, interrupted = loop._running.result, False

    def interrupt_once(timeout: float | None = None) -> asyncio.AbstractEventLoop:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt
        return result(timeout)

    monkeypatch.setattr(loop._running, "result", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        loop.__enter__()
    loop._thread.join(30)
    assert not loop._thread.is_alive()


def to_the_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # which the main thread takes, and ends its wait for


def missed_by_the_wait() -> None:
    """As if it had come just before the main thread began to wait."""
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


@pytest.mark.parametrize("interrupt", [to_the_process, missed_by_the_wait])
def test_an_interruption_cancels_the_work_and_waits_for_its_end(interrupt: Callable[[], None]) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            while (
                True
            ):  # one may be lost: Python drops an exception that a signal raises while a finaliser runs
                interrupt()
                await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.01)
            steps.append("freed")

    with LoopThread() as loop:
        for count in (1, 2):
            with pytest.raises(KeyboardInterrupt):
                loop.run(work())
            assert steps == ["freed"] * count
        assert loop.run(where()).is_alive(), "it goes on"


def test_one_task_opens_and_closes_a_resource() -> None:
    tasks = []

    @asynccontextmanager
    async def resource(fails: bool) -> AsyncIterator[int]:
        tasks.append(asyncio.current_task())
        if fails:
            raise ValueError("why")
        async with asyncio.timeout(60):  # as many libraries: only the task that entered it may leave it
            yield 7
        tasks.append(asyncio.current_task())

    with LoopThread() as loop:
        with loop.opened(resource(False)) as found:
            assert found == 7 and len(tasks) == 1
        assert len(tasks) == 2 and tasks[0] is tasks[1]
        with pytest.raises(ValueError, match="why"), loop.opened(resource(True)):
            raise AssertionError("it was not opened")
