"""A peer process: `open_peer` runs a volunteer's peer. (`fusion.runtime.peer.client` joins to use the swarm.)

`async with` closes the parts in the opposite order: stages are released before the directory closes, the directory before the
transport, and p2pd last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fusion.runtime.job.context import Context
from fusion.runtime.peer.announcement import Announcement, announced
from fusion.runtime.peer.assembly import Assembly, assemble, job_files, training_and_serving
from fusion.runtime.peer.capability import Capability, Measured, unused_gpu
from fusion.runtime.peer.config import PeerConfig
from fusion.runtime.peer.garbage import collected
from fusion.runtime.peer.machine import opened
from fusion.runtime.peer.network import Network
from fusion.runtime.peer.plane_choice import choose
from fusion.runtime.peer.status_server import StagesNow
from fusion.runtime.serving.http.port.server import HttpServer, open_http
from fusion.runtime.serving.models import ServedModels
from fusion.swarm.errors import ClosedSwarm
from fusion.swarm.swarm_key import NO_MEMBER

BLAME_SECONDS = 0.5


@dataclass(frozen=True)
class Peer:
    """A running peer. It cannot go on once `failed` returns."""

    context: Context
    network: Network
    announcement: Announcement
    parts: Assembly
    http: HttpServer | None
    unused_gpu: bool  # there is one, and a CPU computes

    async def failed(self) -> BaseException:
        """Wait until p2pd, the device or the hosting fails, or the bootstrap peers turn out to be of another swarm; gives the error."""
        daemon = asyncio.ensure_future(self.network.transport.failed())
        refused = asyncio.ensure_future(self.announcement.refused.wait())
        lost = asyncio.ensure_future(self.context.compute.lost())
        try:
            await asyncio.wait([daemon, refused, lost, self.parts.work], return_when=asyncio.FIRST_COMPLETED)
            if refused.done():
                return ClosedSwarm(NO_MEMBER)
            if lost.done():
                return lost.result()
            # A failure that p2pd's end caused may be seen before that end.
            await asyncio.wait([daemon], timeout=BLAME_SECONDS)
            if daemon.done():
                return daemon.result()
            return self.parts.work.exception() or RuntimeError("the hosting ended")
        finally:
            daemon.cancel(), refused.cancel(), lost.cancel()


@asynccontextmanager
async def open_peer(config: PeerConfig) -> AsyncIterator[Peer]:
    """Run a peer until the block ends; it is announced in the directory when the block begins.

    Raises, in one line each, IdentityError, SwarmKeyError, TransportError (a taken port), BlobError or OSError (a full or read-only
    disk, a taken port of the HTTP API), ValueError (a device or a plane that is not there, a GPU without room).
    """
    plane = choose(config.plane, config.device, config.compute_threads)
    opening = opened(config, plane.name, plane.lacks, partial(Measured, plane))
    async with opening as (network, context, capability):
        services = partial(training_and_serving, plane)
        files = job_files(context)
        async with (
            assemble(
                context,
                services,
                _fitness(capability()),
                files=files,
                # Without its device a stage has nothing to hand over.
                reachable=lambda: network.transport.alive and not context.compute.is_lost,
            ) as parts,
            collected() as garbage,
        ):
            # Generated code and its tensors are in reference cycles: hundreds of MiB would wait for the next collection.
            parts.hosting.on_rest = garbage.request
            served = parts.services["serve"]
            assert isinstance(served, ServedModels)
            serving = served.generating
            async with (
                _http(config, context, served) as http,
                announced(
                    *(network, context, capability, config.bootstrap),
                    lambda: StagesNow(
                        hosted=parts.hosting.hosted,
                        loading=serving.loading(),
                        failed=parts.hosting.failures(),
                    ),
                    http="" if http is None else http.url,
                ) as announcement,
            ):
                yield Peer(context, network, announcement, parts, http, unused_gpu(config.device))


@asynccontextmanager
async def _http(
    config: PeerConfig, context: Context, served: ServedModels
) -> AsyncIterator[HttpServer | None]:
    """The HTTP API in front of this peer's gateway; None where it is not configured."""
    if config.http is None:
        yield None
        return
    serving = served.generating
    async with open_http(config.http, context, serving.gateway, served.runs, serving.loads) as http:
        yield http


def _fitness(capability: Capability) -> float:
    """Score of claims to stages that we were not proposed for, below 1: the faster machine goes first."""
    gigaflops = capability.flops_per_second / 1e9
    return gigaflops / (gigaflops + 1000.0)
