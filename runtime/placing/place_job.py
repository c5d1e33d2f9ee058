"""The placement of a job on the peers of the swarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.compression.codec_speed import measure_families
from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.misfit import DoesNotFit
from fusion.runtime.device.overrun import LONGEST_SECONDS
from fusion.runtime.job.manifest import ServeConfig, TrainConfig
from fusion.runtime.job.stage_graphs import MAX_STAGE_NODES, Config, longest_call, training_memory
from fusion.runtime.placing.codec_placement import codec_families, place_with_codecs
from fusion.runtime.placing.known_network import KnownNetwork, known_network
from fusion.runtime.placing.place_serving import place_serving
from fusion.runtime.placing.placed_job import Placed, able, as_requested
from fusion.runtime.placing.plan import planned
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.links.view import link_view
from fusion.swarm.transport import PeerId


def place_job(
    graph: Graph,
    config: Config,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    stages: int | None = None,
    beside_bytes: int = 0,
) -> Placed:
    """Placed on `peers`, of whose links `links` is known; a training job with codecs, for peers that are taken to encode
    as fast as this machine. `beside_bytes`: that the first stage of one that is served needs beside its own memory. Raises
    PlacementError, in one line, where no peers can hold it, know its operators, or would accept a stage of it."""
    peers = able(graph, peers)
    swarm = known_network(peers, link_view(peers, links))
    try:
        if isinstance(config, TrainConfig):
            placed = _training(graph, config, peers, swarm, stages)
        else:
            placed = place_serving(graph, config, peers, swarm, stages, beside_bytes)
    except DoesNotFit as error:
        raise error.named({peer.peer: peer.name or peer.peer for peer in peers}) from None
    _require_few_nodes(placed)
    _require_short_calls(placed, peers)
    return placed


def _require_few_nodes(placed: Placed) -> None:
    """PlacementError where a stage has so many nodes that peers would refuse it (`StageGraphs.check`)."""
    for part in placed.parts:
        if len(part.graph.nodes) > MAX_STAGE_NODES:
            raise PlacementError(
                f"stage {part.index} has {len(part.graph.nodes)} operators, and peers refuse more than "
                f"{MAX_STAGE_NODES}: give it more stages"
            )


def _require_short_calls(placed: Placed, peers: Sequence[PeerRecord]) -> None:
    """PlacementError where one call of a stage is so long that all of these peers would refuse it (`StageGraphs.check`)."""
    rates = [peer.flops_per_second for peer in peers]
    if not rates or min(rates) <= 0:  # a peer that has not measured its device refuses nothing
        return
    for part in placed.parts:
        seconds = longest_call(part, placed.config, max(rates))
        if seconds > LONGEST_SECONDS:
            less = "train.microbatch_size" if isinstance(placed.config, TrainConfig) else "its input"
            raise PlacementError(
                f"stage {part.index}: one call of it would take the fastest peer here about {seconds:.3g} s, and peers "
                f"refuse more than {LONGEST_SECONDS:.0f} s: make {less} smaller, or give it more stages"
            )


def place_beside(
    draft_bytes: int,
    graph: Graph,
    config: ServeConfig,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    stages: int | None = None,
) -> Placed:
    """As `place_job`, for a model whose first stage needs `draft_bytes` more."""
    placed = place_job(graph, config, peers, links, stages, draft_bytes)
    return replace(placed, memory_bytes=(placed.memory_bytes[0] + draft_bytes, *placed.memory_bytes[1:]))


def _training(
    graph: Graph,
    config: TrainConfig,
    peers: Sequence[PeerRecord],
    swarm: KnownNetwork,
    stages: int | None,
) -> Placed:
    sizes, memory = config.sizes, training_memory(config.optimizer, config.compression)
    found = place_with_codecs(
        graph,
        swarm.network,
        sizes,
        config.microbatches,
        config.compression,
        measure_families(codec_families(config.compression)),
        memory,
        requested=config.schedule,
        stages=stages,
    )
    runs = found.placement
    config = replace(config, schedule=runs.schedule, depth=runs.depth, codecs=found.codecs)
    placed = as_requested(graph, config, runs.cuts, tuple(map(PeerId, runs.owners)), peers)
    plan = planned(
        graph,
        runs,
        swarm.network,
        sizes,
        memory,
        edge_costs=found.costs,
        compression=config.compression,
        known=swarm.known,
        trace=found.trace,
    )
    return replace(placed, predicted_seconds=plan.simulated_seconds, plan=plan)
