"""The models of examples/, trained over real peers, against the same in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.any_modules import EXAMPLES, example
from support.jobs import exported, run_to_end, with_client
from torch import nn

from fusion.cli.local.fleet import FleetError
from fusion.runtime.capture.python.python_model import PythonModel
from fusion.runtime.job import spec
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.job.spec import DataSpec, GPTConfig, JobSpec, PlacementSpec, PythonConfig
from fusion.runtime.launch.prepare import prepare_training
from fusion.runtime.planes.learning_rate import clip_factor, learning_rate
from fusion.runtime.training.data.batches import Batches
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId, call

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Tensors = dict[str, torch.Tensor]
ARRAYS = ("images", "labels")


def digits(folder: Path, width: int, steps: int) -> JobSpec:
    """The example's job, with so many channels and steps."""
    datasets = pytest.importorskip("sklearn.datasets")
    import numpy as np

    found = datasets.load_digits()
    np.savez(folder / "digits.npz", images=found.images[:, None].astype(np.float32) / 16, labels=found.target)
    for name in ("model.py", "job.toml"):
        (folder / name).write_bytes((EXAMPLES / "digits-resnet" / name).read_bytes())
    job = spec.load(folder / "job.toml")
    assert isinstance(job.model, PythonConfig)
    return replace(
        job,
        model=replace(job.model, arguments={"width": width}),
        train=replace(job.train, steps=steps, evaluate_every=0),
        placement=PlacementSpec(stages=3),
    )


@dataclass
class Outcome:
    loss: float
    state: Tensors


def one_process(module: nn.Module, loss: Any, config: TrainConfig, batches: Batches) -> Outcome:
    torch.set_num_threads(1)
    o = config.optimizer
    adam = torch.optim.AdamW(
        module.parameters(), lr=1.0, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    total = 0.0
    for step in range(config.steps):
        total = 0.0
        for microbatch in range(config.microbatches):
            batch = batches.train(step, microbatch)
            made = loss(module(batch["images"]), batch["labels"])
            (made / config.microbatches).backward()
            total += float(made.detach()) / config.microbatches
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        factor = clip_factor(o, sum(float(g.double().square().sum()) for g in gradients))
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        adam.param_groups[0]["lr"] = learning_rate(o, step, config.steps)
        adam.step()
        adam.zero_grad()
    return Outcome(total, dict(module.state_dict()))


def accuracy(module: nn.Module, state: Tensors, held_out: Tensors) -> float:
    module.load_state_dict(state, strict=True)
    module.eval()
    with torch.no_grad():
        right = module(held_out["images"]).argmax(1) == held_out["labels"]
    return float(right.float().mean())


@pytest.mark.parametrize(("width", "steps"), [(8, 150)])
def test_resnet_101_learns_digits_over_three_peers_as_in_one_process(
    peers: Any, tmp_path: Path, width: int, steps: int
) -> None:
    swarm = peers.swarm(3)
    job = digits(tmp_path, width, steps)
    assert isinstance(job.model, PythonConfig)
    own = PythonModel(job.model, ARRAYS, job.train.seed)

    async def train(context: Context) -> tuple[Outcome, Outcome, Tensors, int]:
        records: list[PeerRecord] = []
        while len(records) < len(swarm):
            records = [p for p in await context.directory.peers() if p.role == "peer"]
            await asyncio.sleep(0.2)
        prepared = await asyncio.to_thread(prepare_training, job, records, context.blobs.store)
        config, store = prepared.manifest.train, context.blobs.store
        assert config is not None and config.data.held_out is not None
        batches = Batches(config, ARRAYS, store.path(config.data.train), store.path(config.data.held_out))
        progress = await run_to_end(context, prepared, seconds=3000)
        found = await exported(context, prepared, tmp_path / "out")
        assert progress.loss is not None
        single = await asyncio.to_thread(one_process, own.module, own._loss, config, batches)
        held_out = batches._held_out
        assert held_out is not None
        return (
            Outcome(progress.loss, found),
            single,
            held_out.read(range(held_out.samples), ARRAYS),
            len(set(prepared.manifest.proposed)),
        )

    many, one, held_out, owners = with_client(peers.root / "client", swarm[0].address, train)
    assert owners == 3
    accuracies = [accuracy(own.module, outcome.state, held_out) for outcome in (many, one)]
    worst = {
        kind: max(
            float((many.state[n].double() - v.double()).norm() / v.double().norm().clamp(min=1e-9))
            for n, v in one.state.items()
            if n.endswith(kind)
        )
        for kind in ("running_mean", "running_var", "weight", "num_batches_tracked")
    }
    print(
        f"held-out accuracy {accuracies[0]:.4f}, in one process {accuracies[1]:.4f}; loss {many.loss:.6f}, {one.loss:.6f}"
    )
    print(f"largest relative differences: { {k: f'{v:.1e}' for k, v in worst.items()} }")
    assert accuracies[0] >= 0.97
    assert abs(accuracies[0] - accuracies[1]) <= 0.005
    assert worst["num_batches_tracked"] == 0.0
    assert max(worst.values()) <= 1e-4


def gpt2(folder: Path, sequence: int) -> JobSpec:
    """The example's job on this repository's own text, for two steps of four samples."""
    job = spec.load(EXAMPLES / "gpt2.toml")
    assert isinstance(job.model, GPTConfig)
    return replace(
        job,
        model=replace(job.model, sequence=1024),
        data=DataSpec(files=tuple(sorted(EXAMPLES.parent.glob("docs/*.md")))),
        train=replace(
            job.train, steps=2, sequence=sequence, microbatches=4, snapshot_every=1000, evaluate_every=0
        ),
        placement=PlacementSpec(stages=4),
    )


def test_gpt2_over_four_peers_fits_16_gib(peers: Any, tmp_path: Path) -> None:
    """What a peer's process grows by while it trains, over its share of weights, gradients, optimizer state and activations
    in flight, as placement counts it. A peer with room also has the state of a stage in memory that it stands by for: a fifth
    one is there to do that, and who does so all the same may be as much larger."""
    *swarm, standby = peers.swarm(5)
    idle = {peer.peer_id: _resident_bytes(peer) for peer in swarm}
    most, for_others = dict(idle), dict.fromkeys(idle, 0)

    async def train(context: Context) -> tuple[dict[str, int], int]:
        records: list[PeerRecord] = []
        while len(records) <= len(swarm):
            records = [p for p in await context.directory.peers() if p.role == "peer"]
            await asyncio.sleep(0.2)
        owners = [record for record in records if record.peer != standby.peer_id]
        prepared = await asyncio.to_thread(
            prepare_training, gpt2(tmp_path, sequence=256), owners, context.blobs.store
        )
        manifest = prepared.manifest
        watching = asyncio.create_task(watch_memory(context, manifest.proposed))
        try:
            await run_to_end(context, prepared, seconds=3000)
        finally:
            watching.cancel()
        return dict(zip(manifest.proposed, manifest.memory_bytes, strict=True)), prepared.parameters

    async def watch_memory(context: Context, owners: Sequence[PeerId]) -> None:
        while True:
            for peer in swarm:
                most[peer.peer_id] = max(most[peer.peer_id], _resident_bytes(peer))
            for stage, owner in enumerate(owners):
                with suppress(SwarmError):
                    status = await call(context.transport, owner, STATUS.name, "status")
                    others = sum(size for _, held, size in status.header["holds"] if held != stage)
                    for_others[owner] = max(for_others[owner], others)
            await asyncio.sleep(0.2)

    shares, parameters = with_client(peers.root / "client", swarm[0].address, train)
    ratios = {peer: (most[peer] - idle[peer]) / (share + for_others[peer]) for peer, share in shares.items()}
    for peer, share in shares.items():
        print(
            f"share {share / 2**20:.0f} MiB, and of others {for_others[peer] / 2**20:.0f}, grew by {(most[peer] - idle[peer]) / 2**20:.0f} from {idle[peer] / 2**20:.0f}: "
            f"{ratios[peer]:.2f}"
        )
    print(f"{parameters:,} parameters, in all {sum(most.values()) / 2**30:.2f} GiB")
    assert len(shares) == 4 and parameters > 120_000_000
    assert sum(most.values()) <= 16 << 30
    assert max(ratios.values()) <= 1.3
    assert sum(not for_others[peer] for peer in shares) >= 2


def _resident_bytes(peer: Any) -> int:
    return int(psutil.Process(peer.process.pid).memory_info().rss)


def test_a_trained_unet_is_exported_served_and_asked_by_the_commands(peers: Any, tmp_path: Path) -> None:
    import numpy as np

    swarm = peers.swarm(2)
    way = ("--bootstrap", swarm[0].address)
    draw = np.random.default_rng(0)
    images = draw.normal(size=(40, 1, 16, 16)).astype(np.float32)
    np.savez(
        tmp_path / "discs.npz",
        images=images,
        masks=(images > 0).astype(np.float32),
        areas=images.mean((1, 2, 3)),
    )
    (tmp_path / "model.py").write_bytes((EXAMPLES / "unet" / "model.py").read_bytes())
    job = (EXAMPLES / "unet" / "job.toml").read_text().replace("steps = 300", "steps = 3")
    (tmp_path / "job.toml").write_text(job + "\n[placement]\nstages = 2\n")
    launched = peers.run("train", str(tmp_path / "job.toml"), *way)
    name = next(record["job"] for record in launched if record.get("event") == "launched")
    peers.run("jobs", "export", name, str(tmp_path / "out"), *way)
    peers.run("serve", str(tmp_path / "out"), "--name", "unet", "--stages", "2", *way)
    np.savez(tmp_path / "x.npz", images=images[:6])
    answer = peers.run(
        "run",
        "unet",
        "--input",
        str(tmp_path / "x.npz"),
        "--output",
        str(tmp_path / "y.npz"),
        "--batch",
        "4",
        *way,
    )[-1]
    assert answer["outputs"] == {"mask": [6, 1, 16, 16], "area": [6]} and len(set(answer["route"])) == 2
    module = example("unet").model()
    module.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    module.eval()
    with torch.no_grad():
        wanted = module(torch.from_numpy(images[:6]))
    with np.load(tmp_path / "y.npz") as made:
        for output, value in wanted.items():
            torch.testing.assert_close(torch.from_numpy(made[output]), value)
    np.savez(tmp_path / "x.npz", pictures=images[:6])
    with pytest.raises(
        FleetError, match=r"--input: images is missing; the model takes images float32\[batch, 1, 16, 16\]"
    ):
        peers.run(
            "run", "unet", "--input", str(tmp_path / "x.npz"), "--output", str(tmp_path / "y.npz"), *way
        )
    with pytest.raises(FleetError, match="generates nothing; ask it with: fusion-peer run unet"):
        peers.run("generate", "--prompt-ids", "1", "--model", "unet", *way)
