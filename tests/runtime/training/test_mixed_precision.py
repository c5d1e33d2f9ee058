"""Training in half precision: it learns as float32 does, what crosses is two bytes an element, weights and snapshots are float32,
a killed stage changes no bit, and in float16 an overflow skips one step, at every stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import (
    LONG,
    TINY,
    assert_bit_identical,
    config,
    exported_weights,
    language_job,
    reached,
    record_of,
    run,
    stopped,
    swarm,
    undisturbed,
)

from fusion.runtime.capture.models import GPT
from fusion.runtime.job.manifest import Precision
from fusion.runtime.launch.launch import launch
from fusion.runtime.planes.torch_plane import TorchTrainingStage
from fusion.runtime.training.compute.loss_scale import FIRST, LossScaled

STEPS = 12


def trained(root: Path, precision: Precision) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """The losses of a job over two stages, the bytes that it sent, and the weights that it exports."""

    async def main() -> tuple[list[float], int, dict[str, torch.Tensor]]:
        torch.manual_seed(1)
        async with swarm(root, 2) as made:
            work = language_job(made.peers[0], GPT(TINY), config(precision=precision, steps=STEPS), 2)
            progress = await run(made, work, range(2))
            assert progress.state == "done" and progress.step == STEPS
            losses = [loss for _, loss in made.peers[0].service.losses(work.prepared.job)]
            return losses, progress.sent_bytes, await exported_weights(made.peers[0], work, root / "out")

    return asyncio.run(main())


@pytest.fixture(scope="module")
def in_full(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    return trained(tmp_path_factory.mktemp("full"), "float32")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_ends_within_a_percent_of_float32_and_sends_fewer_bytes(
    tmp_path: Path, in_full: tuple[list[float], int, dict[str, torch.Tensor]], precision: Precision
) -> None:
    full, full_bytes, _ = in_full
    half, half_bytes, weights = trained(tmp_path / "half", precision)
    assert len(half) == STEPS and half[-1] < half[0] and half != full
    assert half[-1] == pytest.approx(full[-1], rel=0.01)
    assert half_bytes <= 0.8 * full_bytes  # the gradient of the tied table crosses in float32 as ever
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_a_killed_stage_changes_nothing(tmp_path: Path, precision: Precision) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module, train = GPT(TINY), config(precision=precision, steps=LONG.steps, snapshot_every=3)
        async with swarm(tmp_path / "rough", 4) as made:
            lead, _, victim, spare = made.peers
            work = language_job(lead, module, train, 3)
            await launch(lead.context, work.prepared)
            for stage in range(3):
                await made.peers[stage].host(work.prepared, stage)
            seen = await reached(lead, work, 4, snapshot_step=3)
            await spare.stand_by(work.prepared, 2, record_of(lead, work, seen))
            await made.kill(victim)
            left = await reached(lead, work, 4)
            await reached(lead, work, left.step + 3)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1, train))

    asyncio.run(main())


def test_a_gradient_that_overflows_skips_one_step_at_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage's gradients are made infinite in step 2: nobody applies it, and all go on with half the scale."""
    scaled: dict[int, Any] = {}
    applied: dict[int, list[float]] = {}
    of_torch, of_scaled = TorchTrainingStage.squared_norm, LossScaled.apply

    def overflow(self: TorchTrainingStage, skip: frozenset[str] = frozenset()) -> float:
        found = of_torch(self, skip)
        return float("inf") if self.stage.index == 1 and len(applied.get(1, [])) == 2 else found

    def apply(self: LossScaled, learning_rate: float, clip_factor: float) -> None:
        scaled[self.stage.index] = self
        applied.setdefault(self.stage.index, []).append(clip_factor)
        before = self.state()
        of_scaled(self, learning_rate, clip_factor)
        same = all(torch.equal(before[key], value) for key, value in self.state().items() if "/" in key)
        assert same == (clip_factor == 0.0)

    monkeypatch.setattr(TorchTrainingStage, "squared_norm", overflow)
    monkeypatch.setattr(LossScaled, "apply", apply)
    losses, _, _ = trained(tmp_path, "fp16")
    assert len(losses) == STEPS
    for stage in (0, 1):
        assert [clip == 0.0 for clip in applied[stage]] == [step == 2 for step in range(STEPS)]
        assert scaled[stage].state()["loss_scale"].tolist() == [FIRST / 2, STEPS - 3]
