"""Serving as a peer does it: stages of served models, and a gateway for every model of the swarm."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from fusion.dag import wire
from fusion.dag.cuts import split
from fusion.dag.dims import bind
from fusion.dag.errors import GraphError
from fusion.dag.ir import DTYPE_BYTES
from fusion.dag.stage import Stage
from fusion.runtime.context import Context
from fusion.runtime.errors import JobError, JobFailed
from fusion.runtime.job import Manifest
from fusion.runtime.planes.torch_plane import TorchDecodingStage
from fusion.runtime.progress import Progress
from fusion.runtime.serving.gateway import Gateway, GatewayConfig
from fusion.runtime.serving.request import GENERATE
from fusion.runtime.serving.ring import RingStage, Seat
from fusion.runtime.serving.ring_frames import RingPlan, plan_ring
from fusion.runtime.serving.ring_link import GATEWAY, RING, Ends
from fusion.swarm.directory import HEARTBEAT_SECONDS
from fusion.swarm.errors import QuotaExceeded, StaleTerm, SwarmError
from fusion.swarm.handlers import one_line
from fusion.swarm.records import JobId, JobRecord
from fusion.swarm.transport import Stream

log = logging.getLogger(__name__)

MAX_GRAPH_BYTES = 64 << 20
LOADING_SECONDS = 60.0  # for which a stream waits for a stage that is being loaded
LOADING_WORD_SECONDS = 0.4  # between two words to a gateway that waits
COPY_RETRY_SECONDS = 30.0


Place = tuple[JobId, int]


@dataclass
class _Loaded:
    """A stage in memory: hosted, or warm for when we have to."""

    plan: RingPlan
    plane: TorchDecodingStage
    weights_bytes: int


@dataclass
class _Hosted:
    stage: RingStage
    manifest: Manifest
    loaded: _Loaded
    tokens_per_second: float = 0.0


class ServingService:
    """Registers the ring and generate protocols; runs the stages that `host` is called for, and keeps those that
    `prepare` is called for ready to run."""

    def __init__(self, context: Context, gateway: GatewayConfig | None = None) -> None:
        self._context = context
        self.gateway = Gateway(context, gateway)
        self._hosted: dict[Place, _Hosted] = {}
        self._warm: dict[Place, _Loaded] = {}
        self._loading: dict[Place, asyncio.Task[_Loaded]] = {}
        self._began = asyncio.Event()  # set, and replaced, whenever a stage begins to run here

    async def start(self) -> None:
        await self._context.transport.serve(RING, self._ring)
        await self._context.transport.serve(GENERATE, self.gateway.attend)

    async def aclose(self) -> None:
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        self._warm.clear()
        await self.gateway.aclose()

    async def host(
        self, job: JobId, manifest: Manifest, stage: int, term: int, baton: Mapping[str, Any] | None = None
    ) -> None:
        """Serve one stage until cancelled. Raises JobFailed for a job that no peer could serve (its graph, its
        weights), BlobError where a blob cannot be had, MemoryError where the weights do not fit."""
        context, place = self._context, (job, stage)
        if manifest.serve is None:
            raise JobFailed(f"job {manifest.name} is not one that serves a model")
        seat = Seat(job=job, name=manifest.name, serve=manifest.serve, peer=context.peer_id, term=term)
        try:
            loaded = await self._load(place, manifest)
        finally:
            self._warm.pop(place, None)
        ring = RingStage(
            context.transport, context.compute, loaded.plane, loaded.plan, seat, self._check_memory
        )
        hosted = self._hosted[place] = _Hosted(ring, manifest, loaded)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ring.run())
                tasks.create_task(self._report(job, stage, hosted))
                tasks.create_task(self._keep_copy(manifest, stage))
        except ExceptionGroup as group:  # the first cause, as callers of any other coroutine would see it
            raise RuntimeError(one_line(group.exceptions[0])) from group
        finally:
            del self._hosted[place]

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        """Stand by: the weights on disk, and in memory where there is room beside what runs here. Idempotent. Raises
        JobError, BlobError, QuotaExceeded."""
        place = (job, stage)
        if manifest.serve is None:
            raise JobError(f"job {manifest.name} is not one that serves a model")
        if place not in self._hosted and place not in self._warm:
            try:
                await self._fetch(manifest, stage)
                stages = await self._stages(manifest)
                if self._used_bytes() + _weights_bytes(stages[stage]) <= self._context.memory_bytes:
                    loaded = await self._load(place, manifest)
                    if place not in self._hosted:  # else we were promoted meanwhile
                        self._warm[place] = loaded
            except (JobFailed, MemoryError) as error:
                raise JobError(str(error)) from None
        return record.step

    def forget(self, job: JobId, stage: int) -> None:
        """No longer standing by for the stage."""
        self._warm.pop((job, stage), None)
        loading = self._loading.get((job, stage))
        if loading is not None:
            loading.cancel()

    async def pass_on(self, job: JobId, stage: int) -> Mapping[str, Any]:
        """The peer leaves: the stage is served until the host is cancelled, and its sessions then have a moment to
        move to the successor, who needs nothing from us. JobError where the stage does not run here."""
        hosted = self._hosted.get((job, stage))
        if hosted is None:
            raise JobError(f"stage {stage} of job {job[:12]} does not run here")
        hosted.stage.leave()
        return {}

    def progress(self, job: JobId) -> Progress | None:
        """How the job stands, as the owner of its first stage knows it; None on other peers."""
        hosted = self._hosted.get((job, 0))
        if hosted is None:
            return None
        return Progress(
            job=job,
            state="running",
            stages=hosted.manifest.stages,
            tokens_per_second=hosted.tokens_per_second,
        )

    async def _ring(self, stream: Stream) -> None:
        ends = Ends.from_hello(await stream.receive(), self._context.peer_id)
        hosted = await self._running(stream, ends)
        await hosted.stage.attend(stream, ends.sender)

    async def _running(self, stream: Stream, ends: Ends) -> _Hosted:
        """The stage that the stream is for. One that is ours and not in memory yet is worth waiting for: whoever asks
        has learned of our claim and has nowhere else to go."""
        place = (ends.job, ends.stage)
        until = time.monotonic() + LOADING_SECONDS
        while (hosted := self._hosted.get(place)) is None or not hosted.stage.running:
            if self._context.leases.holds(*place) is None or time.monotonic() > until:
                raise StaleTerm(f"stage {ends.stage} of job {ends.job[:12]} is not served here")
            began = self._began
            try:
                async with asyncio.timeout(LOADING_WORD_SECONDS):
                    await began.wait()
            except TimeoutError:
                if ends.sender == GATEWAY:
                    await stream.send("loading")  # we are here
        return hosted

    def _used_bytes(self) -> int:
        held = [h.loaded for h in list(self._hosted.values())]
        return sum(h.weights_bytes + h.plane.used_bytes() for h in held) + sum(
            warm.weights_bytes for warm in list(self._warm.values())
        )

    def _make_room(self, wanted_bytes: int) -> None:
        """Drop what is only kept warm, oldest first, until there is room beside what runs here, or none is left."""
        while self._warm and self._used_bytes() + wanted_bytes > self._context.memory_bytes:
            with suppress(KeyError, RuntimeError):  # the loop's and the worker's thread both come here
                self._warm.pop(next(iter(self._warm)))

    def _check_memory(self) -> None:
        """In the worker thread, the only one that opens and closes sessions."""
        self._make_room(0)
        used = self._used_bytes()
        if used > self._context.memory_bytes:
            sessions = sum(h.stage.sessions for h in list(self._hosted.values()))
            raise MemoryError(
                f"no memory for another session: this peer lends {self._context.memory_bytes >> 20} MiB and its "
                f"{sessions} sessions and weights would take {used >> 20} MiB"
            )

    async def _report(self, job: JobId, stage: int, hosted: _Hosted) -> None:
        """Say that the stage takes frames, then how busy it is, once a heartbeat."""
        self._context.leases.update(job, stage, ready=True, load=0.0)
        self._began.set()
        self._began = asyncio.Event()
        then, (busy, tokens) = time.monotonic(), hosted.stage.counters()
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now, (busy_now, tokens_now) = time.monotonic(), hosted.stage.counters()
            self._context.leases.update(job, stage, load=min(1.0, (busy_now - busy) / (now - then)))
            hosted.tokens_per_second = (tokens_now - tokens) / (now - then)
            then, busy, tokens = now, busy_now, tokens_now

    async def _keep_copy(self, manifest: Manifest, stage: int) -> None:
        """Hold the weights of the stage before as well, so that they outlive its owner where nobody stands by."""
        before = (stage - 1) % manifest.stages
        while True:
            try:
                await self._context.blobs.fetch(manifest.weights[before])
                return
            except QuotaExceeded as error:
                log.info("no second copy of stage %d of %s: %s", before, manifest.name, error)
                return
            except SwarmError as error:
                log.info("no second copy of stage %d of %s yet: %s", before, manifest.name, error)
            await asyncio.sleep(COPY_RETRY_SECONDS)

    async def _load(self, place: Place, manifest: Manifest) -> _Loaded:
        """The stage in memory. Once, however many wait for it: one that stands by and is promoted in the middle of
        its preparations goes on with them."""
        warm = self._warm.get(place)
        if warm is not None:
            return warm
        loading = self._loading.get(place)
        if loading is None:
            loading = self._loading[place] = asyncio.create_task(self._load_now(place[1], manifest))
            loading.add_done_callback(lambda _: self._loading.pop(place, None))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            # Ours, or that of the work itself (`forget`): then it was not we who were cancelled.
            if loading.cancelled() and not _cancelled_ourselves():
                raise JobError(f"stage {place[1]} of {manifest.name} is not wanted here any more") from None
            raise

    async def _load_now(self, stage: int, manifest: Manifest) -> _Loaded:
        await self._fetch(manifest, stage)
        stages = await self._stages(manifest)
        try:
            plan = plan_ring(stages, stage)
        except JobError as error:
            raise JobFailed(str(error)) from None
        wanted = _weights_bytes(stages[stage])
        self._make_room(wanted)
        path = await self._context.blobs.fetch(manifest.weights[stage])
        device = self._context.device
        try:
            plane = await self._context.compute.run(
                lambda: TorchDecodingStage(stages[stage], load_file(path), device=device)
            )
        except (SafetensorError, ValueError, KeyError) as error:
            raise JobFailed(f"the weights of stage {stage} of {manifest.name}: {error}") from None
        return _Loaded(plan, plane, wanted)

    async def _fetch(self, manifest: Manifest, stage: int) -> None:
        """Everything that the stage needs, on this disk."""
        wanted = [manifest.graph, manifest.weights[stage]]
        if manifest.tokenizer is not None and stage in (0, manifest.stages - 1):
            # No stage reads it, any gateway may: the swarm has to hold it once the launcher is gone.
            wanted.append(manifest.tokenizer)
        await asyncio.gather(*(self._context.blobs.fetch(digest) for digest in wanted))

    async def _stages(self, manifest: Manifest) -> tuple[Stage, ...]:
        data = await self._context.blobs.read(manifest.graph, MAX_GRAPH_BYTES)
        try:
            return await asyncio.to_thread(lambda: split(wire.decode(data), manifest.cuts))
        except GraphError as error:
            raise JobFailed(f"the graph of {manifest.name}: {error}") from None


def _cancelled_ourselves() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _weights_bytes(stage: Stage) -> int:
    return sum(
        prod(bind(dim, {}) for dim in v.type.shape) * DTYPE_BYTES[v.type.dtype] for v in stage.graph.variables
    )
