"""The stages of a job's graph: its blob read, checked and cut as the manifest says, once for all stages that are loaded
here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cachetools import LRUCache

from fusion.dag.cutting.cuts import split, tie_groups
from fusion.dag.cutting.stage import Stage, TieGroup
from fusion.dag.ir import serialise
from fusion.dag.ir.errors import GraphError
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.directory.records import Digest

MAX_GRAPH_BYTES = 64 << 20
REMEMBERED_GRAPHS = 8

Stages = tuple[
    tuple[Stage, ...], tuple[TieGroup, ...]
]  # all stages, and the variables that several of them hold


async def load_stages(context: Context, manifest: Manifest) -> Stages:
    """Raises BlobError where the graph cannot be had, JobFailed where it is none."""
    hints = [peer for peer in manifest.proposed if peer]
    data = await context.blobs.read(manifest.graph, MAX_GRAPH_BYTES, hints)

    def cut() -> Stages:
        stages = split(serialise.decode(data), manifest.cuts)
        return stages, tie_groups(stages)

    try:
        return await asyncio.to_thread(cut)
    except GraphError as error:
        raise JobFailed(f"the graph of {manifest.name}: {error}") from None


@dataclass(eq=False)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is read
    stages: Stages | None = None


class StageGraphs:
    """Remembers the last few: a stage that stands by, runs and stands by again is decoded once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: LRUCache[tuple[Digest, tuple[int, ...]], _Entry] = LRUCache(REMEMBERED_GRAPHS)

    async def of(self, manifest: Manifest) -> Stages:
        """As `load_stages`."""
        entry: _Entry = self._known.setdefault((manifest.graph, tuple(manifest.cuts)), _Entry())
        async with entry.lock:
            if entry.stages is None:
                entry.stages = await load_stages(self._context, manifest)
        return entry.stages
