"""One peer process put together: `open_peer` runs a volunteer's peer. (`fusion.runtime.peer.client` joins to use the swarm.)

What `async with` opens, it closes in the opposite order: stages are released before the directory goes, the
directory before the transport, and p2pd last.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.hosting.hosting import Hosting, Service
from fusion.runtime.hosting.jobs.files import JobFiles
from fusion.runtime.hosting.takeover import Takeovers
from fusion.runtime.job.context import Context
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer.capability import Capability, measure
from fusion.runtime.peer.client import BLOB_QUOTA_BYTES, CACHED_PEERS_FILE, keep_torch_cache
from fusion.runtime.peer.peer_file import RunningPeer, written_down
from fusion.runtime.serving.service import ServingService
from fusion.runtime.training.service import TrainingService
from fusion.swarm.blobs.blobs import BlobConfig, Blobs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import Leases
from fusion.swarm.control.server import ControlServer
from fusion.swarm.directory.dht import HivemindDirectory
from fusion.swarm.directory.membership import Membership, MembershipConfig
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity, friendly_name
from fusion.swarm.links.monitor import LinkMonitor
from fusion.swarm.streams.p2p import P2PConfig, P2PTransport
from fusion.swarm.transport import PeerId, Stream

CONTROL_SOCKET = "control.sock"
SOFTWARE = version("fusion-peer")  # read from its files once: a record names it every heartbeat
BLAME_SECONDS = 0.5
LEAVE_SECONDS = 14.0  # for all stages together; see HAND_OVER_SECONDS in `fusion.cli.start`

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    home: Path
    bootstrap: tuple[str, ...] = ()  # multiaddrs; none of them has to answer
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    threads: int | None = None  # None: one per core
    memory_bytes: int | None = None  # None: half of what is free
    device: str = "cpu"
    blob_quota_bytes: int = BLOB_QUOTA_BYTES
    upload_mbps: float | None = None  # for blobs that others fetch; None: unlimited

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory must be positive, not {self.memory_bytes}")
        if self.upload_mbps is not None and not self.upload_mbps > 0:
            raise ValueError(f"upload_mbps must be positive, not {self.upload_mbps}")


@dataclass(frozen=True)
class Peer:
    """A running peer. It cannot go on once `failed` returns."""

    context: Context
    transport: P2PTransport
    capability: Capability
    membership: Membership
    hosting: Hosting
    work: asyncio.Task[None]  # the hosting; it never ends by itself unless something is wrong
    training: TrainingService
    serving: ServingService
    started_at: float = field(default_factory=time.time)

    async def failed(self) -> BaseException:
        """Wait until p2pd or the hosting ends by itself; why it did."""
        daemon = asyncio.ensure_future(self.transport.failed())
        try:
            await asyncio.wait([daemon, self.work], return_when=asyncio.FIRST_COMPLETED)
            # What p2pd's end broke may be noticed before the end itself.
            await asyncio.wait([daemon], timeout=BLAME_SECONDS)
            if daemon.done():
                return daemon.result()
            return self.work.exception() or RuntimeError("the hosting ended")
        finally:
            daemon.cancel()

    def record(self) -> PeerRecord:
        """What this peer says about itself now."""
        links = self.context.links
        return PeerRecord(
            peer=self.context.peer_id,
            name=friendly_name(self.context.peer_id),
            addresses=self.context.transport.addresses,
            role="peer",
            device=self.capability.device,
            flops_per_second=self.capability.flops_per_second,
            memory_bytes=self.capability.memory_bytes,
            free_memory_bytes=self.context.memory.free_bytes,
            software=SOFTWARE,
            opset=OPSET_VERSION,
            started_at=self.started_at,
            up_mbps=0.0 if links is None else links.up_mbps,
            down_mbps=0.0 if links is None else links.down_mbps,
            coordinate=() if links is None else links.coordinate.parts,
            coordinate_error=0.0 if links is None else links.coordinate.error,
        )


@asynccontextmanager
async def open_peer(config: PeerConfig) -> AsyncIterator[Peer]:
    """Run a peer until the block ends; it is announced in the directory when the block begins.

    Raises, in one line each, IdentityError, TransportError (a taken port), BlobError or OSError (a full or read-only
    disk), ValueError (a device that is not there).
    """
    config.home.mkdir(parents=True, exist_ok=True)
    keep_torch_cache(config.home)
    identity = Identity.load_or_create(config.home / "identity")
    threads = config.threads or os.cpu_count() or 1
    network = P2PConfig(identity=identity, listen=config.listen)
    store = BlobStore(config.home / "blobs", config.blob_quota_bytes)
    async with (
        Worker(threads, config.device) as worker,
        Worker() as codec_worker,
        P2PTransport.start(network) as transport,
        await HivemindDirectory.start(transport.p2p, identity) as directory,
        Blobs(store, transport, directory, _blob_config(config)) as blobs,
        Leases(identity.peer_id, directory) as leases,
        LinkMonitor(transport, directory, transport.counter.receive_log) as links,
    ):
        capability = await worker.run(measure, config.device, threads, config.memory_bytes)
        context = Context(
            peer_id=identity.peer_id,
            transport=transport,
            directory=directory,
            blobs=blobs,
            leases=leases,
            worker=worker,
            codec_worker=codec_worker,
            device=config.device,
            memory=MemoryBudget(capability.memory_bytes),
            home=config.home,
            succession=Takeovers(transport, leases),
            links=links,
        )

        def meet(other: PeerId, addresses: Sequence[str]) -> None:
            transport.learn(other, addresses)
            links.meet(other)

        ways = MembershipConfig(bootstrap=config.bootstrap, cache_path=config.home / CACHED_PEERS_FILE)
        membership = Membership(transport, directory, directory, lambda: peer.record(), ways, meet)
        async with _working(context, transport, capability, membership) as peer, membership:
            running = RunningPeer(
                peer_id=identity.peer_id,
                addresses=tuple(transport.all_addresses),
                pid=os.getpid(),
                control=str(transport.runtime_dir / CONTROL_SOCKET),
            )
            async with ControlServer(transport, directory, Path(running.control)):
                with written_down(config.home, running):
                    yield peer


@asynccontextmanager
async def _working(
    context: Context, transport: P2PTransport, capability: Capability, membership: Membership
) -> AsyncIterator[Peer]:
    training, serving = TrainingService(context), ServingService(context)
    services: dict[str, Service] = {"train": training, "serve": serving}
    files = JobFiles(context.home / "jobs")
    hosting = Hosting(context, services, _fitness(capability), files=files)
    try:
        await training.start()
        await serving.start()
        await hosting.start()
        # Generated code and its tensors sit in cycles: hundreds of MiB would wait for a collection by chance. What
        # is there already will stay, and need not be looked at, now or each time.
        gc.freeze()
        hosting.on_rest = gc.collect
        work = asyncio.create_task(hosting.run(), name="hosting")
        peer = Peer(context, transport, capability, membership, hosting, work, training, serving)
        await context.transport.serve(STATUS.name, lambda stream: _tell_status(stream, peer))
        try:
            yield peer
        finally:
            if transport.alive and not work.done():
                await _hand_over(hosting)
            work.cancel()
            await asyncio.wait([work])
    finally:
        await serving.aclose()


async def _hand_over(hosting: Hosting) -> None:
    """Give our stages to their standbys, in bounded time. What fails here, the others recover from."""
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await hosting.leave()
    except TimeoutError:
        log.warning("not everything was handed over within %.0f s", LEAVE_SECONDS)
    except SwarmError as error:
        log.warning("not handed over: %s", error)


def _blob_config(config: PeerConfig) -> BlobConfig:
    budget = None if config.upload_mbps is None else config.upload_mbps * 1e6 / 8
    return BlobConfig(upload_bytes_per_second=budget)


def _fitness(capability: Capability) -> float:
    """Score of a claim that nobody proposed, below 1: the faster machine goes first."""
    gigaflops = capability.flops_per_second / 1e9
    return gigaflops / (gigaflops + 1000.0)


async def _tell_status(stream: Stream, peer: Peer) -> None:
    """What `fusion-peer status` shows of one peer beyond its record."""
    frame = await stream.receive()
    if frame.kind != "status":
        raise ValueError(f"{STATUS.name} knows status, not {frame.kind[:40]!r}")
    traffic = {
        other: [count.sent_bytes, count.received_bytes]
        for other, count in peer.context.transport.traffic().items()
    }
    hosted = [[job, stage] for job, stage in peer.hosting.hosted]
    await stream.send("status", {"name": peer.record().name, "hosted": hosted, "traffic": traffic})
