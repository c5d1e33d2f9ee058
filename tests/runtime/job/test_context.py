"""What the parts of a peer process share."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from threading import Event

from support.directory_records import digest
from support.hosting import swarm, until

from fusion.runtime.device.accounts import UNSIGNED
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

AUTHOR, JOB = PeerId("author"), JobId(digest("job"))


def test_an_author_is_charged_what_a_thread_computes_for_it_even_if_nobody_waits(tmp_path: Path) -> None:
    began, goes_on = Event(), Event()

    def compute() -> None:
        since = time.thread_time()
        while time.thread_time() - since < 0.01:
            pass

    def late() -> None:
        began.set()
        goes_on.wait(10.0)
        compute()

    async def main() -> None:
        async with swarm(tmp_path) as made:
            context = (await made.join()).context
            await context.work_for(JOB, AUTHOR, compute)  # which has not signed it
            once = context.pace.charged(UNSIGNED)
            assert once >= 0.01
            waits = asyncio.create_task(context.work_for(JOB, AUTHOR, late))
            await until(began.is_set)
            waits.cancel()
            await asyncio.wait([waits])
            goes_on.set()
            await until(lambda: context.pace.charged(UNSIGNED) >= once + 0.01)

    asyncio.run(main())
