"""Standing by for the stages of a served model, and keeping its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.served import swarm_of

from fusion.runtime.serving.service import ServingService
from fusion.swarm.directory.records import JobId


def test_a_warm_standby_hosts_without_loading_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            successor = swarm.peers[2]
            await swarm.stand_by(successor, job, 1)
            await swarm.stand_by(successor, job, 1)  # idempotent
            plane = successor.service._warm[job, 1].plane
            claim = swarm.owners[1].context.leases.holds(job, 1)
            assert claim is not None
            await swarm.hold(successor, job, 1, over=claim.term)
            assert successor.service._hosted[job, 1].loaded.plane is plane and not successor.service._warm
            await swarm.stand_by(successor, job, 0)
            successor.service.forget(job, 0)
            successor.service.forget(job, 0)
            assert not successor.service._warm

    asyncio.run(main())


def test_what_is_kept_warm_makes_room_for_what_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, memory_bytes=250_000) as swarm:
            job = await swarm.serve("gpt2", 2)
            successor = swarm.peers[2]
            await swarm.stand_by(successor, job, 0, 1)
            sizes = {place: warm.weights_bytes for place, warm in successor.service._warm.items()}
            assert sizes and sum(sizes.values()) <= 250_000
            for stage in (0, 1):
                claim = swarm.owners[stage].context.leases.holds(job, stage)
                assert claim is not None
                await swarm.hold(successor, job, stage, over=claim.term)
            assert set(successor.service._hosted) == {(job, 0), (job, 1)} and not successor.service._warm

    asyncio.run(main())


def test_every_owner_keeps_the_weights_of_the_stage_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 3)
            weights: Sequence[Any] = swarm.manifests[job].weights
            for stage, peer in enumerate(swarm.owners):
                while not peer.context.blobs.has(weights[stage - 1]):
                    await asyncio.sleep(0.002)

    asyncio.run(main())


def test_what_stages_do_is_told_while_the_worker_gives_one_up() -> None:
    """For /metrics; the worker's thread comes in between at any time."""
    hosted: dict[tuple[JobId, int], Any] = {}

    class Stage:
        tokens = 3

        @property
        def sessions(self) -> int:
            hosted.pop((JobId("job"), 1), None)
            return 2

    for stage in range(2):
        hosted[JobId("job"), stage] = SimpleNamespace(stage=Stage(), kv_bytes=1, retained_bytes=0)
    service: Any = SimpleNamespace(_hosted=hosted)
    assert [load.stage for load in ServingService.loads(service)] == [0, 1]
