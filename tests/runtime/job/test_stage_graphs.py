from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.served import swarm_of

from fusion.dag.ir import serialise
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.stage_graphs import StageGraphs


def test_a_graph_is_decoded_once_however_many_stages_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = serialise.decode
    monkeypatch.setattr(serialise, "decode", lambda data: (decoded.append(len(data)), decode(data))[1])

    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            decoded.clear()
            heir = swarm.peers[2]
            await swarm.stand_by(heir, job, 0, 1)  # on disk, weighed, in memory
            assert len(decoded) == 1
            graphs = StageGraphs(heir.context)
            one, two = await asyncio.gather(*(graphs.of(swarm.manifests[job]) for _ in range(2)))
            assert one is two and len(decoded) == 2 and len(one[0]) == 2

    asyncio.run(main())


def test_a_graph_that_is_none_fails_the_job_and_is_not_remembered(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            blobs = swarm.peers[0].context.blobs
            wrong = replace(swarm.manifests[job], graph=await blobs.put(b"no graph"))
            graphs = StageGraphs(swarm.peers[0].context)
            for _ in range(2):
                with pytest.raises(JobFailed, match="the graph of gpt2: "):
                    await graphs.of(wrong)

    asyncio.run(main())
