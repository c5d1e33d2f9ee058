"""Serving as a peer does it: stages of served models, and a gateway for every model of the swarm."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from math import prod

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
from fusion.runtime.serving.ring_frames import plan_ring
from fusion.runtime.serving.ring_link import RING, Ends
from fusion.swarm.directory import HEARTBEAT_SECONDS
from fusion.swarm.errors import StaleTerm
from fusion.swarm.handlers import one_line
from fusion.swarm.records import JobId
from fusion.swarm.transport import Stream

log = logging.getLogger(__name__)

MAX_GRAPH_BYTES = 64 << 20


@dataclass
class _Hosted:
    stage: RingStage
    manifest: Manifest
    plane: TorchDecodingStage
    weights_bytes: int
    tokens_per_second: float = 0.0


class ServingService:
    """Registers the ring and generate protocols; runs the stages that `host` is called for."""

    def __init__(self, context: Context, gateway: GatewayConfig | None = None) -> None:
        self._context = context
        self.gateway = Gateway(context, gateway)
        self._hosted: dict[tuple[JobId, int], _Hosted] = {}

    async def start(self) -> None:
        await self._context.transport.serve(RING, self._ring)
        await self._context.transport.serve(GENERATE, self.gateway.attend)

    async def aclose(self) -> None:
        await self.gateway.aclose()

    async def host(self, job: JobId, manifest: Manifest, stage: int, term: int) -> None:
        """Serve one stage until cancelled. Raises JobFailed for a job that no peer could serve (its graph, its
        weights), BlobError where a blob cannot be had, MemoryError where the weights do not fit."""
        context = self._context
        if manifest.serve is None:
            raise JobFailed(f"job {manifest.name} is not one that serves a model")
        seat = Seat(job=job, name=manifest.name, serve=manifest.serve, peer=context.peer_id, term=term)
        stages = await self._stages(manifest)
        try:
            plan = plan_ring(stages, stage)
        except JobError as error:
            raise JobFailed(str(error)) from None
        plane = await self._load(manifest, stages[stage])
        if manifest.tokenizer is not None and stage in (0, manifest.stages - 1):
            # No stage reads it, any gateway may: the swarm has to hold it once the launcher is gone.
            await context.blobs.fetch(manifest.tokenizer)
        ring = RingStage(context.transport, context.compute, plane, plan, seat, self._check_memory)
        hosted = _Hosted(ring, manifest, plane, _weights_bytes(stages[stage]))
        self._hosted[job, stage] = hosted
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ring.run())
                tasks.create_task(self._report(job, stage, hosted))
        except ExceptionGroup as group:  # the first cause, as callers of any other coroutine would see it
            raise RuntimeError(one_line(group.exceptions[0])) from group
        finally:
            del self._hosted[job, stage]

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
        hosted = self._hosted.get((ends.job, ends.stage))
        if hosted is None:
            raise StaleTerm(f"stage {ends.stage} of job {ends.job[:12]} is not served here")
        await hosted.stage.attend(stream, ends.sender)

    def _check_memory(self) -> None:
        """In the worker thread, the only one that opens and closes sessions."""
        hosted = list(self._hosted.values())
        used = sum(h.weights_bytes + h.plane.used_bytes() for h in hosted)
        if used > self._context.memory_bytes:
            raise MemoryError(
                f"no memory for another session: this peer lends {self._context.memory_bytes >> 20} MiB and its "
                f"{sum(h.stage.sessions for h in hosted)} sessions and weights would take {used >> 20} MiB"
            )

    async def _report(self, job: JobId, stage: int, hosted: _Hosted) -> None:
        """Say that the stage takes frames, then how busy it is, once a heartbeat."""
        self._context.leases.update(job, stage, ready=True, load=0.0)
        then, (busy, tokens) = time.monotonic(), hosted.stage.counters()
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now, (busy_now, tokens_now) = time.monotonic(), hosted.stage.counters()
            self._context.leases.update(job, stage, load=min(1.0, (busy_now - busy) / (now - then)))
            hosted.tokens_per_second = (tokens_now - tokens) / (now - then)
            then, busy, tokens = now, busy_now, tokens_now

    async def _stages(self, manifest: Manifest) -> tuple[Stage, ...]:
        data = await self._context.blobs.read(manifest.graph, MAX_GRAPH_BYTES)
        try:
            return await asyncio.to_thread(lambda: split(wire.decode(data), manifest.cuts))
        except GraphError as error:
            raise JobFailed(f"the graph of {manifest.name}: {error}") from None

    async def _load(self, manifest: Manifest, stage: Stage) -> TorchDecodingStage:
        path = await self._context.blobs.fetch(manifest.weights[stage.index])
        device = self._context.device
        try:
            return await self._context.compute.run(
                lambda: TorchDecodingStage(stage, load_file(path), device=device)
            )
        except (SafetensorError, ValueError, KeyError) as error:
            raise JobFailed(f"the weights of stage {stage.index} of {manifest.name}: {error}") from None


def _weights_bytes(stage: Stage) -> int:
    return sum(
        prod(bind(dim, {}) for dim in v.type.shape) * DTYPE_BYTES[v.type.dtype] for v in stage.graph.variables
    )
