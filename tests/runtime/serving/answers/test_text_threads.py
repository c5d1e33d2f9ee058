"""A slow tokenizer holds up its own model and nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.serving.answers.text_threads import THREADS, TextThreads
from fusion.swarm.directory.records import JobId

SLOW, QUICK = JobId("a" * 64), JobId("b" * 64)


def test_one_model_has_one_thread_even_when_those_who_asked_have_gone() -> None:
    async def main() -> None:
        threads, gate, running = TextThreads(), threading.Event(), threading.Semaphore(0)

        def slow() -> None:
            running.release()
            gate.wait()

        asked = [asyncio.create_task(threads.run(SLOW, slow)) for _ in range(THREADS + 1)]
        await asyncio.to_thread(running.acquire)
        for task in asked[:2]:
            task.cancel()
        await asyncio.wait(asked[:2])
        assert await threads.run(QUICK, lambda: 5) == 5
        assert not running.acquire(blocking=False), "a second call of the model began beside the first"
        gate.set()
        await asyncio.gather(*asked[2:])
        threads.close()

    asyncio.run(main())


def test_a_tokenizer_that_gives_nothing_is_given_up() -> None:
    async def main() -> None:
        threads, gate = TextThreads(longest_seconds=0.05), threading.Event()
        with pytest.raises(JobFailed, match=r"tokenizer gave nothing for 0\.05 seconds"):
            await threads.run(SLOW, gate.wait)
        with pytest.raises(JobFailed):  # it still holds its turn
            await threads.run(SLOW, lambda: None)
        gate.set()
        threads.close()

    asyncio.run(main())
