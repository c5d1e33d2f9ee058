from __future__ import annotations

import asyncio
import time

import pytest
import torch

from fusion.runtime.device.surplus import SPARE_BYTES
from fusion.runtime.job.worker import SLICE_SECONDS, Worker
from fusion.runtime.peer import resident_memory
from fusion.runtime.peer.resident_memory import drop_code_pages, lent_memory, private_bytes, resident_bytes
from fusion.swarm.directory.records import JobId

MIB = 1 << 20
PLACE = JobId("a" * 52), 0
ELEMENTS = 2 * MIB // 4
PIECES = 300  # of which every second one is freed: holes that the allocator keeps


def held() -> list[torch.Tensor]:
    torch.ones(8 * ELEMENTS)  # from now on the allocator takes such from its heaps
    pieces = [torch.ones(ELEMENTS) for _ in range(PIECES)]
    return pieces[::2]


@pytest.mark.skipif(not resident_memory.STATM.exists(), reason="the kernel does not tell")
def test_what_a_call_has_freed_goes_back_unless_it_is_set_aside() -> None:
    async def main() -> tuple[int, int]:
        async with Worker() as worker:
            budget = lent_memory(4096 * MIB, 256 * MIB, worker)
            before = resident_bytes()
            budget.hold(PLACE, 1024 * MIB)
            kept = await worker.run(held)
            await worker.run(time.sleep, 2 * SLICE_SECONDS)
            set_aside = resident_bytes() - before
            budget.hold(PLACE, len(kept) * 2 * MIB)
            await worker.run(time.sleep, 2 * SLICE_SECONDS)
            await worker.run(max, 1, 2)  # after which the look is over
            return set_aside, resident_bytes() - before - len(kept) * 2 * MIB

    set_aside, above = asyncio.run(main())
    assert set_aside > 400 * MIB, "or nothing here shows that anything was returned"
    assert above <= SPARE_BYTES


@pytest.mark.skipif(not resident_memory.MAPS.exists(), reason="the kernel does not tell")
def test_code_of_libraries_is_held_no_more_and_runs_as_before() -> None:
    given = torch.linspace(-1, 1, 64).view(8, 8)
    wanted = torch.linalg.svdvals(given) @ given.softmax(1)
    private, code = private_bytes(), resident_bytes() - private_bytes()
    drop_code_pages()
    assert resident_bytes() - private_bytes() < code - 30 * MIB
    assert abs(private_bytes() - private) < 8 * MIB
    assert torch.equal(torch.linalg.svdvals(given) @ given.softmax(1), wanted)
