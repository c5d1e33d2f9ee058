"""Fetches the blobs of a stage: its weights, and files that its holders keep for gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path

from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.model_files import CHAT_FILES
from fusion.runtime.job.stage_graphs import StageGraphs, file_bytes, weights_bytes
from fusion.runtime.job.text import MAX_TOKENIZER_BYTES
from fusion.runtime.serving.draft_loader import DraftLoader
from fusion.swarm.blobs.blobs import JobBlobs
from fusion.swarm.directory.records import Digest, Place
from fusion.swarm.errors import BlobError, QuotaExceeded

log = logging.getLogger(__name__)


class StageBlobs:
    def __init__(self, context: Context, graphs: StageGraphs, drafts: DraftLoader) -> None:
        self._context = context
        self._graphs = graphs
        self._drafts = drafts

    async def fetch(self, place: Place, manifest: Manifest) -> Path:
        """Fetch everything that the stage needs; returns the path of its weights. Raises BlobError, Unsupported, and Understated where the
        manifest declares less memory than the stage needs: then only the graph was fetched."""
        job, stage = place
        stages, _ = await self._graphs.of(job, manifest)
        part = stages[stage]
        await self._graphs.check(job, manifest, stage)
        blobs = self._context.blobs.of(job)
        most = file_bytes(weights_bytes(part), len(part.graph.variables))
        wanted: list[Awaitable[Path | None]] = [blobs.fetch(manifest.weights[stage], max_bytes=most)]
        if manifest.tokenizer is not None and stage in (0, manifest.stages - 1):
            # Only gateways read it: the swarm has to keep it once the launcher has left.
            wanted.append(blobs.fetch(manifest.tokenizer, max_bytes=MAX_TOKENIZER_BYTES))
        if stage == 0:
            wanted.append(self._drafts.fetch(job, manifest))
        if stage in (0, manifest.stages - 1):
            chat = [(digest, CHAT_FILES[name]) for name, digest in manifest.files if name in CHAT_FILES]
            wanted += (_if_there_is(blobs, digest, most_bytes) for digest, most_bytes in chat)
        path = (await asyncio.gather(*wanted))[0]
        assert path is not None
        return path


async def _if_there_is(blobs: JobBlobs, digest: Digest, max_bytes: int) -> None:
    """Keep a copy for gateways. Owners of an older release have none, so it may be lost; completions do not need it."""
    try:
        await blobs.fetch(digest, max_bytes=max_bytes)
    except (BlobError, QuotaExceeded) as error:
        log.info("not kept for chats: %s", error)
