"""What it would take to serve a model on the peers of the swarm; starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fusion.dag.ir.errors import PlacementError
from fusion.runtime.job.context import Context
from fusion.runtime.job.stage_graphs import weights_bytes
from fusion.runtime.launch.on_disk import on_disk
from fusion.runtime.launch.servable import Servable
from fusion.runtime.launch.weights import weights_digest
from fusion.runtime.placing.stage_memory import kept_bytes, least_memory, model_bytes
from fusion.swarm.directory.records import Digest, LinkRecord, PeerRecord
from fusion.swarm.transport import PeerId

MOST_STAGES = 6  # that are tried, where it does not fit


@dataclass(frozen=True, kw_only=True)
class ServedStage:
    stage: int
    peer: PeerId
    memory_bytes: int  # that it needs, with the keys and values of one longest text
    offered_bytes: int  # that its peer has free
    weights_bytes: int
    weights: Digest
    on_disk: bool = False  # whether the peer has the weights already


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    dtype: str
    cache: str  # "kv", or "recompute": each token runs the whole text
    one_run: bool  # it answers in one run, and generates nothing
    max_sequence: int
    weights_bytes: int  # of the model; a tied variable is in several stages
    cache_bytes: int  # what all stages keep of the longest text
    stages: tuple[ServedStage, ...] = ()  # none where it does not fit
    token_seconds: float = 0.0  # predicted
    able: int = 0  # peers that have room for at least one of the stages
    peers: int = 0
    here_bytes: int = 0  # of the weights, in the launcher's own store already
    misfit: str = ""  # one line: why it does not fit
    # Bytes that the fullest peer would need, over 1, 2, ... equal ones, where it does not fit
    needed: tuple[int, ...] = ()

    @property
    def held_bytes(self) -> int:
        """Of the weights, on the disks of the peers that are to have them."""
        return sum(stage.weights_bytes for stage in self.stages if stage.on_disk)

    @property
    def fetch_bytes(self) -> int:
        return sum(stage.weights_bytes for stage in self.stages if not stage.on_disk)

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "fits": bool(self.stages),
            "fetch_bytes": self.fetch_bytes,
            "held_bytes": self.held_bytes,
        }


def plan_serving(
    found: Servable,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    stages: int | None,
    report: Callable[[str], None],
    home: Path | None = None,
) -> ServingPlan:
    """`home`: see `prepare_serving`. Blocking: the weights are read and hashed, to find out which peers have them. Raises JobError,
    and PlacementError for other reasons than a lack of memory."""
    whole = ServingPlan(
        dtype=found.model.dtype,
        cache=found.config.cache,
        one_run=bool(found.config.outputs),
        max_sequence=found.config.max_sequence,
        weights_bytes=model_bytes(found.graph),
        cache_bytes=kept_bytes(found.graph, found.config),
        peers=len(peers),
    )
    report(f"placing it on {len(peers)} peers")
    try:
        _, placed = found.placed(peers, links, stages, home)
    except PlacementError as error:
        return replace(
            whole,
            misfit=str(error),
            needed=least_memory(found.graph, found.config, MOST_STAGES, found.beside_bytes),
        )
    free = {peer.peer: peer.free_memory_bytes for peer in peers}
    report("hashing its weights")
    return replace(
        whole,
        stages=tuple(
            ServedStage(
                stage=number,
                peer=owner,
                memory_bytes=memory,
                offered_bytes=free[owner],
                weights_bytes=weights_bytes(part),
                weights=weights_digest(part.graph.variables, found.read),
            )
            for number, (part, owner, memory) in enumerate(
                zip(placed.parts, placed.proposed, placed.memory_bytes, strict=True)
            )
        ),
        token_seconds=placed.predicted_seconds,
        able=sum(peer.free_memory_bytes >= min(placed.memory_bytes) for peer in peers),
    )


async def with_stored_weights(context: Context, plan: ServingPlan) -> ServingPlan:
    """The plan with the weights that its peers and our own store have already."""
    has = await on_disk(context, [(stage.peer, stage.weights) for stage in plan.stages])
    stages = [replace(stage, on_disk=found) for stage, found in zip(plan.stages, has, strict=True)]
    here = sum(stage.weights_bytes for stage in stages if context.blobs.has(stage.weights))
    return replace(plan, stages=tuple(stages), here_bytes=here)
