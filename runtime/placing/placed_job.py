"""Where the stages of a job are to run, as its manifest says it: cuts, owners, memory, schedule and codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from fusion.compression.codec_speed import measure_families
from fusion.dag.cutting.costs import cache_bytes_per_position, stage_cost
from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.place import place
from fusion.dag.placement.schedule import in_flight
from fusion.runtime.job.manifest import ServeConfig, TrainConfig
from fusion.runtime.job.manifest_wire import MAX_REPLICAS
from fusion.runtime.placing.codec_choice import elements_of, ties_of
from fusion.runtime.placing.codec_placement import codec_families, place_with_codecs
from fusion.runtime.placing.known_network import KnownNetwork, known_network
from fusion.runtime.placing.plan import Plan, planned
from fusion.runtime.serving.ring_frames import hop_bytes
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.links.view import link_view
from fusion.swarm.transport import PeerId

Config = TrainConfig | ServeConfig

_RESIDUAL_BYTES = 4  # an element of what error feedback keeps


@dataclass(frozen=True, kw_only=True)
class Placed:
    config: Config  # of a training job with the schedule and codecs that were chosen
    cuts: tuple[int, ...]
    parts: tuple[Stage, ...]
    proposed: tuple[PeerId, ...]
    replicas: tuple[tuple[PeerId, ...], ...]  # by stage: who is to serve it beside its owner; or empty
    memory_bytes: tuple[int, ...]  # that each stage needs
    predicted_seconds: float = 0.0  # a step, or the longest prompt once through; 0: not known
    plan: Plan | None = None


def as_asked(
    graph: Graph,
    config: Config,
    cuts: Sequence[int],
    proposed: Sequence[PeerId] = (),
    peers: Sequence[PeerRecord] = (),
    replicas: Sequence[Sequence[PeerId]] = (),
) -> Placed:
    """The placement is the caller's own; only the depth of the pipeline is fitted to the memory of `peers`."""
    parts = split(graph, tuple(cuts))
    owners = tuple(proposed) or (PeerId(""),) * len(parts)
    config, memory = _fitted(config, parts, owners, peers)
    if isinstance(config, ServeConfig):
        config = replace(config, hop_bytes=hop_bytes(parts))
    return Placed(
        config=config,
        cuts=tuple(cuts),
        parts=parts,
        proposed=owners,
        replicas=tuple(map(tuple, replicas)),
        memory_bytes=memory,
    )


def place_job(
    graph: Graph,
    config: Config,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    stages: int | None = None,
) -> Placed:
    """Placed on `peers`, of whose links `links` is known; a training job with codecs, for peers that are taken to encode
    as fast as this machine. Raises PlacementError."""
    swarm = known_network(peers, link_view(peers, links))
    if isinstance(config, TrainConfig):
        return _training(graph, config, peers, swarm, stages)
    found = place(graph, swarm.network, sizes_of(config), 1, stages=stages, training=False)
    replicas = [list(map(PeerId, others[:MAX_REPLICAS])) for others in found.replicas]
    placed = as_asked(graph, config, found.cuts, tuple(map(PeerId, found.owners)), peers, replicas)
    return replace(placed, predicted_seconds=found.predicted_seconds)


def _training(
    graph: Graph,
    config: TrainConfig,
    peers: Sequence[PeerRecord],
    swarm: KnownNetwork,
    stages: int | None,
) -> Placed:
    sizes = sizes_of(config)
    found = place_with_codecs(
        graph,
        swarm.network,
        sizes,
        config.microbatches,
        config.compression,
        measure_families(codec_families(config.compression)),
        asked=config.schedule,
        stages=stages,
    )
    runs = found.placement
    config = replace(config, schedule=runs.schedule, depth=runs.depth, wires=found.wires)
    placed = as_asked(graph, config, runs.cuts, tuple(map(PeerId, runs.owners)), peers)
    assert isinstance(placed.config, TrainConfig)
    plan = planned(
        graph,
        replace(runs, depth=placed.config.depth),
        swarm.network,
        sizes,
        wires=found.costs,
        compression=config.compression,
        known=swarm.known,
    )
    return replace(placed, predicted_seconds=plan.predicted_seconds, plan=plan)


def sizes_of(config: Config) -> dict[str, int]:
    if isinstance(config, TrainConfig):
        return {"batch": config.microbatch_size, "sequence": config.sequence}
    return {"batch": 1, "sequence": config.max_sequence}


def _fitted(
    config: Config, parts: Sequence[Stage], owners: Sequence[PeerId], peers: Sequence[PeerRecord]
) -> tuple[Config, tuple[int, ...]]:
    """The configuration with the deepest pipeline that the owners have memory for, and what each stage needs then."""
    free = {peer.peer: peer.free_memory_bytes for peer in peers}
    residuals = _residual_bytes(config, parts)
    while True:
        memory = tuple(
            _memory_bytes(part, len(parts), config) + kept
            for part, kept in zip(parts, residuals, strict=True)
        )
        fits = all(need <= free.get(owner, inf) for need, owner in zip(memory, owners, strict=True))
        if fits or isinstance(config, ServeConfig) or config.depth == 1:
            return config, memory
        config = replace(config, depth=config.depth - 1)


def _memory_bytes(stage: Stage, stages: int, config: Config) -> int:
    """What the owner of a stage has to set aside, what error feedback keeps apart."""
    sizes = sizes_of(config)
    cost = stage_cost(stage, sizes)
    if isinstance(config, ServeConfig):
        return cost.parameter_bytes + cache_bytes_per_position(stage.graph, sizes) * config.max_sequence
    held = config.microbatches
    if config.schedule == "1f1b":
        held = in_flight(stage.index, stages, config.microbatches, config.depth)
    static = cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes
    return static + held * cost.saved_bytes + cost.working_bytes


def _residual_bytes(config: Config, parts: Sequence[Stage]) -> list[int]:
    """By stage: what error feedback keeps of the gradients that it sends, and of those of its tied variables."""
    kept = [0] * len(parts)
    if isinstance(config, ServeConfig):
        return kept
    if config.compression.kind == "none" or not config.compression.error_feedback:
        return kept
    sizes: Mapping[str, int] = sizes_of(config)
    for part in parts:
        gradients = (edge.type for edge in part.receives if edge.needs_gradient)
        kept[part.index] = _RESIDUAL_BYTES * sum(elements_of(kind, sizes) for kind in gradients)
    for tie in ties_of(parts, sizes):
        for stage in tie.stages:
            kept[stage] += _RESIDUAL_BYTES * tie.elements
    return kept
