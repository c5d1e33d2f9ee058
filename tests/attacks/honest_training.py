"""The honest training job of the ground: two stages on fixed data, so that every loss is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from safetensors.torch import save
from support.models import Chain
from support.staged import even_cuts
from torch import nn

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.manifest import CompressionConfig, DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.peer.plane_choice import TORCH, choose
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.planes.learning_rate import clip_factor, learning_rate
from fusion.runtime.planes.plane import RngKey, TrainingStage
from fusion.runtime.training.data.batches import Batches
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId

NAME = "training"
STAGES, MICROBATCHES, MICROBATCH_SIZE, SAMPLES = 2, 2, 4, 64
STEPS = 10**6  # more than any attack lasts
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)

Made = tuple[nn.Module, Graph, dict[str, torch.Tensor]]  # the model, its graph, all samples


@dataclass
class Committed:
    """What the peers print about the job (`start --tell-steps`): when each step was committed, and with which loss."""

    job: str = ""
    steps: list[tuple[float, int]] = field(default_factory=list)  # unix seconds, committed steps
    losses: dict[int, float] = field(default_factory=dict)  # by step, from 0
    twice: list[str] = field(default_factory=list)  # steps that were committed again with another loss
    ends: list[str] = field(default_factory=list)  # reports that the job has ended: it never does

    def hear(self, record: dict[str, Any]) -> None:
        if record.get("event") != "step" or record.get("job") != self.job:
            return
        step, loss = int(record["step"]), record.get("loss")
        if record.get("state") in ("done", "stopped", "failed"):
            self.ends.append(
                f"{record['state']} at step {step}: {record.get('error') or record.get('message')}"
            )
        if step < 1 or loss is None or (self.steps and self.steps[-1][1] == step):
            return
        self.steps.append((float(record["at"]), step))
        if self.losses.setdefault(step - 1, loss) != loss:
            self.twice.append(f"step {step - 1}: {self.losses[step - 1]} and then {loss}")

    def rate(self, since: float, until: float) -> float:
        """New steps a second, without those that are replayed."""
        reached = [
            max((step for at, step in self.steps if at <= limit), default=0) for limit in (since, until)
        ]
        return (reached[1] - reached[0]) / (until - since)

    async def begun(self, step: int) -> None:
        while not self.steps or self.steps[-1][1] < step:
            await asyncio.sleep(0.05)


def training_job(
    store: BlobStore,
    author: Identity,
    owners: Sequence[PeerId],
    *,
    name: str = NAME,
    steps: int = STEPS,
    of: Made | None = None,
) -> Prepared:
    """A job with a stage for each of the owners. Blocking, for a second unless `of` has the model."""
    module, graph, arrays = of or made()
    config = replace(_config(store.put(save(arrays))), steps=steps)
    job = GraphJob(name=name, graph=graph, variables=variables_from_module(module), author=author)
    cuts = even_cuts(graph, len(owners))
    return prepare_graph(job, as_requested(graph, config, cuts, owners), store)


def faults(committed: Committed, truth: TrueLosses) -> list[str]:
    """Why the committed steps are not those of an undisturbed run: empty when every loss is equal to the bit, and no
    peer has heard of an end. Blocking: computes all steps that were not yet."""
    found = committed.ends[:1] + committed.twice[:1]
    last = max(committed.losses, default=-1)
    for step, loss in enumerate(truth.first(last + 1)):
        told = committed.losses.get(step, loss)  # a commit that followed at once may hide one
        if told != loss:
            return [*found, f"the loss of step {step} is {told}, and should be {loss}"]
    return found


class TrueLosses:
    """The losses of an undisturbed run of the job: each is computed once."""

    def __init__(self, store: BlobStore, prepared: Prepared, plane: str = TORCH) -> None:
        config = prepared.manifest.train
        assert config is not None
        self._later = true_losses(store, config, prepared.manifest.stages, plane)
        self._known: list[float] = []

    def first(self, count: int) -> list[float]:
        """Of so many steps. Blocking."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._known += islice(self._later, max(0, count - len(self._known)))
        finally:
            torch.set_num_threads(threads)
        return self._known[:count]


def true_losses(
    store: BlobStore, config: TrainConfig, stages: int = STAGES, plane: str = TORCH
) -> Iterator[float]:
    """Yield the loss of each step, computed by the same stages in this process."""
    here = choose(plane, "cpu", 1)
    module, graph, arrays = made()
    batches = Batches(config, list(arrays), store.path(config.data.train), None)
    parts = split(graph, even_cuts(graph, stages))
    planes = [here.training(part, variables_from_module(module), OPTIMIZER) for part in parts]
    for step in range(config.steps):
        yield _step(planes, batches, step)


def _step(planes: Sequence[TrainingStage], batches: Batches, step: int) -> float:
    losses = []
    for microbatch in range(MICROBATCHES):
        values, key = batches.train(step, microbatch), RngKey(5, step, microbatch)
        for plane in planes:
            values.update(plane.forward(microbatch, values, key))
        losses.append(float(values["result/0"]))
        gradients: dict[str, torch.Tensor] = {}
        for plane in reversed(planes):
            received = {e.name: gradients[e.name] for e in plane.stage.sends if e.needs_gradient}
            gradients.update(plane.backward(microbatch, received, 1 / MICROBATCHES))
    norm = sum(plane.squared_norm() for plane in planes)
    for plane in planes:
        plane.apply(learning_rate(OPTIMIZER, step, STEPS), clip_factor(OPTIMIZER, norm))
    return sum(losses) / len(losses)


def made() -> Made:
    """The model, its graph and its samples. Blocking, for a second."""
    torch.manual_seed(1)
    module = Chain()
    arrays = {"x": torch.randn(SAMPLES, 6), "targets": torch.randn(SAMPLES, 3)}
    graph = clean(capture_module(module, {k: v[:MICROBATCH_SIZE] for k, v in arrays.items()}, nn.MSELoss()))
    return module, graph, arrays


def _config(data: Any) -> TrainConfig:
    return TrainConfig(
        steps=STEPS,
        microbatches=MICROBATCHES,
        microbatch_size=MICROBATCH_SIZE,
        sequence=0,
        seed=5,
        optimizer=OPTIMIZER,
        data=DataConfig(kind="arrays", train=data),
        snapshot_every=100,
        compression=CompressionConfig(live=False),
    )
