from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fusion.runtime.capture.models import GPT
from fusion.runtime.device.share import Caller
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.job.worker import NICE, Worker, rest
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId


def test_calls_run_in_order_in_one_thread_of_their_own() -> None:
    async def main() -> None:
        seen: list[tuple[int, str]] = []
        async with Worker(threads=1) as worker:
            names = await asyncio.gather(
                *(
                    worker.run(lambda i=i: seen.append((i, threading.current_thread().name)))
                    for i in range(20)
                )
            )
            assert len(names) == 20
            assert await worker.run(torch.get_num_threads) == 1
            with pytest.raises(ZeroDivisionError):
                await worker.run(lambda: 1 // 0)
            assert await worker.run(max, 3, 4) == 4
        assert [i for i, _ in seen] == list(range(20))
        assert len({name for _, name in seen}) == 1
        assert seen[0][1] != threading.current_thread().name
        await worker.aclose()

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
def test_what_computes_gives_way_to_what_carries_messages() -> None:
    def niceness() -> tuple[int, int]:
        """Of this thread, and of one that it starts, as a library's do."""
        with ThreadPoolExecutor(1) as pool:
            return _niceness(), pool.submit(_niceness).result()

    async def main() -> None:
        before = _niceness()
        async with Worker() as worker:
            assert await worker.run(niceness) == (min(19, before + NICE), min(19, before + NICE))
        assert _niceness() == before

    asyncio.run(main())


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_another_authors_call_does_not_wait_for_all_that_one_has_asked_for() -> None:
    async def main() -> None:
        seen: list[str] = []
        begun, go = threading.Event(), threading.Event()
        now = [0.0]  # the first call takes 10 ms and the others no time, however long they wait for a core

        def first() -> None:
            begun.set()
            go.wait(10)
            now[0] += 0.01

        async with Worker(clock=lambda: now[0]) as worker:
            greedy = worker.of(Caller(PeerId("greedy"), JobId("a")))
            honest = worker.of(Caller(PeerId("honest"), JobId("b")))
            calls = [asyncio.ensure_future(greedy.run(first))]
            await asyncio.to_thread(begun.wait, 10)
            calls += [asyncio.ensure_future(greedy.run(seen.append, f"greedy {n}")) for n in range(20)]
            calls += [asyncio.ensure_future(honest.run(seen.append, f"honest {n}")) for n in range(2)]
            await asyncio.sleep(0)
            calls[5].cancel()
            await asyncio.wait([calls[5]])
            go.set()
            await asyncio.gather(*calls, return_exceptions=True)
            assert calls[5].cancelled()
        assert seen[:2] == ["honest 0", "honest 1"]
        assert seen[2:] == [f"greedy {n}" for n in range(20) if n != 4]

    asyncio.run(main())


def test_an_error_is_its_callers_and_leaves_nothing_behind() -> None:
    class Held:
        pass

    async def main() -> None:
        async with Worker() as worker:
            held = Held()
            gone = weakref.ref(held)

            def fail(held: Held) -> None:
                raise ValueError("as it should")

            with pytest.raises(ValueError, match="as it should"):
                await worker.run(fail, held)
            del held, fail
            await worker.run(lambda: None)
            assert gone() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_device_that_cannot_be_made_ready_fails_the_calls_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a GPU that is full: nobody waits for a thread that is gone."""
    full = [True]

    def prepare(threads: int, device: torch.device) -> None:
        if full[0]:
            raise torch.OutOfMemoryError("no room for a context")

    monkeypatch.setattr("fusion.runtime.job.worker._prepare", prepare)

    async def main() -> None:
        async with Worker(threads=1) as worker:
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError, match="no room"):
                    await asyncio.wait_for(worker.run(max, 1, 2), 10)
            full[0] = False
            assert await worker.run(max, 1, 2) == 2

    asyncio.run(main())


def test_closing_drops_what_has_not_begun() -> None:
    async def main() -> None:
        worker = Worker()
        begun, go = threading.Event(), threading.Event()

        def first() -> bool:
            begun.set()
            return go.wait(10)

        running = asyncio.ensure_future(worker.run(first))
        waiting = asyncio.ensure_future(worker.run(lambda: None))
        await asyncio.to_thread(begun.wait, 10)
        closing = asyncio.ensure_future(worker.aclose())
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.set()
        await closing
        assert await running

    asyncio.run(main())


def test_what_a_call_held_is_free_at_once_also_where_it_failed() -> None:
    class Held:
        pass

    def fail(held: Held) -> None:
        raise ValueError("no")

    async def main() -> None:
        async with Worker() as worker:
            for function, expected in ((id, None), (fail, ValueError)):
                held = Held()
                seen = weakref.ref(held)
                try:
                    await worker.run(function, held)
                except ValueError as error:
                    assert expected is type(error)
                del held
                await worker.run(int)  # by then the thread has let the call before go
                assert seen() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_call_that_nobody_waits_for_any_more_is_dropped_and_a_closed_worker_takes_none() -> None:
    async def main() -> None:
        worker = Worker()
        begun, go, ran = threading.Event(), threading.Event(), list[int]()
        first = asyncio.ensure_future(worker.run(lambda: begun.set() or go.wait(10)))
        second = asyncio.ensure_future(worker.run(ran.append, 2))
        await asyncio.to_thread(begun.wait, 10)
        for task in (first, second):
            task.cancel()
        await asyncio.wait((first, second))
        go.set()
        assert await worker.run(len, ran) == 0
        await worker.aclose()
        with pytest.raises(RuntimeError, match="closed"):
            await worker.run(int)

    asyncio.run(main())


@pytest.mark.parametrize("device", ["abacus", "meta", "cuda:99", "cpu; import os"])
def test_a_device_that_is_not_there_is_an_error_in_one_line(device: str) -> None:
    with pytest.raises(ValueError, match="device:") as error:
        Worker(device=device)
    assert "\n" not in str(error.value)


def test_a_thread_count_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="threads: at least 1"):
        Worker(threads=0)


def test_the_built_in_model_starts_near_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=64, blocks=3, width=32, heads=4, sequence=16))
    ids = torch.randint(0, 64, (2, 16))
    logits = model(ids, torch.arange(16).repeat(2, 1))
    assert logits.shape == (2, 16, 64)
    assert float(logits.std()) < 0.5
    assert model.head.weight is model.tokens.weight
    changed = model(ids.index_fill(1, torch.tensor([15]), 0), torch.arange(16).repeat(2, 1))
    torch.testing.assert_close(changed[:, :15], logits[:, :15])


@pytest.mark.parametrize("wrong", [{"width": 30}, {"blocks": 0}, {"dropout": 1.0}, {"vocabulary": -1}])
def test_a_model_that_cannot_be_names_the_field(wrong: dict[str, float]) -> None:
    with pytest.raises(JobError, match=rf"model\.{next(iter(wrong))}"):
        GPTConfig(**wrong)  # type: ignore[arg-type]


def test_another_jobs_call_overtakes_one_that_rests_and_its_own_jobs_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusion.runtime.job.worker.SLICE_SECONDS", 0.0)

    async def main() -> None:
        seen: list[str] = []
        begun, go = threading.Event(), threading.Event()

        def long(name: str, rests: int) -> str:
            begun.set()
            assert go.wait(10)
            for number in range(rests):
                seen.append(f"{name} {number}")
                assert rest()
            return name

        async with Worker() as worker:
            jobs = [worker.of(Caller(PeerId(name), JobId(name))) for name in ("a", "b", "c")]
            calls = [asyncio.ensure_future(jobs[0].run(long, "a", 3))]
            await asyncio.to_thread(begun.wait, 10)
            calls += [asyncio.ensure_future(jobs[0].run(seen.append, "a's next"))]
            calls += [asyncio.ensure_future(job.run(long, "bc"[n], 2)) for n, job in enumerate(jobs[1:])]
            await asyncio.sleep(0.01)
            go.set()
            assert [await call for call in calls] == ["a", None, "b", "c"]
        assert [each for each in seen if each[0] == "a"] == ["a 0", "a 1", "a 2", "a's next"]
        assert {"b 0", "c 0"} <= set(seen[: seen.index("a 2")]), "they did not wait for its end"

    assert not rest(), "elsewhere it does nothing"
    asyncio.run(main())


def test_a_short_call_runs_in_the_loops_own_thread_where_the_device_is_free() -> None:
    here = threading.current_thread

    async def main() -> None:
        begun, go = threading.Event(), threading.Event()

        def busy() -> threading.Thread:
            begun.set()
            assert go.wait(10)
            return here()

        async with Worker(threads=1) as worker:
            mine, other = (worker.of(Caller(PeerId(name), JobId(name))) for name in "ab")
            first = mine.submit_short(here)
            assert first.done() and await worker.result(first) is here()
            assert mine.submit_short(torch.get_num_threads).result() == 1
            with pytest.raises(ZeroDivisionError):
                mine.submit_short(lambda: 1 // 0).result()
            long = other.submit(busy)
            await asyncio.to_thread(begun.wait, 10)
            behind = mine.submit_short(here)
            assert not behind.done(), "another job has the device"
            go.set()
            assert await worker.result(long) is await worker.result(behind) is not here()
        with pytest.raises(RuntimeError, match="closed"):
            mine.submit_short(here)

    asyncio.run(main())


def test_what_is_asked_for_during_a_short_call_runs_after_it() -> None:
    seen: list[str] = []

    async def main() -> None:
        begun, submitted = threading.Event(), threading.Event()

        async def ask(worker: Worker) -> None:
            call = worker.submit(seen.append, "asked for elsewhere")
            submitted.set()
            await worker.result(call)

        def elsewhere(worker: Worker) -> None:
            assert begun.wait(10)
            asyncio.run(ask(worker))

        def short() -> None:
            begun.set()
            assert submitted.wait(10)
            time.sleep(0.05)
            seen.append("short")

        async with Worker() as worker:
            await worker.run(int)  # its thread waits for calls
            other = asyncio.ensure_future(asyncio.to_thread(elsewhere, worker))
            await asyncio.sleep(0)
            await worker.result(worker.submit_short(short))
            await other

    asyncio.run(main())
    assert seen == ["short", "asked for elsewhere"]


def test_closing_waits_for_calls_that_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.runtime.job.worker.SLICE_SECONDS", 0.0)

    async def main() -> None:
        worker = Worker()
        begun, go = [threading.Event(), threading.Event()], threading.Event()

        def first() -> bool:
            begun[0].set()
            while not begun[1].is_set():
                rest()
            return True

        def second() -> bool:
            begun[1].set()
            return go.wait(10)

        calls = [
            asyncio.ensure_future(worker.of(Caller(PeerId(name), JobId(name))).run(function))
            for name, function in (("a", first), ("b", second))
        ]
        for each in begun:
            await asyncio.to_thread(each.wait, 10)
        closing = asyncio.ensure_future(worker.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done()
        go.set()
        await closing
        assert await asyncio.gather(*calls) == [True, True]

    asyncio.run(main())
