"""Training jobs on one peer: loads stages, runs them (`fusion.runtime.training.host`) and reports their progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.fields import build
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.training.host import TrainingHost
from fusion.runtime.training.snapshots.stage_files import sweep
from fusion.runtime.training.stage_loader import StageLoader
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.swarm.directory.records import JobId, JobRecord, Place
from fusion.swarm.identity import is_peer_id
from fusion.swarm.streams.queued_stream import hello
from fusion.swarm.transport import PeerId, Stream

log = logging.getLogger(__name__)

LOADING_SECONDS = 5.0  # that a partner's hello waits for a stage that is being loaded here
CLAIMING_SECONDS = 1.0  # and for one that this peer is a standby of
HANDOVER_PEER = "peer"  # in a handover's header: the peer that holds its blob


class TrainingService:
    def __init__(self, context: Context, loader: StageLoader) -> None:
        self._context = context
        self._loader = loader
        self._hosts: dict[Place, TrainingHost] = {}
        self._loading: set[Place] = set()
        self._load_ended = (
            asyncio.Event()
        )  # set, and replaced, whenever loading a stage has succeeded or failed
        self._changes: dict[JobId, asyncio.Event] = {}

    async def start(self) -> None:
        """Accept streams from the stages of other peers."""
        await asyncio.to_thread(sweep, self._context)
        await self._context.transport.serve(STAGE.name, self._serve)

    async def host(
        self,
        job: JobId,
        manifest: Manifest,
        stage: int,
        term: int,
        handover: Mapping[str, Any] | None = None,
        *,
        left: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Run one stage under our claim's `term` until its job ends (returns), we are cancelled, or it fails: raises
        JobFailed for the whole job; JobError, SwarmError, MemoryError or RuntimeError where only this peer cannot go on.
        `handover`: from the previous owner, which left (`pass_on`); `left` is called with the last progress when our stage has
        ended, however it did."""
        try:
            host = await self._load(job, manifest, stage, term, handover)
            try:
                await host.run()
            except JobFailed as error:
                if host.lead is not None:
                    host.lead.update_progress(state="failed", error=str(error)[:300])
                raise
            finally:
                if self._hosts.get((job, stage)) is host:
                    del self._hosts[job, stage]
                left(host.progress)
                self._signal(job)
        finally:
            self._loader.release(job, stage)

    async def _load(
        self, job: JobId, manifest: Manifest, stage: int, term: int, handover: Mapping[str, Any] | None
    ) -> TrainingHost:
        self._loading.add((job, stage))
        try:
            loaded = await self._loader.load(job, manifest, stage, *_read(handover))
            assert manifest.train is not None, "it would not have loaded"
            context = self._context.on_behalf_of(manifest.author, job)
            host = TrainingHost(context, job, manifest.train, term, loaded, lambda: self._signal(job))
            self._hosts[job, stage] = host
            self._context.leases.update(job, stage, step=loaded.step, ready=True)
            self._signal(job)
            return host
        finally:
            self._loading.discard((job, stage))
            self._load_ended.set()
            self._load_ended = asyncio.Event()

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        """Become, or stay, a standby of a stage: fetch its newest snapshot, data and graph, into memory where there is room.
        Idempotent; called again for each new snapshot. Returns that snapshot's step. Raises SwarmError, JobError, JobFailed."""
        return await self._loader.prepare(job, manifest, stage, record)

    def forget(self, job: JobId, stage: int) -> None:
        """Stop being a standby of the stage."""
        self._loader.forget(job, stage)

    async def pass_on(self, job: JobId, stage: int) -> Mapping[str, Any]:
        """Stop a stage that runs here at a step boundary. Returns the handover for the successor's `host`. JobError where it cannot
        be stopped."""
        host = self._hosts.get((job, stage))
        if host is None:
            raise JobError(f"stage {stage} of job {job[:12]} does not run here")
        return {**(await host.handover.pass_on()).to_header(), HANDOVER_PEER: self._context.peer_id}

    def stay(self, job: JobId, stage: int) -> None:
        """No peer took the stage that `pass_on` stopped: it goes on here."""
        host = self._hosts.get((job, stage))
        if host is not None:
            host.handover.stay()

    def progress(self, job: JobId) -> Progress | None:
        """The job's progress: in full where this peer leads it, the step and the newest snapshot where it runs another of its
        stages, None where it runs none."""
        host = self._host_for(job)
        return None if host is None else host.progress

    def _host_for(self, job: JobId) -> TrainingHost | None:
        """The host of the job's stage that knows most about it: the first one's, if it is here."""
        return self._hosts.get((job, 0)) or next((h for (j, _), h in self._hosts.items() if j == job), None)

    async def watch(self, job: JobId) -> AsyncIterator[Progress]:
        """The progress now and after every change, until the job is finished or has left this peer."""
        last: Progress | None = None
        host = self._host_for(job)
        while host is not None:
            if host.progress != last:  # the last progress of an ended host counts, too
                last = host.progress
                yield last
            elif last.finished:
                return
            elif self._host_for(job) is host:
                # Created only to be waited for: for a job that has gone it would never be removed.
                await self._changes.setdefault(job, asyncio.Event()).wait()
            else:
                host = self._host_for(job)

    def stop(self, job: JobId) -> bool:
        """End the job after the running step, with a snapshot. False if this peer does not lead it, or no step is running: then all
        stages would first restore the newest snapshot."""
        host = self._hosts.get((job, 0))
        return host is not None and host.lead is not None and host.lead.stop()

    # --- streams

    async def _serve(self, stream: Stream) -> None:
        greeting = build(m.Hello, await hello(stream), "hello", known_only=True)
        place = (greeting.job, greeting.target)
        host = await self._host_of(place)
        if host is None:
            await stream.send("later", {"message": f"stage {greeting.target} is not loaded here"})
            await stream.aclose()
            return
        await host.partners.accept(stream, greeting)

    async def _host_of(self, place: Place) -> TrainingHost | None:
        """The host of the stage here, now or soon: in a takeover its partners may be faster than the device, or see our claim before
        we have won it."""
        patience = LOADING_SECONDS if place in self._loading else CLAIMING_SECONDS
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while place not in self._hosts and (place in self._loading or self._loader.is_ahead(*place)):
                    await self._load_ended.wait()
        return self._hosts.get(place)

    def _signal(self, job: JobId) -> None:
        event = self._changes.pop(job, None)
        if event is not None:
            event.set()


def _read(handover: Mapping[str, Any] | None) -> tuple[HandoverState | None, PeerId | None]:
    """A leaving owner's handover, and its peer; None where malformed, as a snapshot will do."""
    if handover is None:
        return None, None
    header = dict(handover)
    peer = header.pop(HANDOVER_PEER, None)
    try:
        return HandoverState.read(header), PeerId(peer) if is_peer_id(peer) else None
    except JobError as error:
        log.warning("the last owner's handover is ignored: %s", error)
        return None, None
