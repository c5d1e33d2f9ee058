"""One peer process put together: `open_peer` runs a volunteer's peer. (`fusion.runtime.peer.client` joins to use the swarm.)

What `async with` opens, it closes in the opposite order: stages are released before the directory goes, the
directory before the transport, and p2pd last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fusion.runtime.hosting.takeover import Takeovers
from fusion.runtime.job.context import Context
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer.announcement import record_of, tell_status
from fusion.runtime.peer.assembly import Assembly, assemble
from fusion.runtime.peer.capability import Capability, measure
from fusion.runtime.peer.client import BLOB_QUOTA_BYTES, CACHED_PEERS_FILE, keep_torch_cache
from fusion.runtime.peer.network import open_network
from fusion.runtime.peer.peer_file import RunningPeer, written_down
from fusion.runtime.planes.choice import TORCH, choose
from fusion.swarm.blobs.blobs import BlobConfig
from fusion.swarm.blobs.eviction import Needs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.control.server import ControlServer
from fusion.swarm.directory.membership import Membership, MembershipConfig
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.identity import Identity
from fusion.swarm.links.monitor import LinkMonitor
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.transport import PeerId

CONTROL_SOCKET = "control.sock"
BLAME_SECONDS = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    home: Path
    bootstrap: tuple[str, ...] = ()  # multiaddrs; none of them has to answer
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    threads: int | None = None  # None: one per core
    memory_bytes: int | None = None  # None: half of what is free
    device: str = "cpu"
    blob_quota_bytes: int = BLOB_QUOTA_BYTES  # of the disk, for weights, data and snapshots of jobs
    upload_mbps: float | None = None  # for blobs that others fetch; None: unlimited

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory must be positive, not {self.memory_bytes}")
        if self.blob_quota_bytes < 1:
            raise ValueError(f"disk must be positive, not {self.blob_quota_bytes}")
        if self.upload_mbps is not None and not self.upload_mbps > 0:
            raise ValueError(f"upload_mbps must be positive, not {self.upload_mbps}")


@dataclass(frozen=True)
class Peer:
    """A running peer. It cannot go on once `failed` returns."""

    context: Context
    transport: P2PTransport
    capability: Capability
    membership: Membership
    parts: Assembly
    started_at: float = field(default_factory=time.time)

    async def failed(self) -> BaseException:
        """Wait until p2pd or the hosting ends by itself; why it did."""
        daemon = asyncio.ensure_future(self.transport.failed())
        try:
            await asyncio.wait([daemon, self.parts.work], return_when=asyncio.FIRST_COMPLETED)
            # What p2pd's end broke may be noticed before the end itself.
            await asyncio.wait([daemon], timeout=BLAME_SECONDS)
            if daemon.done():
                return daemon.result()
            return self.parts.work.exception() or RuntimeError("the hosting ended")
        finally:
            daemon.cancel()

    def record(self) -> PeerRecord:
        """What this peer says about itself now."""
        return record_of(self.context, self.capability, self.started_at)


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
    store = BlobStore(config.home / "blobs", config.blob_quota_bytes, Needs())
    async with (
        Worker(threads, config.device) as worker,
        Worker() as codec_worker,
        open_network(identity, store, listen=config.listen, blobs=_blob_config(config)) as network,
        LinkMonitor(network.transport, network.directory, network.transport.counter.receive_log) as links,
    ):
        transport, directory = network.transport, network.directory
        capability = await worker.run(measure, config.device, threads, config.memory_bytes)
        plane = choose(TORCH, config.device)
        context = Context(
            peer_id=identity.peer_id,
            transport=transport,
            directory=directory,
            blobs=network.blobs,
            leases=network.leases,
            worker=worker,
            codec_worker=codec_worker,
            memory=MemoryBudget(capability.memory_bytes),
            home=config.home,
            succession=Takeovers(transport, network.leases),
            links=links,
        )

        def meet(other: PeerId, addresses: Sequence[str]) -> None:
            transport.learn(other, addresses)
            links.meet(other)

        ways = MembershipConfig(bootstrap=config.bootstrap, cache_path=config.home / CACHED_PEERS_FILE)
        membership = Membership(transport, directory, directory, lambda: peer.record(), ways, meet)
        async with assemble(context, plane, _fitness(capability), lambda: transport.alive) as parts:
            peer = Peer(context, transport, capability, membership, parts)
            await transport.serve(
                STATUS.name, lambda stream: tell_status(stream, context, parts.hosting.hosted)
            )
            running = RunningPeer(
                peer_id=identity.peer_id,
                addresses=tuple(transport.all_addresses),
                pid=os.getpid(),
                control=str(transport.runtime_dir / CONTROL_SOCKET),
            )
            async with membership, ControlServer(transport, directory, Path(running.control)):
                with written_down(config.home, running):
                    yield peer


def _blob_config(config: PeerConfig) -> BlobConfig:
    budget = None if config.upload_mbps is None else config.upload_mbps * 1e6 / 8
    return BlobConfig(upload_bytes_per_second=budget)


def _fitness(capability: Capability) -> float:
    """Score of a claim that nobody proposed, below 1: the faster machine goes first."""
    gigaflops = capability.flops_per_second / 1e9
    return gigaflops / (gigaflops + 1000.0)
