"""The stages of a job in one process, with everything that they send encoded and decoded as between peers.

No network: each stage is run by its `Rad`, which sends straight into the inboxes of the others. What is left is the
arithmetic of a pipeline over slow links, as fast as one core allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch

from fusion.dag.cutting.cuts import split, tie_groups
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.sources import Read
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.job.worker import Worker
from fusion.runtime.planes.learning_rate import SKIPPED, clip_factor, learning_rate
from fusion.runtime.planes.plane import TrainingStage
from fusion.runtime.planes.torch_plane import TorchTrainingStage
from fusion.runtime.training.compute.device_calls import DeviceCalls
from fusion.runtime.training.compute.inbox import Inbox, StagePlan
from fusion.runtime.training.compute.loss_scale import LossScaled
from fusion.runtime.training.compute.rad import Rad
from fusion.runtime.training.compute.stage_codecs import StageCodecs
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.step.faults import overflowed
from fusion.swarm.transport import Buffer, Frame

P = ParamSpec("P")
T = TypeVar("T")
ATTEMPT = (1, 1)


class Line:
    """All stages of a job. `sent_bytes`: payload between stages so far; `skipped`: steps in which a gradient overflowed."""

    def __init__(
        self,
        graph: Graph,
        cuts: Sequence[int],
        read: Read,
        config: TrainConfig,
        train: Path,
        held_out: Path,
        device: str = "cpu",
    ) -> None:
        self.sent_bytes = self.skipped = 0
        self._config = config
        self._arriving: set[asyncio.Future[None]] = set()
        parts = split(graph, cuts)
        ties = tie_groups(parts)
        sizes = config.sizes
        made = [
            TorchTrainingStage(part, read(part.graph.variables), config.optimizer, device) for part in parts
        ]
        self._planes: list[TrainingStage] = [
            LossScaled(stage) if config.precision == "fp16" else stage for stage in made
        ]
        plans = [
            StagePlan(
                stage=part,
                stages=len(parts),
                ties=tuple(tie for tie in ties if part.index in tie.stages),
                sizes=sizes,
            )
            for part in parts
        ]
        self._codecs = [StageCodecs(config) for _ in parts]
        self._rads = [
            Rad(
                plan,
                config,
                plane,
                DeviceCalls(plan, cast(Worker, _Here())),
                _batches(config, plan.stage, train, held_out),
                Inbox(plan, config, codecs),
                self._send_from(plan.stage.index),
            )
            for plan, plane, codecs in zip(plans, self._planes, self._codecs, strict=True)
        ]

    async def step(self, step: int) -> float:
        """Run and commit one step. Returns the training loss."""
        reports = await asyncio.gather(*(rad.step(ATTEMPT, step) for rad in self._rads))
        rate = learning_rate(self._config.optimizer, step, self._config.steps)
        norm = sum(report.squared_norm for report in reports)
        skips = self._config.precision == "fp16" and overflowed(reports)
        clip = SKIPPED if skips else clip_factor(self._config.optimizer, norm)
        self.skipped += skips
        for rad in self._rads:
            await rad.apply(rate, clip)
        return next(report.loss for report in reports if report.loss is not None)

    async def evaluate(self, step: int) -> float:
        """The validation loss of the state of `step`."""
        losses = await asyncio.gather(*(rad.evaluate(ATTEMPT, step) for rad in self._rads))
        return next(loss for loss in losses if loss is not None)

    def variables(self) -> dict[str, torch.Tensor]:
        """The values of all variables after the last step."""
        states = [plane.state() for plane in self._planes]
        found = {name: value for state in states for name, value in state.items()}
        return {
            name.removeprefix("variable/"): v for name, v in found.items() if name.startswith("variable/")
        }

    def _send_from(self, source: int) -> Callable[[int, str, Mapping[str, Any], Sequence[Buffer]], None]:
        def send(target: int, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer]) -> None:
            # A copy, as on a wire: the sender goes on with its own memory.
            data = memoryview(bytearray().join(payload))
            self.sent_bytes += data.nbytes
            frame = Frame(kind, {**header, "term": 1}, data)
            work = self._rads[target].inbox.offer(source, frame)
            if work is not None:
                arriving = asyncio.ensure_future(work)
                self._arriving.add(arriving)
                arriving.add_done_callback(self._arriving.discard)

        return send


class _Here:
    """A worker that runs each call at once, in the calling thread."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)


def _batches(config: TrainConfig, part: Stage, train: Path, held_out: Path) -> Batches:
    received = {edge.name for edge in part.receives}
    inputs = [given.name for given in part.graph.inputs if given.name not in received]
    needed = Batches.needs_blobs(config, inputs)
    return Batches(config, inputs, train if needed else None, held_out if needed else None)
