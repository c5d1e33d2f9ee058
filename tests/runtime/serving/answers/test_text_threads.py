"""A slow tokenizer holds up its own model and nothing else, and one holder's texts no other's."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.serving.answers.text_threads import THREADS, TextThreads
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

SLOW, QUICK = JobId("a" * 64), JobId("b" * 64)
ONE, OTHER = PeerId("one"), PeerId("other")


def test_one_model_has_one_thread_even_when_those_who_asked_have_gone() -> None:
    async def main() -> None:
        threads, gate, running = TextThreads(), threading.Event(), threading.Semaphore(0)

        def slow() -> None:
            running.release()
            gate.wait()

        asked = [asyncio.create_task(threads.run(SLOW, ONE, slow)) for _ in range(THREADS + 1)]
        await asyncio.to_thread(running.acquire)
        for task in asked[:2]:
            task.cancel()
        await asyncio.wait(asked[:2])
        assert await threads.run(QUICK, ONE, lambda: 5) == 5
        assert not running.acquire(blocking=False), "a second call of the model began beside the first"
        gate.set()
        await asyncio.gather(*asked[2:])
        threads.close()

    asyncio.run(main())


def test_a_tokenizer_that_gives_nothing_is_given_up() -> None:
    async def main() -> None:
        threads, gate = TextThreads(longest_seconds=0.05), threading.Event()
        with pytest.raises(JobFailed, match=r"tokenizer gave nothing for 0\.05 seconds"):
            await threads.run(SLOW, ONE, gate.wait)
        with pytest.raises(JobFailed):  # it still holds its turn
            await threads.run(SLOW, ONE, lambda: None)
        gate.set()
        threads.close()

    asyncio.run(main())


def test_tokenizers_that_never_end_take_no_thread_of_other_models() -> None:
    async def main() -> None:
        threads, gate = TextThreads(longest_seconds=0.2), threading.Event()
        for begin in (0, THREADS, 2 * THREADS):
            models = [JobId(f"{begin + i:064}") for i in range(THREADS)]
            asked = [threads.run(model, ONE, gate.wait) for model in models]
            failed = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, JobFailed) for each in failed)
            assert await threads.run(QUICK, OTHER, int, begin) == begin
        with pytest.raises(JobFailed, match="gave nothing"):
            await threads.run(models[0], ONE, lambda: None)  # at once: its call before goes on
        gate.set()
        while True:  # and once that has ended it is a model like others
            try:
                assert await threads.run(models[0], ONE, lambda: 7) == 7
                break
            except JobFailed:
                await asyncio.sleep(0.001)
        threads.close()

    asyncio.run(main())


def test_a_holder_waits_for_one_call_of_another_and_not_for_all_of_them() -> None:
    async def main() -> list[str]:
        threads, gate, order = TextThreads(), threading.Event(), list[str]()
        running = threading.Event()

        def first() -> None:
            running.set()
            gate.wait()

        asked = [asyncio.create_task(threads.run(SLOW, ONE, first))]
        await asyncio.to_thread(running.wait)
        gone = [asyncio.create_task(threads.run(SLOW, ONE, order.append, "gone")) for _ in range(8)]
        asked += [asyncio.create_task(threads.run(SLOW, ONE, order.append, "one")) for _ in range(8)]
        await asyncio.sleep(0)
        asked.append(asyncio.create_task(threads.run(SLOW, OTHER, order.append, "other")))
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        gate.set()
        await asyncio.gather(*asked)
        threads.close()
        return order

    order = asyncio.run(main())
    assert order.index("other") <= 1 and order.count("one") == 8 and "gone" not in order
