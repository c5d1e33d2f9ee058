"""One peer process put together: `open_peer` runs a volunteer's peer, `open_client` joins the swarm to use it.

What `async with` opens, it closes in the opposite order: stages are released before the directory goes, the
directory before the transport, and p2pd last.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.hosting.hosting import Hosting, Service
from fusion.runtime.hosting.jobs.job_files import JobFiles
from fusion.runtime.hosting.takeover import Takeovers
from fusion.runtime.job.context import Context
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer.capability import Capability, measure
from fusion.runtime.serving.service import ServingService
from fusion.runtime.training.service import TrainingService
from fusion.swarm.blobs.blobs import BlobConfig, Blobs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import Leases
from fusion.swarm.directory.dht import DhtConfig, HivemindDirectory
from fusion.swarm.directory.membership import Membership, MembershipConfig
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.errors import PeerUnreachable, SwarmError
from fusion.swarm.identity import Identity, friendly_name
from fusion.swarm.links.monitor import LinkMonitor
from fusion.swarm.streams.p2p import P2PConfig, P2PTransport
from fusion.swarm.transport import PeerId, Stream

STATUS_PROTOCOL = "/fusion/status/1"
PEER_FILE = "peer.json"
CACHED_PEERS_FILE = "peers.txt"
BLOB_QUOTA_BYTES = 50 << 30
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


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    home: Path
    bootstrap: tuple[str, ...] = ()
    peer: str | None = (
        None  # the only peer to join through; default: the one that runs with this home, and bootstrap
    )
    join_seconds: float = 15.0


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
            free_memory_bytes=max(0, self.hosting.free_memory_bytes),
            software=version("fusion-peer"),
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
    _keep_torch_cache(config.home)
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
        LinkMonitor(transport, directory, transport.receive_log) as links,
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
            memory_bytes=capability.memory_bytes,
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
            with _written_down(config.home / PEER_FILE, transport):
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
        await context.transport.serve(STATUS_PROTOCOL, lambda stream: _tell_status(stream, peer))
        try:
            yield peer
        finally:
            if transport.alive and not work.done():
                await _hand_over(hosting)
            work.cancel()
            await asyncio.wait([work])
    finally:
        await training.aclose()
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


@contextmanager
def _written_down(path: Path, transport: P2PTransport) -> Iterator[None]:
    """Tell commands on this machine where the running peer is, for as long as it runs."""
    scratch = path.with_suffix(".new")
    addresses = list(transport.all_addresses)
    try:
        scratch.write_text(
            json.dumps({"peer_id": transport.peer_id, "addresses": addresses, "pid": os.getpid()})
        )
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise OSError(
            f"cannot write {path}: {error.strerror}; free some space or choose another --home"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


async def _tell_status(stream: Stream, peer: Peer) -> None:
    """What `fusion-peer status` shows of one peer beyond its record."""
    frame = await stream.receive()
    if frame.kind != "status":
        raise ValueError(f"{STATUS_PROTOCOL} knows status, not {frame.kind[:40]!r}")
    traffic = {
        other: [count.sent_bytes, count.received_bytes]
        for other, count in peer.context.transport.traffic().items()
    }
    hosted = [[job, stage] for job, stage in peer.hosting.hosted]
    await stream.send("status", {"name": peer.record().name, "hosted": hosted, "traffic": traffic})


@asynccontextmanager
async def open_client(config: ClientConfig) -> AsyncIterator[Context]:
    """Join the swarm without lending anything: launch, ask, watch. The identity lasts as long as the block.

    Raises PeerUnreachable, in one line, if no peer of the swarm answers within `join_seconds`.
    """
    config.home.mkdir(parents=True, exist_ok=True)
    identity = Identity.generate()
    ways = (config.peer,) if config.peer else (*_running_here(config.home), *config.bootstrap)
    if not ways:
        raise PeerUnreachable(
            "no peer to join through; name one with --peer or --bootstrap, or run: fusion-peer start"
        )
    network = P2PConfig(identity=identity)
    async with (
        _own_store(config.home / "clients") as store,
        P2PTransport.start(network) as transport,
        await HivemindDirectory.start(transport.p2p, identity, DhtConfig(client=True)) as directory,
        Blobs(store, transport, directory) as blobs,
        Leases(identity.peer_id, directory) as leases,
    ):
        context = Context(
            peer_id=identity.peer_id,
            transport=transport,
            directory=directory,
            blobs=blobs,
            leases=leases,
            worker=None,
            memory_bytes=0,
            home=config.home,
        )
        membership = Membership(
            transport, directory, directory, None, MembershipConfig(bootstrap=ways), transport.learn
        )
        async with membership:
            try:
                async with asyncio.timeout(config.join_seconds):
                    await membership.joined.wait()
            except TimeoutError:
                tried = ", ".join(ways[:3])
                raise PeerUnreachable(
                    f"no peer answers at {tried} (waited {config.join_seconds:.0f} s)"
                ) from None
            yield context


def _keep_torch_cache(folder: Path) -> None:
    """Torch makes a folder for its caches, used or not, which would stay behind in the system's temporary one."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))


@asynccontextmanager
async def _own_store(folder: Path) -> AsyncIterator[BlobStore]:
    """A blob store for this process alone, removed afterwards; those of clients that were killed go as well."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        if not (left.name.isdecimal() and psutil.pid_exists(int(left.name))):
            shutil.rmtree(left, ignore_errors=True)
    own = folder / str(os.getpid())
    _keep_torch_cache(own)
    try:
        yield BlobStore(own, BLOB_QUOTA_BYTES)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _running_here(home: Path) -> tuple[str, ...]:
    """Addresses of the peer that runs with this home, as it wrote them down."""
    try:
        addresses = json.loads((home / PEER_FILE).read_text())["addresses"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(str(address) for address in addresses[:4])
