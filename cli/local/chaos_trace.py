"""What a peer of a chaos run prints beside the rest (`start --json --tell-steps`): each step that it commits as a
lead, at once, and how each job ended of which it ran a stage: the lead may be gone by then. With the time:
{"event": "step", "at": UNIX SECONDS, ...the job's progress}."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from fusion.cli.terminal.output import Output

if TYPE_CHECKING:
    from fusion.runtime.job.progress import Progress
    from fusion.runtime.peer.peer import Peer
    from fusion.swarm.directory.records import JobId

LOOK_SECONDS = 0.05  # for jobs that we have begun to lead


async def print_steps(peer: Peer, output: Output) -> None:
    """Print every change in the progress of the training jobs that this peer leads, and their ends, until cancelled."""
    from fusion.runtime.training.service import TrainingService

    hosted: set[JobId] = set()
    ended: set[JobId] = set()
    training = peer.parts.services["train"]
    assert isinstance(training, TrainingService)

    def report(progress: Progress) -> None:
        record = progress.to_header()
        del record["recent"]  # a loss of each step: `loss` has told it already
        output.emit({"event": "step", "at": time.time(), **record})
        if progress.finished:
            ended.add(progress.job)

    async def follow(job: JobId) -> None:
        async for progress in training.watch(job):
            report(progress)

    async with asyncio.TaskGroup() as tasks:
        followed: dict[JobId, asyncio.Task[None]] = {}
        while True:
            hosted |= {job for job, _ in peer.parts.hosting.hosted}
            led = {job for job, stage in peer.parts.hosting.hosted if stage == 0} - ended
            followed = {job: task for job, task in followed.items() if not task.done()}
            for job in led - set(followed):
                if training.progress(job) is not None:  # else it is being loaded, or one that serves
                    followed[job] = tasks.create_task(follow(job))
            for job in hosted - ended - set(followed):
                final = peer.parts.hosting.board.final(job)
                if final is not None:
                    report(final)
            await asyncio.sleep(LOOK_SECONDS)
