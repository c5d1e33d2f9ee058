"""The placement of a model that is served, and its predicted time per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from fusion.runtime.placing.placed_job import Placed, as_requested
from fusion.runtime.placing.stage_count import Candidate, StageChoice, choose_stages
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.links.view import link_view
from fusion.swarm.transport import PeerId

# Answers at once, for which the busiest stage is what counts: the placements that suit so many are looked at, too.
AT_ONCE = (8, 2)
MOST_SLOWER = 0.3  # of its time per token, that one answer gives up so that more get through at once


def token_seconds(
    graph: Graph,
    config: ServeConfig,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    cuts: Sequence[int],
    owners: Sequence[PeerId],
) -> tuple[float, float]:
    """Seconds of a token with this placement, as `place_job` predicts them, and seconds of these on links. PlacementError for an
    owner that is not among `peers`."""
    network = known_network(peers, link_view(peers, links)).network
    layout = Layout(cuts=tuple(cuts), owners=tuple(owners), microbatches=1, training=False)
    running, memory = _running(config)
    line = pipeline(graph, layout, network, running, None, memory)
    seconds = step_seconds(line).fill_seconds
    computing = sum(stage.forward_seconds for stage in line.stages)
    return seconds, max(0.0, seconds - computing) if len(owners) > 1 else 0.0


def _running(config: ServeConfig) -> tuple[dict[str, int], MemoryConfig]:
    """Placed by the time of a token, with memory for the longest session. Without a KV cache a token runs the whole sequence."""
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
        shared = [over(choice.chosen.stages, answers) for answers in AT_ONCE]
        choice = replace(choice, chosen=_for_one_and_many([choice.chosen, *shared], found))
    if config.outputs:
        choice = replace(choice, of="run")
    best = found[choice.chosen]
    replicas = [list(map(PeerId, others[:MAX_REPLICAS])) for others in best.replicas]
    placed = as_requested(graph, config, best.cuts, tuple(map(PeerId, best.owners)), peers, replicas)
    return replace(placed, predicted_seconds=choice.chosen.token_seconds, stage_count=choice)


def _for_one_and_many(
    candidates: Sequence[Candidate], placements: Mapping[Candidate, Placement]
) -> Candidate:
    """The one with the shortest time per token, of one answer and of several at once alike: what one answer loses by it in per cent is
    less than what several gain, and at most MOST_SLOWER. By the time of one answer alone, nearly all of the model might go to the
    fastest peer."""

    def both_seconds(candidate: Candidate) -> float:
        predicted = placements[candidate].prediction
        several = predicted.fill_seconds + (AT_ONCE[0] - 1) * predicted.period_seconds
        return candidate.token_seconds * several

    most = (1 + MOST_SLOWER) * min(each.token_seconds for each in candidates)
    return min((each for each in candidates if each.token_seconds <= most), key=both_seconds)
