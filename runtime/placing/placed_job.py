"""A placement in the manifest's terms: cuts, owners, memory, schedule and codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.source import operators
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph
from fusion.dag.ir.opset import needed_version
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.stage_graphs import Config
from fusion.runtime.placing.plan import Plan
from fusion.runtime.placing.stage_count import StageChoice
from fusion.runtime.placing.stage_memory import fitted
from fusion.runtime.serving.ring.frames import hop_bytes
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.transport import PeerId


@dataclass(frozen=True, kw_only=True)
class Placed:
    config: Config  # of a training job with the schedule and codecs that were chosen
    cuts: tuple[int, ...]
    parts: tuple[Stage, ...]
    proposed: tuple[PeerId, ...]
    replicas: tuple[tuple[PeerId, ...], ...]  # by stage: peers that serve it beside its owner; or empty
    memory_bytes: tuple[int, ...]  # that each stage needs
    predicted_seconds: float = 0.0  # a step, or a token; 0: not known
    stage_count: StageChoice | None = None  # of a model that is served: over how many peers, and why
    plan: Plan | None = None


def as_requested(
    graph: Graph,
    config: Config,
    cuts: Sequence[int],
    proposed: Sequence[PeerId] = (),
    peers: Sequence[PeerRecord] = (),
    replicas: Sequence[Sequence[PeerId]] = (),
) -> Placed:
    """The caller's own placement; only the depth of the pipeline is reduced to fit the memory of `peers`. PlacementError where that is
    not enough."""
    parts = split(graph, tuple(cuts))
    _require_planes(parts, proposed, peers)
    owners = tuple(proposed) or (PeerId(""),) * len(parts)
    config, memory = fitted(graph, config, cuts, owners, peers)
    if isinstance(config, ServeConfig) and not config.outputs:
        config = replace(config, hop_bytes=hop_bytes(parts))
    return Placed(
        config=config,
        cuts=tuple(cuts),
        parts=parts,
        proposed=owners,
        replicas=tuple(map(tuple, replicas)),
        memory_bytes=memory,
    )


def _require_planes(parts: Sequence[Stage], proposed: Sequence[PeerId], peers: Sequence[PeerRecord]) -> None:
    """PlacementError where a stage is proposed to a peer whose plane lacks an operator of it."""
    lacks = {peer.peer: peer.lacks for peer in peers}
    for part, owner in zip(parts, proposed, strict=False):
        missing = sorted(operators(part.graph).intersection(lacks.get(owner, ())))
        if missing:
            raise PlacementError(
                f"stage {part.index} needs {', '.join(missing)}: the plane of {owner} does not run that"
            )


def able(graph: Graph, peers: Sequence[PeerRecord]) -> list[PeerRecord]:
    """Those that know the graph's op-set, and whose planes have all of its operators. PlacementError where there are peers, but none
    of these."""
    opset = needed_version(graph)
    known = [peer for peer in peers if peer.opset >= opset]
    if peers and not known:
        newest = max(peer.opset for peer in peers)
        raise PlacementError(f"it needs op-set {opset}: the newest that a peer here knows is {newest}")
    needed = operators(graph)
    found = [peer for peer in known if needed.isdisjoint(peer.lacks)]
    if known and not found:
        op = min(needed.intersection(*(peer.lacks for peer in known)), default="operators of it")
        raise PlacementError(f"it needs {op}: no plane of the peers here runs that")
    return found
