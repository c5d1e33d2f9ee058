"""What a peer lends of its machine, and its place in the network: store, workers, memory, links."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fusion.runtime.hosting.takeover import Takeovers
from fusion.runtime.job.context import Context
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer.capability import (
    Capability,
    Measured,
    cores_of,
    device_name,
    lent_bytes,
)
from fusion.runtime.peer.client_context import keep_torch_cache
from fusion.runtime.peer.config import PeerConfig
from fusion.runtime.peer.keys import IDENTITY_FILE, keys_of
from fusion.runtime.peer.network import Network, allow_more_files, open_network
from fusion.runtime.peer.resident_memory import drop_code_pages, lent_memory
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.eviction import Needs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.identity import Identity
from fusion.swarm.links.monitor import LinkMonitor
from fusion.swarm.swarm_key import find_key

# For which a thread that runs Python may delay the loop: a fifth of the default.
SWITCH_SECONDS = 0.001


@asynccontextmanager
async def opened(
    config: PeerConfig,
    plane: str,
    lacks: frozenset[str],
    measuring: Callable[[Worker, str], Measured],
) -> AsyncIterator[tuple[Network, Context, Callable[[], Capability]]]:
    """Open until the block ends. `plane`: its name; `lacks`: the operators that it does not run. The capability is measured again now
    and then, by `measuring(worker, device)`. Raises as `fusion.runtime.peer.peer.open_peer`."""
    config.home.mkdir(parents=True, exist_ok=True)
    keep_torch_cache(config.home)
    allow_more_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    identity = Identity.load_or_create(config.home / IDENTITY_FILE)
    key = find_key(config.home, config.swarm_key)
    threads = config.compute_threads
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
        measured = measuring(worker, config.device)
        await measured.measure_at_start()
        lent = config.memory_bytes
        if lent is None:
            lent = int(await worker.run(lent_bytes, config.device))
        name, cores = device_name(config.device, threads), cores_of(config.device, threads)

        def capability() -> Capability:
            return Capability(name, measured.speeds, lent, cores)

        context = Context(
            peer_id=identity.peer_id,
            transport=network.transport,
            directory=network.directory,
            blobs=network.blobs,
            leases=network.leases,
            worker=worker,
            plane=plane,
            lacks=lacks,
            codec_worker=codec_worker,
            flops_per_second=capability().flops_per_second,
            real_pace=measured.pace,
            memory=lent_memory(lent, measured.working_bytes, worker),
            home=config.home,
            takeover=Takeovers(network.transport, network.leases),
            links=links,
        )
        drop_code_pages()
        again = asyncio.create_task(
            measured.measure_repeatedly(lambda: context.memory.free_bytes == lent, drop_code_pages)
        )
        try:
            yield network, context, capability
        finally:
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)


def _blob_config(config: PeerConfig) -> BlobConfig:
    budget = None if config.upload_mbps is None else config.upload_mbps * 1e6 / 8
    return BlobConfig(upload_bytes_per_second=budget)
