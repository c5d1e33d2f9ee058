"""A run that others overtake between its operators: forward and backward give the bits that they give alone."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch
from support.instances import chain

from fusion.dag.cutting.cuts import split
from fusion.runtime.device.share import Caller
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.job.worker import Worker, rest
from fusion.runtime.planes import preemption
from fusion.runtime.planes.plane import RngKey
from fusion.runtime.planes.torch_plane import TorchTrainingStage
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

WIDTHS = [8, 16, 16, 16, 4]


def steps(seed: int, count: int) -> list[torch.Tensor]:
    """What training a stage for so many steps gives: outputs and gradients."""
    made = torch.Generator().manual_seed(seed)
    (stage,) = split(chain(WIDTHS), ())
    variables = {
        v.name: torch.randn(tuple(map(int, v.type.shape)), generator=made) for v in stage.graph.variables
    }
    plane = TorchTrainingStage(stage, variables, OptimizerConfig())
    found = []
    for step in range(count):
        inputs = {"x": torch.randn(32, WIDTHS[0], generator=made)}
        found += plane.forward(0, inputs, RngKey(0, step, 0)).values()
        plane.backward(0, {}, 1.0)
        found += [gradient.clone() for gradient in plane.gradients().values()]
        plane.apply(0.1, 1.0)
    return found


def test_runs_that_overtake_each_other_give_the_bits_that_each_gives_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = [steps(seed, 3) for seed in range(3)]
    monkeypatch.setattr("fusion.runtime.job.worker.SLICE_SECONDS", 0.0)
    rested: Counter[str] = Counter()

    def counted(name: str) -> bool:
        rested[name] += 1
        return rest()

    monkeypatch.setattr(preemption, "rest", lambda: counted("forward"))
    monkeypatch.setattr(preemption, "_before", lambda gradients: counted("backward") and None)

    async def main() -> list[list[torch.Tensor]]:
        async with Worker() as worker:
            jobs = [worker.of(Caller(PeerId(f"{n}"), JobId(f"{n}"))) for n in range(3)]
            return await asyncio.gather(*(job.run(steps, n, 3) for n, job in enumerate(jobs)))

    together = asyncio.run(main())
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert rested["forward"] == rested["backward"] == 3 * 3 * 2 * (len(WIDTHS) - 1)
