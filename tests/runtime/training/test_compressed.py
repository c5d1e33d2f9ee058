"""Training with codecs between the stages: it learns, it weighs what was planned, and an accident changes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import (
    LONG,
    TINY,
    assert_bit_identical,
    compressed,
    config,
    exported_weights,
    language_job,
    reached,
    record_of,
    run,
    stopped,
    swarm,
    undisturbed,
    until,
)

from fusion.compression.spec import parse
from fusion.dag.cutting.cuts import split, tie_groups
from fusion.dag.ir import serialise
from fusion.dag.ir.dims import bind
from fusion.dag.ir.graph import DTYPE_BYTES
from fusion.runtime.capture.models import GPT
from fusion.runtime.launch.launch import launch
from fusion.runtime.training.snapshots import snapshot

# (forward, backward, more of the configuration)
WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("int8", "int8", {"error_feedback": True}),
    ("topk:0.2", "topk:0.2", {}),
    ("topk:0.2", "topk:0.1", {"reuse_mask": False, "error_feedback": True}),
]


@pytest.mark.parametrize(("forward", "backward", "how"), WAYS)
def test_it_trains_and_sends_the_bytes_that_were_planned(
    tmp_path: Path, forward: str, backward: str, how: dict[str, Any]
) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        train = compressed(module, 3, forward, backward, config(evaluate_batches=1), **how)
        async with swarm(tmp_path, 3) as made:
            work = language_job(made.peers[0], module, train, 3)
            progress = await run(made, work, range(3))
            assert progress.state == "done" and progress.validation_loss is not None
            losses = [loss for _, loss in made.peers[0].service.losses(work.prepared.job)]
            assert losses[-1] < losses[0]
            manifest = work.prepared.manifest
            stages = split(
                serialise.decode(made.peers[0].context.blobs.store.path(manifest.graph).read_bytes()),
                manifest.cuts,
            )
            assert progress.sent_bytes == planned_bytes(stages, forward, backward, how, train)
            # What codecs left out lies beside the weights, and is none of them.
            weights = await exported_weights(made.peers[0], work, tmp_path / "out")
            module.load_state_dict(weights, strict=True)

    asyncio.run(main())


def planned_bytes(stages: Any, forward: str, backward: str, how: dict[str, Any], train: Any) -> int:
    """Payload until the last step's ready: what placement counts on."""
    sizes = train.sizes
    total = 0
    for stage in stages:
        for edge in stage.sends:
            elements = 1
            for dim in edge.type.shape:
                elements *= bind(dim, sizes)
            item = DTYPE_BYTES[edge.type.dtype]
            if "float" not in edge.type.dtype:
                there = back = elements * item
            else:
                there = parse(forward).payload_bytes(elements, item)
                masked = forward.startswith("topk") and how.get("reuse_mask", True)
                spec = parse(forward if masked else backward)
                back = spec.payload_bytes_at(elements, item) if masked else spec.payload_bytes(elements, item)
            each = there + back * edge.needs_gradient
            total += each * len(edge.consumers) * train.microbatches * train.steps
    for group in tie_groups(stages):
        variable = next(v for s in stages for v in s.graph.variables if v.name == group.variable)
        elements = 1
        for dim in variable.type.shape:
            elements *= int(dim)
        others = len(group.stages) * (len(group.stages) - 1)
        total += parse("int8").payload_bytes(elements, 4) * others * train.steps
    return total


@pytest.mark.parametrize(
    ("forward", "backward", "how"),
    [*WAYS[:1], *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[1:])],
)
def test_a_killed_stage_changes_nothing_and_neither_does_one_that_is_handed_over(
    tmp_path: Path, forward: str, backward: str, how: dict[str, Any]
) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        train = compressed(module, 3, forward, backward, LONG, **how)
        async with swarm(tmp_path / "rough", 5) as made:
            lead, _, victim, spare, successor = made.peers
            work = language_job(lead, module, train, 3)
            await launch(lead.context, work.prepared)
            for stage in range(3):
                await made.peers[stage].host(work.prepared, stage)
            seen = await reached(lead, work, 4, snapshot_step=3)
            await spare.stand_by(work.prepared, 2, record_of(lead, work, seen))
            await made.kill(victim)
            left = await reached(lead, work, 4)
            await reached(lead, work, left.step + 3)
            job = work.prepared.job
            await until(lambda: spare.holds(job, 2) > 0)
            handover = await spare.service.pass_on(job, 2)
            successor.work[job] = work.prepared.manifest
            word = spare.release(job, 2, successor)
            assert await successor.take_over(job, 2, spare.holds(job, 2), handover, word) is not None
            await reached(lead, work, int(handover["step"]) + 3)
            spare.tasks.pop(2).cancel()
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1, train))

    asyncio.run(main())


def test_what_a_codec_left_out_is_lost_without_a_snapshot_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that the test above can fail."""

    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        forward, backward, how = WAYS[2]
        train = compressed(module, 2, forward, backward, replace(LONG, snapshot_every=1), **how)
        async with swarm(tmp_path / "rough", 3) as made:
            lead, before, successor = made.peers
            work = language_job(lead, module, train, 2)
            await launch(lead.context, work.prepared)
            await lead.host(work.prepared, 0)
            await before.host(work.prepared, 1)
            await reached(lead, work, 4)
            monkeypatch.setattr(snapshot, "residuals", lambda state: {})
            job = work.prepared.job
            handover = await before.service.pass_on(job, 1)
            successor.work[job] = work.prepared.manifest
            await successor.take_over(
                job, 1, before.holds(job, 1), handover, before.release(job, 1, successor)
            )
            await reached(lead, work, int(handover["step"]) + 4)
            before.tasks.pop(1).cancel()
            losses = await stopped(made, lead, work)
        monkeypatch.undo()
        calm = await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1, train)
        assert losses != {step: calm[step] for step in losses}

    asyncio.run(main())
