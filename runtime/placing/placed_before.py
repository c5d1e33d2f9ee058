"""A model that was served before is placed as the last time, if that is nearly as good, counting the cost of fetching its weights
anew: they are still on those peers' disks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion.dag.ir import serialise
from fusion.dag.ir.errors import GraphError, PlacementError
from fusion.dag.ir.graph import Graph
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.placing.place_serving import token_seconds
from fusion.runtime.placing.placed_job import Placed, as_requested
from fusion.runtime.placing.stage_count import Candidate
from fusion.swarm.blobs.index import digest_of
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.newest_files import NewestFiles
from fusion.swarm.transport import PeerId

NEARLY = 0.25  # of the time per token that it may cost: the measured speeds of peers vary as much from start to start
# The rate at which a moved stage is fetched and loaded, and the tokens after which that must have paid.
_MOVED_BYTES_PER_SECOND = 12.5e6
_MOVED_TOKENS = 1000
MOST_BYTES = 1 << 20
FOLDER = "placed"
REMEMBERED = 64  # graphs, the most recently served ones


@dataclass(frozen=True)
class Before:
    cuts: tuple[int, ...]
    owners: tuple[PeerId, ...]


def as_before(
    placed: Placed,
    before: Before | None,
    graph: Graph,
    config: ServeConfig,
    peers: Sequence[PeerRecord],
    links: Sequence[LinkRecord],
    beside_bytes: int = 0,
) -> Placed:
    """`placed`, or the placement `before` if its peers are there, have room (the first one for `beside_bytes` more) and are hardly
    slower."""
    free = {peer.peer: peer.free_memory_bytes for peer in peers}
    same = before is not None and (before.cuts, before.owners) == (placed.cuts, placed.proposed)
    if before is None or same or not free.keys() >= set(before.owners):
        return placed
    if placed.stage_count is None or (
        placed.stage_count.asked and len(before.owners) != len(placed.proposed)
    ):
        return placed
    try:
        found = as_requested(graph, config, before.cuts, before.owners, peers)
        seconds, on_links = token_seconds(graph, config, peers, links, before.cuts, before.owners)
    except (GraphError, PlacementError, ValueError, IndexError):
        return placed
    memory = (found.memory_bytes[0] + beside_bytes, *found.memory_bytes[1:])
    moving = _moved_bytes(placed, before) / _MOVED_BYTES_PER_SECOND / _MOVED_TOKENS
    if seconds > placed.predicted_seconds * (1 + NEARLY) + moving or memory[0] > free[before.owners[0]]:
        return placed
    chosen = Candidate(peers=before.owners, token_seconds=seconds, link_seconds=on_links)
    choice = replace(placed.stage_count, chosen=chosen, others=(), misfits=(), before=True)
    return replace(found, memory_bytes=memory, predicted_seconds=seconds, stage_count=choice)


def _moved_bytes(placed: Placed, before: Before) -> int:
    """Of the stages of `placed` that were elsewhere."""
    stages = zip((0, *placed.cuts), (*placed.cuts, None), placed.proposed, placed.memory_bytes, strict=True)
    were = set(zip((0, *before.cuts), (*before.cuts, None), before.owners, strict=True))
    return sum(size for first, end, owner, size in stages if (first, end, owner) not in were)


class PlacementsBefore:
    """The last placement of each graph, in a home. Damaged files are ignored."""

    def __init__(self, home: Path) -> None:
        self._files = NewestFiles(home / FOLDER, ".json", REMEMBERED)

    def of(self, graph: Graph) -> Before | None:
        data = self._files.read(_name(graph), MOST_BYTES)
        try:
            value = None if data is None else json.loads(data)
        except (ValueError, RecursionError):
            return None
        match value:
            case {"cuts": [*cuts], "owners": [*owners]} if (
                all(type(cut) is int for cut in cuts)
                and all(isinstance(owner, str) for owner in owners)
                and len(owners) == len(cuts) + 1 == len(set(owners))
            ):
                return Before(tuple(cuts), tuple(map(PeerId, owners)))
        return None

    def remember(self, graph: Graph, placed: Placed) -> None:
        """Does nothing where the folder cannot be written to."""
        value = {"cuts": placed.cuts, "owners": placed.proposed}
        self._files.write(_name(graph), json.dumps(value).encode())


def _name(graph: Graph) -> str:
    return digest_of(serialise.encode(graph))
