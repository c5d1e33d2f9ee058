"""Where to run the stages of a job, found for the peers that there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from fusion.compression.codec_speed import measure_families
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.misfit import DoesNotFit
from fusion.dag.placement.place import Placement, place
from fusion.runtime.job.manifest import ServeConfig, TrainConfig
from fusion.runtime.job.manifest_wire import MAX_REPLICAS
from fusion.runtime.job.stage_graphs import Config, serving_memory, sizes_of, training_memory
from fusion.runtime.placing.codec_placement import codec_families, place_with_codecs
from fusion.runtime.placing.known_network import KnownNetwork, known_network
from fusion.runtime.placing.placed_job import Placed, able, as_asked
from fusion.runtime.placing.plan import planned
from fusion.runtime.placing.stage_count import Candidate, StageChoice, choose_stages
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.links.view import link_view
from fusion.swarm.transport import PeerId

# Answers at once, for which the busiest stage is what counts: the most of these whose placement one answer alone can bear.
AT_ONCE = (8, 2)


def place_job(
    graph: Graph,
    config: Config,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    stages: int | None = None,
) -> Placed:
    """Placed on `peers`, of whose links `links` is known; a training job with codecs, for peers that are taken to encode
    as fast as this machine. Raises PlacementError, in one line, where nobody can hold it, or knows its operators."""
    peers = able(graph, peers)
    swarm = known_network(peers, link_view(peers, links))
    try:
        if isinstance(config, TrainConfig):
            return _training(graph, config, peers, swarm, stages)
        return _serving(graph, config, peers, swarm, stages)
    except DoesNotFit as error:
        raise error.named({peer.peer: peer.name or peer.peer for peer in peers}) from None


def place_beside(
    draft_bytes: int,
    graph: Graph,
    config: ServeConfig,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    stages: int | None = None,
) -> Placed:
    """As `place_job`, for a model whose first stage needs so much more, for its draft model. Where the peer that it would have
    offers less, the model is placed as if nobody had that much."""
    placed = place_job(graph, config, peers, links, stages)
    free = {peer.peer: peer.free_memory_bytes for peer in peers}
    if placed.memory_bytes[0] + draft_bytes > free.get(placed.proposed[0], inf):
        less = [replace(p, free_memory_bytes=max(0, p.free_memory_bytes - draft_bytes)) for p in peers]
        placed = place_job(graph, config, less, links, stages)
    return replace(placed, memory_bytes=(placed.memory_bytes[0] + draft_bytes, *placed.memory_bytes[1:]))


def _serving(
    graph: Graph,
    config: ServeConfig,
    peers: Sequence[PeerRecord],
    swarm: KnownNetwork,
    stages: int | None,
) -> Placed:
    # What a token takes counts, and room for the longest session. Without a cache a token runs the whole sequence.
    sizes = sizes_of(config)
    running = {**sizes, "sequence": 1} if config.cache == "kv" else sizes
    memory = replace(serving_memory(config), positions=sizes["sequence"])
    found: dict[Candidate, Placement] = {}

    def over(count: int | None, answers: int = 1) -> Candidate:
        placement = place(graph, swarm.network, running, answers, stages=count, training=False, memory=memory)
        token_seconds = placement.prediction.fill_seconds
        links = token_seconds - sum(placement.stage_seconds)
        candidate = Candidate(
            peers=placement.owners,
            token_seconds=token_seconds,
            link_seconds=max(0.0, links) if len(placement.owners) > 1 else 0.0,
        )
        found[candidate] = placement
        return candidate

    if stages is not None:
        choice = StageChoice(chosen=over(stages), asked=True)
    else:
        choice = choose_stages(over)
    if choice.chosen.stages > 1:
        # Of what one answer takes as long with, that which lets most through: all on the fastest peer but for one small
        # operator would be as good a place for one.
        alike = (over(choice.chosen.stages, answers) for answers in AT_ONCE)
        choice = replace(choice, chosen=next((c for c in alike if c.near(choice.chosen)), choice.chosen))
    best = found[choice.chosen]
    replicas = [list(map(PeerId, others[:MAX_REPLICAS])) for others in best.replicas]
    placed = as_asked(graph, config, best.cuts, tuple(map(PeerId, best.owners)), peers, replicas)
    return replace(placed, predicted_seconds=choice.chosen.token_seconds, stage_count=choice)


def _training(
    graph: Graph,
    config: TrainConfig,
    peers: Sequence[PeerRecord],
    swarm: KnownNetwork,
    stages: int | None,
) -> Placed:
    sizes, memory = sizes_of(config), training_memory(config.optimizer, config.compression)
    found = place_with_codecs(
        graph,
        swarm.network,
        sizes,
        config.microbatches,
        config.compression,
        measure_families(codec_families(config.compression)),
        memory,
        asked=config.schedule,
        stages=stages,
    )
    runs = found.placement
    config = replace(config, schedule=runs.schedule, depth=runs.depth, codecs=found.codecs)
    placed = as_asked(graph, config, runs.cuts, tuple(map(PeerId, runs.owners)), peers)
    plan = planned(
        graph,
        runs,
        swarm.network,
        sizes,
        memory,
        edge_costs=found.costs,
        compression=config.compression,
        known=swarm.known,
    )
    return replace(placed, predicted_seconds=plan.predicted_seconds, plan=plan)
