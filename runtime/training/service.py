"""Training jobs on one peer: it loads stages, runs them (`fusion.runtime.training.stage_host`) and answers for their progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fusion.dag import wire
from fusion.dag.cuts import split, tie_groups
from fusion.dag.errors import GraphError
from fusion.dag.stage import Stage, TieGroup
from fusion.runtime.context import Context
from fusion.runtime.data import Batches
from fusion.runtime.errors import JobError, JobFailed
from fusion.runtime.fields import build
from fusion.runtime.job import Manifest, TrainConfig
from fusion.runtime.planes.torch_plane import TorchTrainingStage
from fusion.runtime.progress import Progress
from fusion.runtime.training import messages as m
from fusion.runtime.training import snapshot
from fusion.runtime.training.inbox import Plan
from fusion.runtime.training.stage_files import StageFiles, sweep
from fusion.runtime.training.stage_host import Loaded, TrainingHost
from fusion.swarm.errors import FrameError
from fusion.swarm.records import JobId
from fusion.swarm.transport import Stream

log = logging.getLogger(__name__)

MAX_GRAPH_BYTES = 64 << 20
REMEMBERED = 100  # ended jobs whose last progress is kept
HELLO_SECONDS = 10.0


@dataclass(frozen=True)
class _Ended:
    progress: Progress
    losses: tuple[tuple[int, float], ...]


class TrainingService:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._hosts: dict[tuple[JobId, int], TrainingHost] = {}
        self._ended: dict[JobId, _Ended] = {}
        self._changes: dict[JobId, asyncio.Event] = {}

    async def start(self) -> None:
        """Answer stages of other peers from now on."""
        await asyncio.to_thread(sweep, self._context)
        await self._context.transport.serve(m.PROTOCOL, self._serve)

    async def host(self, job: JobId, manifest: Manifest, stage: int, term: int) -> None:
        """Run one stage under our claim's `term` until its job ends (returns), we are cancelled, or it fails: raises
        JobFailed for the whole job; JobError, SwarmError, MemoryError or RuntimeError where only we cannot go on."""
        if manifest.train is None or not 0 <= stage < manifest.stages:
            raise JobError(f"stage {stage} of {manifest.name} is no stage of a training job")
        loaded = await self._load(job, manifest, manifest.train, stage)
        host = TrainingHost(self._context, job, manifest.train, term, loaded, lambda: self._signal(job))
        self._hosts[job, stage] = host
        try:
            self._context.leases.update(job, stage, step=loaded.start.step, ready=True)
            self._signal(job)
            await host.run()
        except JobFailed as error:
            if host.lead is not None:
                host.lead.tell(state="failed", error=str(error)[:300])
            raise
        finally:
            if self._hosts.get((job, stage)) is host:
                del self._hosts[job, stage]
            if host.lead is not None:
                self._remember(job, _Ended(host.lead.progress, tuple(host.lead.losses)))
            self._signal(job)

    def progress(self, job: JobId) -> Progress | None:
        """How a job stands: everything where we lead it or led it to its end, the step and the newest snapshot where
        we run another of its stages, None for a job that is not here."""
        lead, ended = self._hosts.get((job, 0)), self._ended.get(job)
        if lead is None and ended is not None and ended.progress.finished:
            return ended.progress  # the other stages of it that run here will hear of the end any moment
        host = lead or next((h for (j, _), h in self._hosts.items() if j == job), None)
        if host is not None:
            return host.progress
        return ended.progress if ended is not None else None

    def losses(self, job: JobId) -> tuple[tuple[int, float], ...]:
        """(step, loss) of every step committed under our lead, oldest first."""
        host = self._hosts.get((job, 0))
        if host is not None and host.lead is not None:
            return tuple(host.lead.losses)
        return self._ended[job].losses if job in self._ended else ()

    async def watch(self, job: JobId) -> AsyncIterator[Progress]:
        """The progress now and after every change, until the job is finished or has left this peer."""
        last: Progress | None = None
        while (progress := self.progress(job)) is not None:
            changed = self._changes.setdefault(job, asyncio.Event())
            if progress != last:
                yield progress
                last = progress
            if progress.finished:
                return
            await changed.wait()

    def stop(self, job: JobId) -> bool:
        """End the job after the step that is under way, with a snapshot. False if we do not lead it."""
        host = self._hosts.get((job, 0))
        if host is None:
            return False
        host.stop()
        return True

    async def aclose(self) -> None:
        """Nothing of ours outlives the tasks in which `host` runs."""
        self._ended.clear()

    # --- loading

    async def _load(self, job: JobId, manifest: Manifest, config: TrainConfig, index: int) -> Loaded:
        try:
            stages, ties = await load_stages(self._context, manifest)
        except GraphError as error:
            raise JobFailed(f"the graph of {manifest.name}: {error}") from None
        stage = stages[index]
        plan = Plan(
            stage=stage,
            stages=len(stages),
            ties=tuple(group for group in ties if index in group.stages),
            sizes={"batch": config.microbatch_size, "sequence": config.sequence},
        )
        record = await self._context.directory.job(job)
        start = m.Point()
        if record is not None and record.snapshot is not None:
            start = m.Point(step=record.snapshot_step, digest=record.snapshot)
        files = StageFiles(self._context, job, manifest, stage)
        state = await files.load(start, {})
        batches = await self._batches(manifest, config, stage)
        plane = await self._context.compute.run(
            TorchTrainingStage,
            stage,
            snapshot.variables(state),
            config.optimizer,
            device=self._context.device,
        )
        if start.digest is not None:
            await self._context.compute.run(plane.load_state, state)
        return Loaded(plan=plan, plane=plane, batches=batches, files=files, start=start)

    async def _batches(self, manifest: Manifest, config: TrainConfig, stage: Stage) -> Batches:
        received = {edge.name for edge in stage.receives}
        inputs = [i.name for i in stage.graph.inputs if i.name not in received]
        train = held_out = None
        if Batches.needs_blobs(config, inputs):
            hints = [peer for peer in manifest.proposed if peer]
            train = await self._context.blobs.fetch(config.data.train, hints)
            if config.data.held_out is not None:
                held_out = await self._context.blobs.fetch(config.data.held_out, hints)
        return await asyncio.to_thread(Batches, config, inputs, train, held_out)

    # --- streams

    async def _serve(self, stream: Stream) -> None:
        async with asyncio.timeout(HELLO_SECONDS):
            frame = await stream.receive()
        if frame.kind != "hello":
            raise FrameError(f"{m.PROTOCOL} begins with hello, not {frame.kind[:40]!r}")
        hello = build(m.Hello, frame.header, "hello")
        host = self._hosts.get((hello.job, hello.target))
        if host is None:
            await stream.send("later", {"message": f"stage {hello.target} is not loaded here"})
            await stream.aclose()
            return
        await host.accept(stream, hello)

    # --- books

    def _signal(self, job: JobId) -> None:
        event = self._changes.pop(job, None)
        if event is not None:
            event.set()

    def _remember(self, job: JobId, ended: _Ended) -> None:
        self._ended.pop(job, None)
        self._ended[job] = ended
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]


async def load_stages(context: Context, manifest: Manifest) -> tuple[tuple[Stage, ...], tuple[TieGroup, ...]]:
    """The stages of a job's graph as its manifest cuts it, with the variables that several of them hold.
    Raises BlobError, GraphError."""
    hints = [peer for peer in manifest.proposed if peer]
    data = await context.blobs.read(manifest.graph, MAX_GRAPH_BYTES, hints)

    def cut() -> tuple[tuple[Stage, ...], tuple[TieGroup, ...]]:
        stages = split(wire.decode(data), manifest.cuts)
        return stages, tie_groups(stages)

    return await asyncio.to_thread(cut)
