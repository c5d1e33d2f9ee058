"""What a stage makes of its lead's word that the job has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusion.runtime.training.stage_loop import StageLoop
from fusion.runtime.training.step import messages as m

STEPS = 8


def finished(step: int, *said: m.Message) -> m.Finish | None:
    """How the job has ended for a stage at `step` that hears all that."""

    async def main() -> m.Finish | None:
        mailbox: asyncio.Queue[tuple[int, m.Message]] = asyncio.Queue()

        async def stop() -> None:
            pass

        work = SimpleNamespace(state=SimpleNamespace(step=step), stop=stop)
        loop = StageLoop(cast(Any, SimpleNamespace(mailbox=mailbox)), cast(Any, work), STEPS)
        for message in said:
            mailbox.put_nowait((0, message))
        running = asyncio.create_task(loop.run())
        while not mailbox.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return loop.finished

    return asyncio.run(main())


def test_a_job_is_done_for_a_stage_that_has_taken_its_last_step() -> None:
    done = m.Finish("done")
    assert finished(STEPS, done) == done


def test_whoever_came_to_the_first_stage_cannot_say_before_that_it_is_done() -> None:
    assert finished(STEPS - 1, m.Finish("done")) is None
    stopped = m.Finish("stopped")
    assert finished(STEPS - 1, m.Finish("done"), stopped) == stopped


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_other_ends_come_at_any_step(state: Any) -> None:
    assert finished(3, m.Finish(state)) == m.Finish(state)
