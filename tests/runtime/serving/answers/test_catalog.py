from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from fusion.runtime.serving.answers.catalog import MAX_LOOKS, Catalog
from fusion.swarm.clock import Clock
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.transport import PeerId


def test_a_gateway_remembers_the_holders_of_so_many_models_and_no_more() -> None:
    async def main() -> None:
        async def claims(job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
            held = ClaimRecord(
                job=job, stage=stage, peer=PeerId("p"), role="owner", term=1, score=1.0, step=0, load=0.0, ready=True
            )  # fmt: skip
            return (held,)

        context: Any = SimpleNamespace(clock=Clock(), leases=SimpleNamespace(claims=claims))
        catalog = Catalog(context)
        for number in range(3 * MAX_LOOKS):
            model: Any = SimpleNamespace(
                job=JobId(f"{number:064x}"), manifest=SimpleNamespace(name="m", stages=1)
            )
            await catalog._look(model)
        assert len(catalog._looks) == MAX_LOOKS
        assert catalog.newer(JobId(f"{number:064x}"), 0, SimpleNamespace(term=0)) is not None  # type: ignore[arg-type]

    asyncio.run(main())
