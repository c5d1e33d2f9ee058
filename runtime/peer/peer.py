"""One peer process put together: `open_peer` runs a volunteer's peer. (`fusion.runtime.peer.client` joins to use the swarm.)

What `async with` opens, it closes in the opposite order: stages are released before the directory goes, the
directory before the transport, and p2pd last.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fusion.runtime.hosting.takeover import Takeovers
from fusion.runtime.job.context import Context
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer.announcement import Announcement, announced
from fusion.runtime.peer.assembly import Assembly, assemble, job_files, training_and_serving
from fusion.runtime.peer.capability import Capability, measure
from fusion.runtime.peer.client import BLOB_QUOTA_BYTES, keep_torch_cache
from fusion.runtime.peer.keys import IDENTITY_FILE, keys_of
from fusion.runtime.peer.network import Network, allow_more_files, open_network
from fusion.runtime.planes.choice import TORCH, choose
from fusion.swarm.blobs.blobs import BlobConfig
from fusion.swarm.blobs.eviction import Needs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.errors import ClosedSwarm
from fusion.swarm.identity import Identity
from fusion.swarm.links.monitor import LinkMonitor
from fusion.swarm.swarm_key import NO_MEMBER, find_key

BLAME_SECONDS = 0.5
SWITCH_SECONDS = (
    0.001  # for which a thread at work in Python keeps the loop waiting: a fifth of what is usual
)


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    home: Path
    bootstrap: tuple[str, ...] = ()  # multiaddrs; none of them has to answer
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    threads: int | None = None  # None: one per core
    memory_bytes: int | None = None  # None: half of what is free
    device: str = "cpu"
    blob_quota_bytes: int = BLOB_QUOTA_BYTES  # of the disk, for weights, data and snapshots of jobs
    swarm_key: Path | None = None  # of a closed swarm; default: that in the home, where there is one
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
    network: Network
    announcement: Announcement
    parts: Assembly

    async def failed(self) -> BaseException:
        """Wait until p2pd or the hosting ends by itself, or the bootstrap peers turn out to be of another swarm; why it
        did."""
        daemon = asyncio.ensure_future(self.network.transport.failed())
        refused = asyncio.ensure_future(self.announcement.refused.wait())
        try:
            await asyncio.wait([daemon, refused, self.parts.work], return_when=asyncio.FIRST_COMPLETED)
            if refused.done():
                return ClosedSwarm(NO_MEMBER)
            # What p2pd's end broke may be noticed before the end itself.
            await asyncio.wait([daemon], timeout=BLAME_SECONDS)
            if daemon.done():
                return daemon.result()
            return self.parts.work.exception() or RuntimeError("the hosting ended")
        finally:
            daemon.cancel(), refused.cancel()


@asynccontextmanager
async def open_peer(config: PeerConfig) -> AsyncIterator[Peer]:
    """Run a peer until the block ends; it is announced in the directory when the block begins.

    Raises, in one line each, IdentityError, SwarmKeyError, TransportError (a taken port), BlobError or OSError (a full or read-only
    disk), ValueError (a device that is not there).
    """
    config.home.mkdir(parents=True, exist_ok=True)
    keep_torch_cache(config.home)
    allow_more_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    identity = Identity.load_or_create(config.home / IDENTITY_FILE)
    key = find_key(config.home, config.swarm_key)
    threads = config.threads or os.cpu_count() or 1
    store = BlobStore(config.home / "blobs", config.blob_quota_bytes, Needs())
    async with (
        Worker(threads, config.device) as worker,
        Worker() as codec_worker,
        open_network(
            identity,
            store,
            listen=config.listen,
            blobs=_blob_config(config),
            swarm_key=key,
            home=config.home,
            keys=keys_of(config.home),
        ) as network,
        LinkMonitor(network.transport, network.directory, network.transport.counter.receive_log) as links,
    ):
        capability = await worker.run(measure, config.device, threads, config.memory_bytes)
        context = Context(
            peer_id=identity.peer_id,
            transport=network.transport,
            directory=network.directory,
            blobs=network.blobs,
            leases=network.leases,
            worker=worker,
            codec_worker=codec_worker,
            memory=MemoryBudget(capability.memory_bytes),
            home=config.home,
            succession=Takeovers(network.transport, network.leases),
            links=links,
        )
        services = partial(training_and_serving, choose(TORCH, config.device))
        files = job_files(context)
        async with assemble(
            context, services, _fitness(capability), files=files, reachable=lambda: network.transport.alive
        ) as parts:
            # Generated code and its tensors sit in cycles: hundreds of MiB would wait for a collection by chance. What
            # is there already will stay, and need not be looked at, now or each time.
            gc.freeze()
            parts.hosting.on_rest = gc.collect
            async with announced(
                network, context, capability, config.bootstrap, lambda: parts.hosting.hosted
            ) as announcement:
                yield Peer(context, network, announcement, parts)


def _blob_config(config: PeerConfig) -> BlobConfig:
    budget = None if config.upload_mbps is None else config.upload_mbps * 1e6 / 8
    return BlobConfig(upload_bytes_per_second=budget)


def _fitness(capability: Capability) -> float:
    """Score of a claim that nobody proposed, below 1: the faster machine goes first."""
    gigaflops = capability.flops_per_second / 1e9
    return gigaflops / (gigaflops + 1000.0)
