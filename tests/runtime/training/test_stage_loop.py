"""What a stage makes of its lead's word that the job has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusion.runtime.job.progress import Progress, State
from fusion.runtime.training.stage_loop import StageLoop
from fusion.runtime.training.step import messages as m
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

STEPS = 8
JOB, LAST = JobId("e" * 64), Digest("d" * 64)
CHOSEN, STRANGER, OTHER = (PeerId(name) for name in ("chosen", "stranger", "other"))


class Came(str):
    """In place of a message: that peer owns the first stage from now on."""


def finished(step: int, *said: m.Message | Came, leads: bool = False) -> m.Finish | None:
    """How the job has ended for a stage at `step` that hears all that. `leads`: it is the first one itself."""

    async def main() -> m.Finish | None:
        mailbox: asyncio.Queue[tuple[int, m.Message]] = asyncio.Queue()
        leader = [STRANGER]

        async def nothing(*_: object) -> None:
            pass

        work = SimpleNamespace(
            state=SimpleNamespace(step=step),
            stop=nothing,
            follow=nothing,
            snapshots=SimpleNamespace(has_part=lambda index, step: (index, step) == (LAST, STEPS)),
        )
        law = JobLaw(job=JOB, author=PeerId("author"), stages=2, steps=STEPS, proposed=(CHOSEN, OTHER))
        context = SimpleNamespace(
            access=SimpleNamespace(law=lambda job: law),
            leases=SimpleNamespace(
                tenure=lambda job, stage: SimpleNamespace(claim=SimpleNamespace(peer=leader[0])),
                known_holder=lambda job, stage: leader[0],
            ),
        )
        outbox = SimpleNamespace(mailbox=mailbox, lead=SimpleNamespace() if leads else None)
        loop = StageLoop(cast(Any, context), JOB, cast(Any, outbox), cast(Any, work), STEPS)
        running = asyncio.create_task(loop.run())
        for message in said:
            if isinstance(message, Came):
                leader[0] = PeerId(message)
                continue
            mailbox.put_nowait((0, message))
            for _ in range(4):
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return loop.finished

    return asyncio.run(main())


def end(state: State, snapshot: Digest | None = LAST) -> m.Finish:
    return m.Finish(state, "", Progress(job=JOB, state=state, snapshot=snapshot))


DONE, STOPPED, FAILED = map(end, ("done", "stopped", "failed"))
COMMIT = m.Commit((1, 1), 2, learning_rate=0.1, clip_factor=1.0, after=m.After(), made_of="")


def test_a_job_is_done_for_a_stage_that_has_taken_its_last_step() -> None:
    assert finished(STEPS, DONE) == DONE
    assert finished(STEPS - 1, DONE) is None


@pytest.mark.parametrize("named", [end("done", Digest("e" * 64)), end("done", None), m.Finish("done")])
def test_the_last_snapshot_is_one_that_the_stage_has_its_shard_in(named: m.Finish) -> None:
    assert finished(STEPS, named) is None
    assert finished(STEPS, named, DONE) == DONE


@pytest.mark.parametrize("step", [3, STEPS])
def test_whoever_came_to_the_first_stage_cannot_say_that_it_was_stopped_or_has_failed(step: int) -> None:
    assert finished(step, STOPPED) is None
    assert finished(step, FAILED, FAILED, FAILED) is None
    assert finished(step, Came(CHOSEN), STOPPED) is None, "the author signs that"


def test_that_it_has_failed_says_who_was_chosen_or_led_a_step_or_two_of_them() -> None:
    assert finished(3, Came(CHOSEN), FAILED) == FAILED
    assert finished(3, COMMIT, FAILED) == FAILED
    assert finished(3, Came(CHOSEN), COMMIT, Came(STRANGER), FAILED) is None
    assert finished(3, FAILED, Came("another"), FAILED) == FAILED


@pytest.mark.parametrize("end", [DONE, STOPPED, FAILED])
def test_whoever_leads_goes_by_its_own_word(end: m.Finish) -> None:
    assert finished(3, end, leads=True) == end
