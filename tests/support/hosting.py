"""Hosting over the in-memory swarm, with services that compute nothing and a clock that the tests advance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fusion.runtime.device.new_job_pace import NewJobPace
from fusion.runtime.hosting.handover import HandoverConfig
from fusion.runtime.hosting.hosting import Hosting, HostingConfig
from fusion.runtime.hosting.jobs.files import JobFiles
from fusion.runtime.hosting.takeover import Takeovers
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.progress import Progress
from fusion.runtime.peer.assembly import assemble
from fusion.swarm.blobs.blobs import BlobConfig, Blobs
from fusion.swarm.blobs.eviction import Needs
from fusion.swarm.blobs.index import digest_of
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.election import winner
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.clock import Clock
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, Place, Record
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId

FITNESS = 0.25
SNAPSHOT = Digest("5" * 64)


def lead_figures(job: JobId, **changes: Any) -> Progress:
    """A job's progress as the owner of its first stage reports it."""
    return Progress(
        job=job, state="running", step=30, steps=90, snapshot=SNAPSHOT, snapshot_step=20, **changes
    )


class Pretence:
    """A service whose stages run until the test ends them. With `leases` it marks them as ready."""

    def __init__(self, leases: Leases | None = None) -> None:
        self.leases = leases
        self.handovers: dict[Place, Any] = {}
        self.prepared: list[Place] = []
        self.passed_on: list[Place] = []
        self.stayed: list[Place] = []
        self.on_host: Callable[[JobId, int], object] = lambda job, term: None
        self.running: dict[Place, asyncio.Future[None]] = {}
        self.terms: dict[Place, int] = {}
        self.begun: list[Place] = []
        self.figures: dict[JobId, Progress] = {}
        self.last_snapshots: dict[JobId, Progress] = {}

    async def host(
        self,
        job: JobId,
        manifest: Manifest,
        stage: int,
        term: int,
        handover: Any = None,
        *,
        left: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        place = (job, stage)
        self.begun.append(place)
        self.terms[place] = term
        self.handovers[place] = handover
        self.on_host(job, term)
        if self.leases is not None:
            self.leases.update(job, stage, ready=True)
        self.running[place] = asyncio.get_running_loop().create_future()
        try:
            await self.running[place]
        finally:
            del self.running[place]
            if job in self.figures:
                left(self.figures[job])

    def progress(self, job: JobId) -> Progress | None:
        return self.figures.get(job)

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        self.prepared.append((job, stage))
        return max(record.snapshot_step, 0)

    def forget(self, job: JobId, stage: int) -> None:
        self.prepared.remove((job, stage))

    async def pass_on(self, job: JobId, stage: int) -> dict[str, Any]:
        self.passed_on.append((job, stage))
        return {"step": 7}

    def stop(self, job: JobId) -> bool:
        """Stop the job. If `last_snapshots` has it, it ends with that snapshot after a while."""
        ending = self.last_snapshots.pop(job, None)
        if ending is not None:
            asyncio.get_running_loop().call_later(0.3, self._stopped, job, ending)
        return ending is not None

    def _stopped(self, job: JobId, ending: Progress) -> None:
        self.figures[job] = ending
        if (job, 0) in self.running:
            self.end(job, 0)

    def stay(self, job: JobId, stage: int) -> None:
        self.stayed.append((job, stage))

    def end(self, job: JobId, stage: int, error: BaseException | None = None) -> None:
        future = self.running[job, stage]
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


class CountedBlobs(Blobs):
    """Records which manifests were requested."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requested: list[Digest] = []

    async def read(self, digest: Digest, max_bytes: int, hints: Any = (), *job: Any) -> bytes:
        self.requested.append(digest)
        return await super().read(digest, max_bytes, hints, *job)


@dataclass
class Peer:
    context: Context
    blobs: CountedBlobs
    service: Pretence
    hosting: Hosting
    identity: Identity
    work: asyncio.Task[None] | None = None

    @property
    def id(self) -> PeerId:
        return self.context.peer_id

    async def look(self) -> None:
        """A heartbeat, and another one with the manifests that the first one requested."""
        await self.hosting.beat()
        await manifests_read()
        await self.hosting.beat()

    async def leave(self) -> None:
        assert self.work is not None
        self.work.cancel()
        with suppress(asyncio.CancelledError):
            await self.work
        self.work = None


@dataclass
class Swarm:
    root: Path
    stack: AsyncExitStack
    clock: ManualClock = field(default_factory=ManualClock)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    trainer: Identity = field(default_factory=Identity.generate)
    peers: list[Peer] = field(default_factory=list)
    pooled: bool = False  # stages become ready, so that idle peers stand by for them
    check_seconds: float = 0.05

    async def join(
        self,
        memory_bytes: int = 1000,
        *,
        identity: Identity | None = None,
        persistent: bool = False,
        lacks: frozenset[str] = frozenset(),
        **config: Any,
    ) -> Peer:
        """Start a peer whose hosting acts only when the test calls or nudges it. `identity`: of a peer that restarts with its
        disk; `lacks`: operators that its plane does not run."""
        identity = identity or Identity.generate()
        transport = MemoryTransport(self.network, identity.peer_id)
        directory = MemoryDirectory(self.network, identity, self.clock)
        store = BlobStore(self.root / identity.peer_id, 1 << 30, Needs())
        blobs = CountedBlobs(store, transport, directory, BlobConfig(attempts=1, retry_seconds=0.0))
        await self.stack.enter_async_context(blobs)
        leases = Leases(identity.peer_id, directory, LeaseConfig(heartbeat_seconds=30.0, confirm_seconds=0.0))
        context = Context(
            peer_id=identity.peer_id,
            transport=transport,
            directory=directory,
            blobs=blobs,
            leases=leases,
            worker=None,
            lacks=lacks,
            memory=MemoryBudget(memory_bytes),
            pace=NewJobPace(self.clock),
            takeover=Takeovers(transport, leases, self.check_seconds),
            clock=Clock(self.clock, self.clock),
        )
        service = Pretence(leases if self.pooled else None)
        handover = HandoverConfig(settle_seconds=0.05, look_seconds=0.01)
        config = {"heartbeat_seconds": 3600.0, "nudge_seconds": 0.0, "handover": handover, **config}
        parts = await self.stack.enter_async_context(
            assemble(
                context,
                lambda _: nullcontext({"serve": service}),
                FITNESS,
                config=HostingConfig(**config),
                files=JobFiles(self.root / identity.peer_id / "jobs") if persistent else None,
                reachable=lambda: False,  # nothing is handed over when a test ends
            )
        )
        peer = Peer(context, blobs, service, parts.hosting, identity, parts.work)
        self.peers.append(peer)
        await asyncio.sleep(0)  # its first look
        return peer

    def manifest(self, *proposed: Peer | None, **changes: Any) -> Manifest:
        made = Manifest(
            name="work",
            kind="serve",
            graph=Digest("1" * 64),
            cuts=tuple(range(1, len(proposed))),
            weights=(Digest("2" * 64),) * len(proposed),
            proposed=tuple(peer.id if peer else PeerId("") for peer in proposed),
            serve=ServeConfig(cache="kv", max_sequence=16, vocabulary=32),
            author=self.trainer.peer_id,
        )
        return replace(made, **changes)

    async def launch(self, data: bytes | Manifest, launcher: Identity | None = None, **changes: Any) -> JobId:
        """Give every peer the manifest (or other data), and publish the job as its launcher."""
        data = manifests.encode(data) if isinstance(data, Manifest) else data
        for peer in self.peers:
            peer.blobs.store.put(data)
        job = JobId(digest_of(data))
        await self.announce(job, launcher, **changes)
        return job

    async def announce(self, job: JobId, launcher: Identity | None = None, **changes: Any) -> None:
        launcher = launcher or self.trainer
        record = JobRecord(
            job=job, name="work", kind="serve", state="launching", term=0, step=0, lead=None, stages=1,
            snapshot=None, snapshot_step=-1, author=launcher.peer_id,
        )  # fmt: skip
        await MemoryDirectory(self.network, launcher, self.clock).publish(
            replace(record, **changes), ttl_seconds=100.0
        )

    async def owner(self, job: JobId, stage: int) -> ClaimRecord | None:
        directory = MemoryDirectory(self.network, self.trainer, self.clock)
        return winner(await directory.claims(job, stage))

    async def record(self, job: JobId) -> JobRecord:
        found = await MemoryDirectory(self.network, self.trainer, self.clock).job(job)
        assert found is not None
        return found

    def client(self) -> MemoryTransport:
        return MemoryTransport(self.network, Identity.generate().peer_id)


@asynccontextmanager
async def swarm(root: Path, **options: Any) -> AsyncIterator[Swarm]:
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        made = Swarm(root, stack, **options)
        yield made
        for peer in made.peers:
            if peer.work is not None:
                await peer.leave()


def published_by(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """The records that the peer publishes from now on, as a list that grows."""
    records, publish = list[Record](), peer.context.directory.publish

    async def noted(record: Record, **options: Any) -> None:
        records.append(record)
        await publish(record, **options)

    monkeypatch.setattr(peer.context.directory, "publish", noted)
    return records


def reads_of(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The stages whose claims the peer reads in the directory from now on, as a list that grows."""
    directory, read = peer.context.directory, list[Any]()
    claims = directory.claims

    async def noted(*place: Any) -> Any:
        read.append(place)
        return await claims(*place)

    monkeypatch.setattr(directory, "claims", noted)
    return read


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def manifests_read() -> None:
    def reading() -> bool:
        return any("ManifestShelf" in task.get_name() for task in asyncio.all_tasks())

    await until(lambda: not reading())


async def over(peer: Peer, place: Place) -> None:
    """Wait until the peer does not host the stage any more."""
    await until(lambda: place not in peer.hosting.hosted)
