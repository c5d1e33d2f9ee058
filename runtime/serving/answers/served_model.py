"""A served model at a gateway, with its manifest and tokenizer, loaded once for all concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cachetools import FIFOCache

from fusion.runtime.belief.shared_work import SharedWork
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.job.text import MAX_TOKENIZER_BYTES, ByteText, NoText, Text, TokenizerText
from fusion.runtime.serving.answers.route_choice import Costs, costs_of
from fusion.swarm.directory.records import Digest, JobId, JobRecord

MAX_UNUSABLE = 1024  # models whose error is cached
# After a tokenizer was read, no other one is for so many times as long: reading blocks the whole process, whose leases would expire.
RESTS = 4


@dataclass(frozen=True)
class ServedModel:
    job: JobId
    manifest: Manifest
    text: Text
    costs: Costs

    @property
    def serve(self) -> ServeConfig:
        assert self.manifest.serve is not None  # `ModelLoader` refuses others
        return self.manifest.serve


class ModelLoader:
    """`admitted` raises NotAdmitted where this peer may not prompt the model. `pause_seconds`: least time between two attempts to load
    a model that fails, however many request it."""

    def __init__(
        self,
        context: Context,
        admitted: Callable[[JobId, Manifest], Awaitable[None]],
        pause_seconds: float,
    ) -> None:
        self._context = context
        self._admitted = admitted
        self._loading: SharedWork[JobId, ServedModel] = SharedWork(context.clock.monotonic, pause_seconds)
        # Job -> error. Manifest and tokenizer are fixed by the job's id, so such an error is permanent.
        self._unusable: FIFOCache[JobId, str] = FIFOCache(MAX_UNUSABLE)
        self._reading = asyncio.Lock()
        self._rested_at = 0.0  # by the context's clock

    async def aclose(self) -> None:
        await self._loading.aclose()

    async def load(self, record: JobRecord) -> ServedModel:
        """Raises JobError for a job that is not a valid served model, BlobError, NotAdmitted."""
        if (why := self._unusable.get(record.job)) is not None:
            raise JobError(why)
        try:
            return await self._loading.get(record.job, lambda: self._load(record))
        except JobError as error:
            self._unusable[record.job] = str(error)
            raise

    async def _load(self, record: JobRecord) -> ServedModel:
        hints = [record.author]  # the launcher, who stored it, or the lead
        manifest = manifests.decode(
            await self._context.blobs.read(Digest(record.job), manifests.MAX_MANIFEST_BYTES, hints)
        )
        self._context.leases.know(manifest.law(record.job))
        blobs = self._context.blobs.of(record.job)
        if manifest.serve is None:
            raise JobError(f"model: {record.name} is not a served model")
        await self._admitted(record.job, manifest)
        costs = costs_of(manifest)
        if manifest.byte_level:
            return ServedModel(record.job, manifest, ByteText(), costs)
        if manifest.tokenizer is None:
            return ServedModel(record.job, manifest, NoText(), costs)
        data = await blobs.read(manifest.tokenizer, MAX_TOKENIZER_BYTES, hints)
        return ServedModel(record.job, manifest, await self._read(data), costs)

    async def _read(self, data: bytes) -> TokenizerText:
        now = self._context.clock.monotonic
        async with self._reading:
            await asyncio.sleep(max(0.0, self._rested_at - now()))
            began = now()
            try:
                return await asyncio.to_thread(TokenizerText, data)
            finally:
                self._rested_at = now() + RESTS * (now() - began)
