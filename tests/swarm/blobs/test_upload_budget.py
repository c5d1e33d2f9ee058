from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fusion.swarm.blobs.upload_budget import BURST_SECONDS, SMALL_BYTES, UploadBudget
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.transport import PeerId

CHUNK = 1 << 20
RATE = float(2 * CHUNK)  # bytes a second: half a second a chunk
ONE, TWO = PeerId("one"), PeerId("two")


def run(scenario: Callable[[UploadBudget, ManualClock], Awaitable[None]], rate: float | None = RATE) -> None:
    clock = ManualClock(0.0)

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        await asyncio.sleep(0)

    async def main() -> None:
        budget = UploadBudget(rate, clock, sleep)
        try:
            async with asyncio.timeout(10):
                await scenario(budget, clock)
        finally:
            await budget.aclose()

    asyncio.run(main())


def test_no_limit_costs_no_time() -> None:
    async def scenario(budget: UploadBudget, clock: ManualClock) -> None:
        for _ in range(1000):
            await budget.spend(ONE, CHUNK)
        assert clock.now == 0.0 and not budget.limited

    run(scenario, None)


def test_the_rate_is_kept() -> None:
    async def scenario(budget: UploadBudget, clock: ManualClock) -> None:
        for _ in range(100):
            await budget.spend(ONE, CHUNK)
        # The first chunk goes out of the burst, the last one is in debt when it goes.
        assert clock.now == pytest.approx(100 * CHUNK / RATE - BURST_SECONDS, abs=0.6)

    run(scenario)


def test_a_pause_earns_no_more_than_the_burst() -> None:
    async def scenario(budget: UploadBudget, clock: ManualClock) -> None:
        clock.advance(3600.0)
        for _ in range(20):
            await budget.spend(ONE, CHUNK)
        assert clock.now - 3600.0 == pytest.approx(20 * CHUNK / RATE - BURST_SECONDS, abs=0.6)

    run(scenario)


def test_readers_take_turns_however_much_one_of_them_asks_for() -> None:
    async def scenario(budget: UploadBudget, clock: ManualClock) -> None:
        order: list[PeerId] = []

        async def read(peer: PeerId) -> None:
            await budget.spend(peer, CHUNK)
            order.append(peer)

        await budget.spend(ONE, 4 * CHUNK)  # everybody waits from now on
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(read(ONE))
            await asyncio.sleep(0)
            for _ in range(3):
                tasks.create_task(read(TWO))
        assert order[:6].count(TWO) == 3 and len(order) == 11

    run(scenario)


def test_what_is_small_goes_at_once_and_is_counted() -> None:
    async def scenario(budget: UploadBudget, clock: ManualClock) -> None:
        await budget.spend(ONE, 4 * CHUNK)
        waiting = asyncio.create_task(budget.spend(ONE, CHUNK))
        for _ in range(8):
            await budget.spend(TWO, SMALL_BYTES)  # half a MiB in all
        assert clock.now == 0.0
        await waiting
        assert clock.now == pytest.approx(4.5 * CHUNK / RATE - BURST_SECONDS, abs=0.1)

    run(scenario)


def test_small_ones_without_end_neither_pass_the_rate_nor_keep_others_waiting() -> None:
    async def scenario(budget: UploadBudget, clock: ManualClock) -> None:
        given = CHUNK

        async def flood() -> None:
            nonlocal given
            while True:
                await budget.spend(TWO, SMALL_BYTES)
                given += SMALL_BYTES
                await asyncio.sleep(0)

        await budget.spend(ONE, CHUNK)
        flooding = asyncio.create_task(flood())
        for _ in range(10):
            await budget.spend(ONE, CHUNK)
            given += CHUNK
        flooding.cancel()
        assert clock.now < 2 * 10 * CHUNK / RATE + 1.0
        assert given <= RATE * (clock.now + BURST_SECONDS) + CHUNK + SMALL_BYTES

    run(scenario)


def test_what_is_first_goes_at_once_and_what_comes_then_waits_for_it() -> None:
    async def scenario(budget: UploadBudget, clock: ManualClock) -> None:
        await budget.spend(ONE, CHUNK)
        await budget.spend(TWO, 8 * CHUNK, first=True)
        assert clock.now == 0.0
        await budget.spend(ONE, CHUNK)
        assert clock.now == pytest.approx(9 * CHUNK / RATE - BURST_SECONDS, abs=0.1)
        await budget.spend(TWO, 8 * CHUNK, first=True)  # no more than half of the rate
        assert clock.now == pytest.approx(10 * CHUNK / RATE - BURST_SECONDS, abs=0.1)

    run(scenario)


def test_whoever_goes_while_waiting_costs_the_others_nothing() -> None:
    async def scenario(budget: UploadBudget, clock: ManualClock) -> None:
        await budget.spend(ONE, 2 * CHUNK)
        gone = [asyncio.create_task(budget.spend(ONE, CHUNK)) for _ in range(50)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await budget.spend(TWO, CHUNK)
        assert clock.now < 2.0
        assert all(task.cancelled() for task in gone)

    run(scenario)
