"""A placement as work on machines: what each stage computes, what flows between stages, and over which links.

`fusion.dag.placement.step_model` predicts a pipeline's step in closed form, `fusion.dag.placement.simulate` simulates it event by event.
Both read nothing else, so they can differ in queueing only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fusion.dag.cutting.crossing import crossing
from fusion.dag.cutting.memory import MemoryConfig
from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.codec_cost import DENSE, CodecCost
from fusion.dag.placement.network import Network
from fusion.dag.placement.schedule import Action, actions, in_flight
from fusion.dag.placement.schedule import Schedule as Schedule
from fusion.dag.placement.segments import measure
from fusion.dag.placement.speeds import NODES

# By (edge name, "forward" or "backward"); dense where one is missing
EdgeCosts = Mapping[tuple[str, str], CodecCost]


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """The work of one stage on the device that runs it."""

    forward_seconds: float  # one microbatch
    backward_seconds: float
    update_seconds: float  # once a step
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One value from the stage that produces it to one that consumes it, and its gradient in the other direction."""

    name: str  # of the edge
    producer: int
    consumer: int
    elements: int
    forward: CodecCost
    backward: CodecCost | None  # None where no gradient comes back

    @property
    def forward_bytes(self) -> float:
        return self.forward.bytes(self.elements)

    @property
    def backward_bytes(self) -> float:
        return self.backward.bytes(self.elements) if self.backward else 0.0


class Placed(Protocol):
    """The fields of a placement that a pipeline is built from."""

    @property
    def cuts(self) -> tuple[int, ...]: ...
    @property
    def owners(self) -> tuple[str, ...]: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def training(self) -> bool: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def depth(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A placement without its prediction."""

    cuts: tuple[int, ...]
    owners: tuple[str, ...]
    microbatches: int
    training: bool = True
    schedule: Schedule = "1f1b"
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A placement with the work of its stages and flows. In serving there is no backward pass: a step is one forward pass of
    each microbatch."""

    stages: tuple[StageLoad, ...]
    flows: tuple[
        Flow, ...
    ]  # by producer, then in the order in which it computes its values, then by consumer
    owners: tuple[str, ...]  # stages[i] runs on owners[i]
    network: Network
    microbatches: int
    training: bool
    schedule: Schedule
    depth: int  # of 1f1b

    def __post_init__(self) -> None:
        if len(self.owners) != len(self.stages) or not self.stages:
            raise ValueError(f"pipeline: {len(self.stages)} stages and {len(self.owners)} owners")
        if self.microbatches < 1 or self.depth < 1:
            raise ValueError("pipeline: microbatches and depth must be at least 1")

    def in_flight(self, stage: int) -> int:
        """The most microbatches that a stage holds at once."""
        return max_in_flight(
            stage, len(self.stages), self.microbatches, self.training, self.schedule, self.depth
        )

    def actions(self, stage: int) -> tuple[Action, ...]:
        """The passes that the stage runs in a step, in order."""
        if not self.training:
            return tuple(Action("forward", m) for m in range(self.microbatches))
        return actions(self.schedule, stage, len(self.stages), self.microbatches, self.depth)


def max_in_flight(
    stage: int, stages: int, microbatches: int, training: bool, schedule: Schedule, depth: int
) -> int:
    """The most microbatches that a stage holds at once."""
    if not training:
        return 1
    if schedule == "gpipe":
        return microbatches
    return in_flight(stage, stages, microbatches, depth)


def uniform(graph: Graph, sizes: Mapping[str, int], wire: CodecCost) -> EdgeCosts:
    """The same codec for every floating-point value, in both directions."""
    values = crossing(graph, sizes)
    floating = [name for name, dtype in zip(values.names, values.dtypes, strict=True) if "float" in dtype]
    return {(name, direction): wire for name in floating for direction in ("forward", "backward")}


def pipeline(
    graph: Graph,
    placement: Placed,
    network: Network,
    sizes: Mapping[str, int],
    edge_costs: EdgeCosts | None = None,
    memory: MemoryConfig = MemoryConfig(),  # noqa: B008 - frozen
) -> Pipeline:
    """The pipeline of a placement. Its edges are those of `split(graph, placement.cuts)`; a value that skips stages is sent
    directly to each consumer. `sizes` are those of one microbatch. PlacementError if an owner is not in the network."""
    edge_costs = edge_costs or {}
    missing = [owner for owner in placement.owners if owner not in network.index]
    if missing:
        raise PlacementError(f"{missing[0]:.80} owns a stage and is not in the network")
    segments = measure(graph, placement.cuts, sizes, placement.training, memory)
    count = len(placement.owners)
    first = np.arange(count)
    devices = [network.device(owner) for owner in placement.owners]
    seconds = np.stack([d.speeds.seconds for d in devices], axis=1)
    updated_byte_seconds = np.array([d.speeds.updated_byte for d in devices])
    in_flights = [
        max_in_flight(
            s, count, placement.microbatches, placement.training, placement.schedule, placement.depth
        )
        for s in range(count)
    ]
    forward, backward = segments.passes(first, first + 1, seconds)
    update = segments.updates(first, first + 1, updated_byte_seconds, seconds[NODES])
    needed = segments.memory(first, first + 1, np.array(in_flights))
    stages = tuple(
        StageLoad(
            forward_seconds=float(forward[s]),
            backward_seconds=float(backward[s]),
            update_seconds=float(update[s]),
            memory_bytes=int(needed[s]),
        )
        for s in range(count)
    )
    values = crossing(graph, sizes)
    flows = []
    for v, producer, consumer in zip(*values.edges(placement.cuts), strict=True):
        name, dense = values.names[v], DENSE[values.dtypes[v]]
        returns = placement.training and bool(values.gradient[v])
        flows.append(
            Flow(
                name=name,
                producer=int(producer),
                consumer=int(consumer),
                elements=int(values.elements[v]),
                forward=edge_costs.get((name, "forward"), dense),
                backward=edge_costs.get((name, "backward"), dense) if returns else None,
            )
        )
    return Pipeline(
        stages=stages,
        flows=tuple(flows),
        owners=placement.owners,
        network=network,
        microbatches=placement.microbatches,
        training=placement.training,
        schedule=placement.schedule,
        depth=placement.depth,
    )
