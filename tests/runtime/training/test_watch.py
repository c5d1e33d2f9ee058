from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from fusion.runtime.job.progress import Progress
from fusion.runtime.training.service import TrainingService
from fusion.swarm.directory.records import JobId

JOB = JobId("a" * 64)


def test_nothing_is_kept_of_a_job_for_those_who_watched_it_to_its_end() -> None:
    async def main() -> None:
        unused: Any = None
        service = TrainingService(unused, unused)
        host: Any = SimpleNamespace(progress=Progress(job=JOB, state="running", step=1))
        service._hosts[JOB, 0] = host
        seen: list[Progress] = []

        async def watch() -> None:
            async for progress in service.watch(JOB):
                seen.append(progress)

        watching = asyncio.create_task(watch())
        while not service._changes:
            await asyncio.sleep(0)
        host.progress = Progress(job=JOB, state="done", step=2)
        del service._hosts[JOB, 0]
        service._signal(JOB)
        await watching
        assert [progress.state for progress in seen] == ["running", "done"]
        assert not service._changes

    asyncio.run(main())
