"""Serving on a peer: stages of served models, and a gateway for every model of the swarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed, first_cause
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import Progress, StageLoad, StageLoading
from fusion.runtime.job.protocol import GENERATE, GENERATE_MORE, RING
from fusion.runtime.serving.answers.gateway import Gateway, GatewayConfig
from fusion.runtime.serving.loaded_stage import LoadedStage
from fusion.runtime.serving.ring.links import (
    GATEWAY,
    LinkEnds,
    RingPosition,
    accepts_acks,
    accepts_batches,
    grants_of,
    refusal,
)
from fusion.runtime.serving.ring.stage import RingStage
from fusion.runtime.serving.stage_loader import StageLoader
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import JobId, JobRecord, Place
from fusion.swarm.errors import QuotaExceeded, StaleTerm, SwarmError
from fusion.swarm.streams.queued_stream import hello
from fusion.swarm.transport import Stream

log = logging.getLogger(__name__)

LOADING_SECONDS = 60.0  # for which a stream waits for a stage that is being loaded
LOADING_NOTICE_SECONDS = 0.4  # between two `loading` frames to a gateway that waits
COPY_RETRY_SECONDS = 30.0
LOAD_SECONDS = 1.0  # between two reports of how many sessions a stage has


@dataclass(eq=False)
class _Hosted:
    """A stage that accepts sessions: owned, or run beside its owner as a replica."""

    stage: RingStage
    manifest: Manifest
    loaded: LoadedStage
    running: asyncio.Task[None]
    owned: bool
    tokens_per_second: float = 0.0
    kv_bytes: int = 0  # reserved for its sessions
    retained_bytes: int = 0  # of its prefix cache


class ServingService:
    """Registers the ring and generate protocols; runs the stages of `host`, and keeps those of `prepare` ready as standbys. A standby in
    memory also serves as a replica while the peer is idle: if the owner dies, its sessions only move, and the stage is without an
    owner for the time of a claim."""

    def __init__(self, context: Context, loader: StageLoader, gateway: GatewayConfig | None = None) -> None:
        self._context = context
        self.gateway = Gateway(context, loader.grammars.open, gateway)
        self._hosted: dict[Place, _Hosted] = {}
        self._warm: dict[Place, LoadedStage] = {}
        self._loader = loader
        self._replicas: dict[Place, asyncio.Task[None]] = {}
        self._began = asyncio.Event()  # set, and replaced, whenever a stage begins to run here

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._context.transport.serve(RING.name, self._ring)
        for protocol in (GENERATE, GENERATE_MORE):
            await self._context.transport.serve(protocol.name, self.gateway.attend)

    async def aclose(self) -> None:
        for place in list(self._replicas):
            self._end_replica(place)
        await asyncio.gather(self._loader.aclose(), *self._replicas.values(), return_exceptions=True)
        self._warm.clear()
        await self.gateway.aclose()

    async def host(
        self,
        job: JobId,
        manifest: Manifest,
        stage: int,
        term: int,
        handover: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Serve one stage until cancelled; `handover` is ignored. Raises JobFailed for a job that no peer could serve (its graph, its
        weights), BlobError where a blob is not available, MemoryError where the weights do not fit."""
        place, memory = (job, stage), self._context.memory
        if manifest.serve is None:
            raise JobFailed(f"job {manifest.name} is not one that serves a model")
        memory.hold(place, manifest.needed_bytes(stage))
        try:
            try:
                loaded = await self._load(place, manifest)
                memory.hold(place, _used_bytes(manifest, loaded))
            finally:  # the standby's stage is the one that runs now
                self._warm.pop(place, None)
                memory.forget(place)
            await self._serve(place, manifest, loaded, term)
        finally:
            memory.release(place)

    async def _serve(self, place: Place, manifest: Manifest, loaded: LoadedStage, term: int) -> None:
        job, stage = place
        hosted = await self._promoted(place, term) or self._run(place, manifest, loaded, term, owned=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_to_the_end(hosted.running))
                tasks.create_task(self._report(job, stage, hosted))
                tasks.create_task(self._keep_copy(place, manifest))
        except ExceptionGroup as group:  # only the first cause, without the group
            raise first_cause(group) from group
        finally:
            if self._hosted.get(place) is hosted:
                del self._hosted[place]

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        """Stand by: fetch the weights, and load them where there is memory beside what runs here. Idempotent. Raises JobError, BlobError,
        QuotaExceeded."""
        place = (job, stage)
        if manifest.serve is None:
            raise JobError(f"job {manifest.name} is not one that serves a model")
        if place in self._hosted and place not in self._warm and place in self._replicas:
            await asyncio.wait([self._replicas[place]])  # its sessions are being drained
        if place not in self._hosted and place not in self._warm:
            try:
                await self._loader.fetch(place, manifest)
                if self._keep(place, manifest, await self._loader.weights_bytes(place, manifest)):
                    await self._warm_up(place, manifest)
            except (JobFailed, MemoryError) as error:
                raise JobError(str(error)) from None
        return record.step

    async def _warm_up(self, place: Place, manifest: Manifest) -> None:
        memory = self._context.memory
        try:
            loaded = await self._load(place, manifest)
            # Else it was promoted or given up meanwhile, or does not fit with its draft model.
            kept = place not in self._hosted and memory.keeps(place)
            if kept and self._keep(place, manifest, loaded.weights_bytes):
                self._warm[place] = loaded
                self._replicas[place] = asyncio.create_task(self._replicate(place, manifest, loaded))
        finally:
            if place not in self._warm:
                memory.forget(place)

    def forget(self, job: JobId, stage: int) -> None:
        """Stop standing by for the stage. Sessions that run here are drained."""
        self._warm.pop((job, stage), None)
        self._context.memory.forget((job, stage))
        self._end_replica((job, stage))
        self._loader.cancel((job, stage))

    async def pass_on(self, job: JobId, stage: int) -> Mapping[str, Any]:
        """Hand over, as the peer leaves: the stage is served until `host` is cancelled, and its sessions are then drained. The successor
        needs no state. JobError where the stage does not run here."""
        hosted = self._hosted.get((job, stage))
        if hosted is None or not hosted.owned:
            raise JobError(f"stage {stage} of job {job[:12]} does not run here")
        hosted.stage.leave()
        return {}

    def stay(self, job: JobId, stage: int) -> None:
        hosted = self._hosted.get((job, stage))
        if hosted is not None:
            hosted.stage.stay()

    def progress(self, job: JobId) -> Progress | None:
        """Progress of the job, at the owner of its first stage; None on other peers."""
        hosted = self._hosted.get((job, 0))
        if hosted is None or not hosted.owned:
            return None
        return Progress(
            job=job,
            state="running",
            stages=hosted.manifest.stages,
            tokens_per_second=hosted.tokens_per_second,
        )

    def loading(self) -> list[StageLoading]:
        """The stages that are being loaded."""
        return self._loader.under_way()

    def loads(self) -> list[StageLoad]:
        """The loads of the stages that run here."""
        return [
            StageLoad(
                job=job,
                stage=stage,
                sessions=hosted.stage.sessions,
                kv_bytes=hosted.kv_bytes,
                retained_bytes=hosted.retained_bytes,
                tokens=hosted.stage.tokens,
            )
            for (job, stage), hosted in list(self._hosted.items())  # the worker's thread removes some
        ]

    async def _ring(self, stream: Stream) -> None:
        fields, access = await hello(stream), self._context.access
        ends = LinkEnds.from_hello(fields, self._context.peer_id)
        grants = grants_of(fields)
        hosted = await self._running(stream, ends)
        await hosted.stage.attend(
            *(stream, ends.sender, lambda: refusal(access, stream.remote, ends, grants)),
            batches=accepts_batches(fields),
            acks=accepts_acks(fields),
        )

    async def _running(self, stream: Stream, ends: LinkEnds) -> _Hosted:
        """The stage that the stream is for. Waits for one that this peer has claimed and not loaded yet: the caller found the claim and has
        no other holder."""
        place = (ends.job, ends.stage)
        clock = self._context.clock.monotonic
        until = clock() + LOADING_SECONDS
        while (hosted := self._hosted.get(place)) is None or not hosted.stage.running:
            if self._context.leases.holds(*place) is None or clock() > until:
                raise StaleTerm(f"stage {ends.stage} of job {ends.job[:12]} is not served here")
            began = self._began
            try:
                async with asyncio.timeout(LOADING_NOTICE_SECONDS):
                    await began.wait()
            except TimeoutError:
                if ends.sender == GATEWAY:
                    await stream.send("loading")  # a sign of life
        return hosted

    def _run(
        self, place: Place, manifest: Manifest, loaded: LoadedStage, term: int, *, owned: bool
    ) -> _Hosted:
        context, links = self._context, self._context.links
        assert manifest.serve is not None, "callers have looked"
        compute = context.on_behalf_of(manifest.author, place[0], serves=True).compute
        position = RingPosition(
            job=place[0], name=manifest.name, serve=manifest.serve, peer=context.peer_id, term=term
        )
        ring = RingStage(
            *(context.transport, compute),
            loaded.runner(manifest.serve.max_sequence, lambda: self._account(place)),
            *(loaded.plan, position),
            doubt=(lambda peer: None) if links is None else links.doubt,
            clock=context.clock.monotonic,
            chain=context.access.chain,
            constrain=partial(self._loader.grammars.open_masked, place[0], manifest),
        )
        running = asyncio.create_task(ring.run(), name=f"stage {place[1]} of {manifest.name}")
        hosted = self._hosted[place] = _Hosted(ring, manifest, loaded, running, owned)
        return hosted

    # --- replicas

    async def _replicate(self, place: Place, manifest: Manifest, loaded: LoadedStage) -> None:
        """While the stage is on standby in memory: serve it as a replica whenever that is allowed."""
        standbys = self._context.leases.standbys
        try:
            while self._warm.get(place) is loaded:
                # Whether the sessions that the launcher planned for would fit beside the weights.
                if self._keep(place, manifest, _used_bytes(manifest, loaded)):
                    if term := standbys.serve_beside(*place):
                        await self._serve_beside(place, manifest, loaded, term)
                    if self._warm.get(place) is loaded:
                        self._context.memory.resize(place, loaded.weights_bytes)
                await asyncio.sleep(HEARTBEAT_SECONDS)
        finally:
            if self._replicas.get(place) is asyncio.current_task():
                del self._replicas[place]

    async def _serve_beside(self, place: Place, manifest: Manifest, loaded: LoadedStage, term: int) -> None:
        leases = self._context.leases
        log.info("stage %d of %s is served here as well (term %d)", place[1], manifest.name, term)
        hosted = self._run(place, manifest, loaded, term, owned=False)
        try:
            # Also after this peer has become the owner, until `host` takes the running stage over.
            while (
                leases.standbys.is_beside(*place) or leases.holds(*place) is not None
            ) and not hosted.running.done():
                leases.update(*place, load=float(hosted.stage.sessions))
                await asyncio.wait([hosted.running], timeout=LOAD_SECONDS)
        finally:
            if not hosted.owned:
                leases.standbys.only_stand_by(*place)
                hosted.stage.leave()
                hosted.running.cancel()
                await asyncio.wait([hosted.running])
                if self._hosted.get(place) is hosted:
                    del self._hosted[place]

    async def _promoted(self, place: Place, term: int) -> _Hosted | None:
        """Promote the replica that runs here, with its sessions, to owner under `term`. None where none runs."""
        hosted, replica = self._hosted.get(place), self._replicas.get(place)
        promoted = None
        if hosted is not None and not hosted.running.done() and not hosted.running.cancelling():
            promoted, hosted.owned = hosted, True
            hosted.stage.hold(term)
        elif hosted is not None:
            await asyncio.wait([hosted.running])
            self._hosted.pop(place, None)
        if replica is not None:
            replica.cancel()
        return promoted

    def _end_replica(self, place: Place) -> None:
        if (replica := self._replicas.get(place)) is not None and not replica.cancelling():
            replica.cancel()

    def _kept_for_replicas(self, place: Place, manifest: Manifest) -> int:
        """Memory to keep free for other stages of the job that this peer is proposed to serve and does not yet."""
        job, stage = place
        own_id = self._context.peer_id
        proposed = [other for other, peers in enumerate(manifest.replicas) if own_id in peers]
        awaited = [other for other in proposed if (job, other) not in self._hosted]
        return 0 if stage in proposed else sum(manifest.needed_bytes(other) for other in awaited)

    # --- memory

    def _keep(self, place: Place, manifest: Manifest, bytes_: int) -> bool:
        """Reserve memory for a stage on standby, if there is room."""

        def give_up() -> None:
            # Called from the loop's and the worker's thread.
            self._warm.pop(place, None)
            if (hosted := self._hosted.get(place)) is not None and not hosted.owned:
                self._hosted.pop(place, None)
            self._loop.call_soon_threadsafe(self._end_replica, place)

        def in_use() -> bool:
            hosted = self._hosted.get(place)
            return hosted is not None and hosted.stage.sessions > 0

        beside = self._kept_for_replicas(place, manifest)
        return self._context.memory.keep(place, bytes_, give_up, in_use, beside)

    def _account(self, place: Place) -> None:
        """A session was opened or closed. Runs in the worker thread."""
        hosted = self._hosted.get(place)
        if hosted is None:
            return
        loaded = hosted.loaded
        bytes_, retained = _used_bytes(hosted.manifest, loaded), loaded.plane.retained_bytes()
        least = max(hosted.manifest.needed_bytes(place[1]), bytes_ - retained)
        try:
            self._context.memory.resize(
                *(place, bytes_, bytes_ - least),
                lambda taken: self._loop.call_soon_threadsafe(hosted.stage.shed, taken),
            )
            hosted.kv_bytes, hosted.retained_bytes = loaded.kv_bytes - retained, retained
        except MemoryError:
            sessions = sum(h.stage.sessions for h in list(self._hosted.values()))
            raise MemoryError(
                f"no memory for another session: this peer lends {self._context.memory.lent_bytes >> 20} MiB, which "
                f"its {sessions} sessions, weights and whatever else runs there would exceed"
            ) from None

    async def _report(self, job: JobId, stage: int, hosted: _Hosted) -> None:
        """Publish that the stage is ready, and how many sessions it has."""
        self._context.leases.update(job, stage, ready=True, load=float(hosted.stage.sessions))
        self._began.set()
        self._began = asyncio.Event()
        clock = self._context.clock.monotonic
        then, tokens = clock(), hosted.stage.tokens
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            now, tokens_now = clock(), hosted.stage.tokens
            self._context.leases.update(job, stage, load=float(hosted.stage.sessions))
            hosted.tokens_per_second = (tokens_now - tokens) / (now - then)
            then, tokens = now, tokens_now

    async def _keep_copy(self, place: Place, manifest: Manifest) -> None:
        """Keep a copy of the weights of the stage before, so that they survive its owner where it has no standby."""
        job, stage = place
        before = (stage - 1) % manifest.stages
        while True:
            try:
                await self._context.blobs.of(job).fetch(manifest.weights[before])
                return
            except QuotaExceeded as error:
                log.info("no second copy of stage %d of %s: %s", before, manifest.name, error)
                return
            except SwarmError as error:
                log.info("no second copy of stage %d of %s yet: %s", before, manifest.name, error)
            await asyncio.sleep(COPY_RETRY_SECONDS)

    async def _load(self, place: Place, manifest: Manifest) -> LoadedStage:
        """The loaded stage: from standby, or loaded now."""
        return self._warm.get(place) or await self._loader.load(place, manifest)


async def _to_the_end(task: asyncio.Task[None]) -> None:
    """Await a task and own it: it is cancelled with the caller, and has ended when this returns."""
    try:
        await asyncio.shield(task)
    finally:
        task.cancel()
        await asyncio.wait([task])


def _used_bytes(manifest: Manifest, loaded: LoadedStage) -> int:
    """Bytes of weights and sessions, at least the launcher's estimate."""
    return max(manifest.needed_bytes(loaded.plan.index), loaded.weights_bytes + loaded.kv_bytes)
