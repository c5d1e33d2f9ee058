"""Which models the swarm serves and who runs their stages, as a gateway sees it: the directory, remembered briefly.

Nothing here runs while tokens flow: a route is looked up once for each session, and not even that within a heartbeat
of the last look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fusion.runtime import manifest as manifests
from fusion.runtime.context import Context
from fusion.runtime.errors import JobError, JobFailed, NoRoute
from fusion.runtime.job import Manifest, ServeConfig
from fusion.runtime.serving.session import Hop
from fusion.runtime.shortage import needs
from fusion.runtime.text import ByteText, NoText, Text, TokenizerText
from fusion.swarm.directory import HEARTBEAT_SECONDS
from fusion.swarm.election import winner
from fusion.swarm.records import ClaimRecord, Digest, JobId, JobRecord

MAX_TOKENIZER_BYTES = 64 << 20
MAX_MODELS = 64  # whose manifests and tokenizers are kept in memory
LIVE = frozenset({"launching", "running"})


class NoOwner(NoRoute):
    def __init__(self, stage: int, message: str) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class ServedModel:
    job: JobId
    manifest: Manifest
    text: Text

    @property
    def serve(self) -> ServeConfig:
        assert self.manifest.serve is not None  # `Catalog` makes no others
        return self.manifest.serve


class Catalog:
    """Served models by name and their routes. `fresh_seconds`: for how long a look into the directory is believed."""

    def __init__(
        self,
        context: Context,
        *,
        fresh_seconds: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._fresh_seconds = fresh_seconds
        self._clock = clock
        self._models: dict[JobId, ServedModel] = {}
        self._jobs: tuple[float, tuple[JobRecord, ...]] = (float("-inf"), ())
        self._routes: dict[JobId, tuple[float, tuple[Hop, ...]]] = {}

    async def find(self, name: str) -> ServedModel:
        """The model served under `name` (or with that job id); "" where there is only one. JobError names what the
        swarm does serve; BlobError where nobody has the model's manifest or tokenizer."""
        record = _choose(await self._served(), name)
        if record is None:  # it may have been launched since the last look
            self._jobs = (float("-inf"), ())
            served = await self._served()
            record = _choose(served, name)
            if record is None:
                raise JobError(_unknown(served, name))
        known = self._models.get(record.job)
        if known is None:
            known = await self._load(record)
            while len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            self._models[record.job] = known
        return known

    async def route(self, model: ServedModel) -> tuple[Hop, ...]:
        """Who runs each stage, from memory within `fresh_seconds` of the last look. A stage may still be on its way
        into its owner's memory: the owner then lets us wait. NoOwner names the first stage that nobody holds, JobFailed
        says that the model is served no longer."""
        found = self._routes.get(model.job)
        if found is not None and self._clock() - found[0] < self._fresh_seconds:
            return found[1]
        stages = range(model.manifest.stages)
        claims = await asyncio.gather(*(self._context.leases.claims(model.job, stage) for stage in stages))
        try:
            route = tuple(_hop(model, stage, held) for stage, held in enumerate(claims))
        except NoOwner:
            record = await self._context.directory.job(model.job)
            if record is not None and record.state not in LIVE:
                raise JobFailed(f"{model.manifest.name} is not served any more: {record.state}") from None
            raise
        self._routes[model.job] = (self._clock(), route)
        return route

    def replace(self, job: JobId, route: tuple[Hop, ...], found: Mapping[int, Hop]) -> None:
        """`route` did not hold. `found`: who runs some of its stages now; with nothing found we look next time."""
        if not found:
            self.forget_route(job)
            return
        known = self._routes.get(job, (0.0, route))[1]
        hops = (max((old, found.get(i, old)), key=lambda hop: hop.term) for i, old in enumerate(known))
        self._routes[job] = (self._clock(), tuple(hops))

    def newer(self, job: JobId, stage: int, hop: Hop) -> Hop | None:
        """Who runs the stage under a higher term than `hop`, as far as we know without looking."""
        found = self._routes.get(job)
        known = found[1][stage] if found is not None else hop
        return known if known.term > hop.term else None

    def forget_route(self, job: JobId) -> None:
        """The route did not hold: look again next time."""
        self._routes.pop(job, None)

    async def _served(self) -> tuple[JobRecord, ...]:
        looked, records = self._jobs
        if self._clock() - looked >= self._fresh_seconds:
            jobs = await self._context.directory.jobs()
            records = tuple(j for j in jobs if j.kind == "serve" and j.state in LIVE)
            self._jobs = (self._clock(), records)
        return records

    async def _load(self, record: JobRecord) -> ServedModel:
        hints = [record.author]  # the launcher, who stored it, or the lead
        blobs = self._context.blobs
        manifest = manifests.decode(await blobs.read(Digest(record.job), manifests.MAX_MANIFEST_BYTES, hints))
        if manifest.serve is None:
            raise JobError(f"model: {record.name} is not a served model")
        if manifest.byte_level:
            return ServedModel(record.job, manifest, ByteText())
        if manifest.tokenizer is None:
            return ServedModel(record.job, manifest, NoText())
        data = await blobs.read(manifest.tokenizer, MAX_TOKENIZER_BYTES, hints)
        return ServedModel(record.job, manifest, await asyncio.to_thread(TokenizerText, data))


def _hop(model: ServedModel, stage: int, claims: tuple[ClaimRecord, ...]) -> Hop:
    owner = winner(claims)
    if owner is not None:
        return Hop(owner.peer, owner.term)
    name = model.manifest.name
    if any(claim.role == "standby" for claim in claims):
        raise NoOwner(stage, f"stage {stage} of {name} has no owner now; a standby is about to take it over")
    raise NoOwner(stage, needs(stage, model.manifest.memory_bytes, name))


def _choose(records: tuple[JobRecord, ...], name: str) -> JobRecord | None:
    """Of several jobs of one name the one that runs; then the one whose id sorts first, on every peer the same."""
    if not name:
        return records[0] if len(records) == 1 else None
    found = [r for r in records if name in (r.name, r.job)]
    return min(found, key=lambda r: (r.state != "running", r.job), default=None)


def _unknown(records: tuple[JobRecord, ...], name: str) -> str:
    names = ", ".join(sorted({r.name for r in records})[:20])
    if not names:
        return "model: the swarm serves none now"
    return f"model: {'choose one' if not name else f'nobody serves {name[:100]!r}'}; there are: {names}"
