"""Where to run the stages of a model that is served, and what a token takes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.dag.cutting.memory import MemoryConfig
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.pipeline import Layout, pipeline
from fusion.dag.placement.place import Placement, place
from fusion.dag.placement.step_model import step_seconds
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.manifest_wire import MAX_REPLICAS
from fusion.runtime.job.stage_graphs import serving_memory
from fusion.runtime.placing.known_network import KnownNetwork, known_network
from fusion.runtime.placing.placed_job import Placed, as_asked
from fusion.runtime.placing.stage_count import Candidate, StageChoice, choose_stages
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.links.view import link_view
from fusion.swarm.transport import PeerId

# Answers at once, for which the busiest stage is what counts: the most of these whose placement one answer alone can bear.
AT_ONCE = (8, 2)


def token_seconds(
    graph: Graph,
    config: ServeConfig,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    cuts: Sequence[int],
    owners: Sequence[PeerId],
) -> tuple[float, float]:
    """What a token takes with this placement, as `place_job` predicts it, and how much of that on links. PlacementError for an
    owner that is none of `peers`."""
    network = known_network(peers, link_view(peers, links)).network
    layout = Layout(cuts=tuple(cuts), owners=tuple(owners), microbatches=1, training=False)
    running, memory = _running(config)
    line = pipeline(graph, layout, network, running, None, memory)
    seconds = step_seconds(line).fill_seconds
    computing = sum(stage.forward_seconds for stage in line.stages)
    return seconds, max(0.0, seconds - computing) if len(owners) > 1 else 0.0


def _running(config: ServeConfig) -> tuple[dict[str, int], MemoryConfig]:
    """What a token takes counts, and room for the longest session. Without a cache a token runs the whole sequence."""
    sizes = config.sizes
    running = {**sizes, "sequence": 1} if config.cache == "kv" else dict(sizes)
    return running, replace(serving_memory(config), positions=sizes["sequence"])


def place_serving(
    graph: Graph,
    config: ServeConfig,
    peers: Sequence[PeerRecord],
    swarm: KnownNetwork,
    stages: int | None = None,
    beside_bytes: int = 0,
) -> Placed:
    """On as few peers as pay, of those that know its operators. `beside_bytes`: that the first stage needs beside its own memory.
    Raises PlacementError."""
    running, memory = _running(config)
    memory = replace(memory, first_bytes=beside_bytes)
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
    if config.outputs:
        choice = replace(choice, of="run")
    best = found[choice.chosen]
    replicas = [list(map(PeerId, others[:MAX_REPLICAS])) for others in best.replicas]
    placed = as_asked(graph, config, best.cuts, tuple(map(PeerId, best.owners)), peers, replicas)
    return replace(placed, predicted_seconds=choice.chosen.token_seconds, stage_count=choice)
