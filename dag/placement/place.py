"""Which peer runs which stage: the facade over the schedulers, compared by the step model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from fusion.dag.cutting.memory import MemoryConfig
from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.baselines import equal_flops, equal_ops, exact, too_large
from fusion.dag.placement.codec_cost import CodecCost
from fusion.dag.placement.local_moves import improve
from fusion.dag.placement.misfit import DoesNotFit, size_text
from fusion.dag.placement.network import Network
from fusion.dag.placement.op_fence import op_fence
from fusion.dag.placement.pipeline import Layout, Schedule, pipeline, uniform
from fusion.dag.placement.replicas import replicate
from fusion.dag.placement.search_space import Choice, Space, space
from fusion.dag.placement.segments import measure
from fusion.dag.placement.shortlist import shortlist
from fusion.dag.placement.step_model import Prediction, step_seconds

# Orders that local moves try on the best placement, where another scheduler than OP-Fence found it.
_TRIES = 24
Scheduler = Literal["op-fence", "equal-ops", "equal-flops", "exact"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`owners[i]` runs stage i of `split(graph, cuts)`. Seconds are predicted: of a step (training) or of running the
    sequence once (serving), and of each stage alone for one microbatch, its share of the optimizer's work included."""

    cuts: tuple[int, ...]
    owners: tuple[str, ...]
    replicas: tuple[tuple[str, ...], ...]  # by stage: peers that serve it beside its owner
    left_out: tuple[str, ...]  # peers without a stage
    microbatches: int
    training: bool
    schedule: Schedule
    depth: int  # of 1f1b
    predicted_seconds: float
    stage_seconds: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]  # in the forward pass over each cut, for one microbatch
    prediction: Prediction


def place(
    graph: Graph,
    network: Network,
    sizes: Mapping[str, int],
    microbatches: int,
    *,
    stages: int | None = None,
    training: bool = True,
    scheduler: Scheduler = "op-fence",
    wire: CodecCost | None = None,
    memory: MemoryConfig = MemoryConfig(),  # noqa: B008 - frozen
    gpipe: bool = False,
) -> Placement:
    """The fastest placement found, of exactly `stages` stages on as many devices, or, with None, of as many as help.

    `sizes` are those of one microbatch. "op-fence" runs the others as well, and by the model is never slower than any
    of them; the others run alone, for comparison. `wire` is the codec of every floating-point value; `gpipe`: the job will
    run that schedule, which holds all microbatches at once.
    PlacementError if there are too few devices or cuts, the model does not fit their memory, or the chosen scheduler does
    not place it.
    """
    if microbatches < 1:
        raise PlacementError(f"microbatches must be at least 1, not {microbatches}")
    if not network.devices:
        raise PlacementError("there is no peer to place the model on")
    options = space(
        graph,
        shortlist(network),
        sizes,
        microbatches,
        training=training,
        stages=stages,
        wire=wire,
        memory=memory,
        gpipe=gpipe,
    )
    if stages is not None and not 1 <= stages <= options.most_stages:
        raise PlacementError(
            f"{stages} stages were asked for: there are {len(network.devices)} peers, and the model can be cut into "
            f"{len(options.segments.bounds) - 1}"
        )
    proposed = [choice for find in _SCHEDULERS[scheduler] if (choice := find(options)) is not None]
    ranked = sorted(((options.estimate(c), c) for c in proposed), key=lambda item: (item[0].seconds, item[1]))
    if not ranked or not np.isfinite(ranked[0][0].seconds):
        raise _failure(
            options, scheduler, ranked[0][1] if ranked else None, microbatches if training else None
        )
    estimate, choice = ranked[0]
    if scheduler == "op-fence" and choice != proposed[0]:
        estimate, choice = improve(options, ranked[0], _TRIES)
    layout = Layout(
        cuts=tuple(options.segments.bounds[b] for b in choice.bounds[1:-1]),
        owners=tuple(options.network.devices[d].peer for d in choice.order),
        microbatches=microbatches,
        training=training,
        schedule=estimate.schedule,
        depth=estimate.depth,
    )
    return _predicted(graph, layout, options, network, sizes, wire, memory)


def _exact(options: Space) -> Choice | None:
    optimum = exact(options)
    return optimum.choice if optimum else None


_SCHEDULERS: dict[Scheduler, tuple[Callable[[Space], Choice | None], ...]] = {
    "op-fence": (op_fence, equal_flops, equal_ops, _exact),
    "equal-ops": (equal_ops,),
    "equal-flops": (equal_flops,),
    "exact": (_exact,),
}


def _predicted(
    graph: Graph,
    layout: Layout,
    options: Space,
    network: Network,
    sizes: Mapping[str, int],
    wire: CodecCost | None,
    memory: MemoryConfig,
) -> Placement:
    cuts, owners, training, microbatches = layout.cuts, layout.owners, layout.training, layout.microbatches
    edge_costs = {} if wire is None else uniform(graph, sizes, wire)
    placed = pipeline(graph, layout, network, sizes, edge_costs, memory)
    prediction = step_seconds(placed)
    spare = [d for d in options.network.devices if d.peer not in owners]
    segments = measure(graph, cuts, sizes, training, memory)
    replicas = (
        tuple(() for _ in owners)
        if training
        else replicate(segments, [network.device(owner) for owner in owners], spare)
    )
    busy = {*owners, *(peer for peers in replicas for peer in peers)}
    return Placement(
        cuts=cuts,
        owners=owners,
        replicas=replicas,
        left_out=tuple(d.peer for d in network.devices if d.peer not in busy),
        microbatches=microbatches,
        training=training,
        schedule=layout.schedule,
        depth=layout.depth,
        predicted_seconds=prediction.seconds,
        stage_seconds=tuple(
            s.forward_seconds + s.backward_seconds + s.update_seconds / microbatches for s in placed.stages
        ),
        memory_bytes=tuple(s.memory_bytes for s in placed.stages),
        sent_bytes=tuple(int(b) for b in segments.forward_bytes[1:-1]),
        prediction=prediction,
    )


def _failure(
    options: Space, scheduler: Scheduler, proposed: Choice | None, microbatches: int | None
) -> PlacementError:
    """The error where there is no placement; `proposed` is what the scheduler chose, if anything. That a baseline finds none
    does not mean that the model does not fit."""
    if scheduler == "exact" and (reason := too_large(options)):
        return PlacementError(f"exact: {reason} (op-fence places any number)")
    if scheduler in ("equal-ops", "equal-flops") and proposed is not None:
        held = options.min_in_flight(len(proposed.order))
        for s, (first, last) in enumerate(pairwise(proposed.bounds)):
            device = options.network.devices[proposed.order[s]]
            needed = float(options.segments.memory(first, last, held[s]))
            if needed > device.memory_bytes:
                return PlacementError(
                    f"{scheduler}: its stage {s} needs {size_text(needed)}, and {device.peer}, whose turn it is, "
                    f"offers {size_text(device.memory_bytes)} (op-fence looks for who has room)"
                )
    return _misfit(options, microbatches)


def _misfit(options: Space, microbatches: int | None) -> DoesNotFit:
    stages = options.stages
    segments, held, count = options.segments, int(options.min_in_flight(1)[0]), len(options.segments.bounds)
    where = f" in {stages} stages" if stages else ""
    where += f" with {microbatches} microbatches" if microbatches else ""
    needed = f"the model does not fit{where}: it needs at least "
    needed += size_text(float(segments.memory(0, -1, held)))
    first = np.arange(count - 1)
    piece = float(segments.memory(first, first + 1, held).max())
    if count > 2 and piece > options.memory.max():
        needed += f", of it {size_text(piece)} on one peer"
    return DoesNotFit(needed, [(d.peer, d.memory_bytes) for d in options.network.devices])
