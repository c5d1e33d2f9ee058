"""A job launched over slow links trains with the codecs that were chosen for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.captured_once import capture_once
from support.training import Job, record_of_peer, run, swarm

from fusion.runtime.capture import capture
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.spec import load
from fusion.runtime.launch.prepare import prepare_training
from fusion.swarm.directory.records import LinkRecord, Pair

JOB = """
name = "fox"
[model]
kind = "gpt"
blocks = 2
width = 16
heads = 2
[data]
files = ["text.txt"]
[train]
steps = 4
sequence = 8
microbatches = 2
[placement]
stages = 2
[compression]
kind = "adaptive"
ratio = 16
families = ["int8", "topk"]
"""


def test_the_manifest_carries_the_codecs_and_the_stages_send_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_once(monkeypatch, capture)
    (tmp_path / "text.txt").write_text("the quick brown fox " * 50)
    (tmp_path / "job.toml").write_text(JOB)

    async def main() -> None:
        async with swarm(tmp_path, 3) as made:
            context = made.peers[0].context
            records = [record_of_peer(peer) for peer in made.peers[1:]]
            ids = [record.peer for record in records]
            links = [
                LinkRecord(peer=a, pairs=(Pair(b, 50.0, 0.1, 1.0),))
                for a, b in zip(ids, ids[::-1], strict=True)
            ]
            prepared = await asyncio.to_thread(
                prepare_training, load(tmp_path / "job.toml"), records, context.blobs.store, links=links
            )
            train = manifests.decode(context.blobs.store.path(prepared.job).read_bytes()).train  # type: ignore[arg-type]
            assert train is not None and prepared.plan is not None
            sparse = [way for way in train.codecs if way[1].startswith("topk:")]
            assert sparse and all(forward == backward for _, forward, backward in sparse)
            assert ("tokens.weight", "int8", "none") in train.codecs

            owners = [1 + ids.index(owner) for owner in prepared.manifest.proposed]
            progress = await run(made, Job(prepared, tmp_path, tmp_path), owners)
            assert progress.state == "done" and progress.step == 4
            planned = sum(link.activation_bytes + link.gradient_bytes for link in prepared.plan.links)
            ties = 2 * 4 * 256 * 16 * (1 / 4 + 2 / 64 / 4)  # int8 and a scale of 64, each way
            # Evaluation, too, sends activations.
            assert progress.sent_bytes >= train.steps * (planned + ties)
            dense = sum(4 * 2 * 4 * 8 * 16 for link in prepared.plan.links) + 2 * 4 * 256 * 16
            assert progress.sent_bytes < train.steps * dense / 2

    asyncio.run(main())
