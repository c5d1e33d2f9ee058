"""The placement of a model whose layers may be larger than any peer: where it does not fit, its experts are split into groups, and
a stage may then hold a part of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from fusion.dag.ir.graph import Graph
from fusion.dag.placement.misfit import DoesNotFit, size_text
from fusion.dag.rewrites.expert_groups import group_experts
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.placing.place_job import place_beside
from fusion.runtime.placing.placed_job import Placed
from fusion.runtime.placing.stage_memory import kept_bytes, model_bytes
from fusion.swarm.directory.records import LinkRecord, PeerRecord


def place_model(
    draft_bytes: int,
    graph: Graph,
    config: ServeConfig,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    stages: int | None = None,
) -> tuple[Graph, Placed]:
    """The graph as it is, or with its experts in 2, 4, 8, ... groups, as few as it needs to fit, and its placement by `place_beside`.
    DoesNotFit, as for whole layers, where no number of groups fits."""
    try:
        return graph, place_beside(draft_bytes, graph, config, peers, links, stages)
    except DoesNotFit as misfit:
        groups, before = 2, graph
        while (grouped := group_experts(graph, groups)) != before:
            with suppress(DoesNotFit):
                return grouped, place_beside(draft_bytes, grouped, config, peers, links, stages)
            groups, before = 2 * groups, grouped
        if not (text := kept_bytes(graph, config)):
            raise
        parts = f"its weights take {size_text(model_bytes(graph))}, a text of {config.max_sequence:,} tokens {size_text(text)}"
        raise DoesNotFit(f"{misfit.needed}: {parts} (fewer with --context)", misfit.offered) from None
