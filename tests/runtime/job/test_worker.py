from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from fusion.runtime.capture.models import GPT
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.job.worker import Worker


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
