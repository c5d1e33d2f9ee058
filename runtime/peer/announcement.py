"""A peer's membership of the swarm: its record in the directory, its peer file and control socket for commands on this machine, and
its status for other peers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.job.context import Context
from fusion.runtime.peer.capability import Capability
from fusion.runtime.peer.client import CACHED_PEERS_FILE
from fusion.runtime.peer.network import Network
from fusion.runtime.peer.peer_file import RunningPeer, peer_file_kept
from fusion.runtime.peer.status_server import StagesNow, serve_status
from fusion.swarm.control.server import ControlServer
from fusion.swarm.directory.membership import Membership, MembershipConfig
from fusion.swarm.directory.records import MAX_ADDRESS, MAX_ADDRESSES, PeerRecord
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import PeerId

SOFTWARE = version("fusion-peer")  # read from its files once: a record names it every heartbeat
CONTROL_SOCKET = "control.sock"


@dataclass(frozen=True)
class Announcement:
    record: Callable[[], PeerRecord]  # as it is now
    done: asyncio.Event  # set once the record is published
    # Set once the bootstrap peers turn out to be of another swarm, and no other peer is there
    refused: asyncio.Event


@asynccontextmanager
async def announced(
    network: Network,
    context: Context,
    capability: Callable[[], Capability],
    bootstrap: tuple[str, ...],
    stages: Callable[[], StagesNow],
    http: str = "",
) -> AsyncIterator[Announcement]:
    """Be a member of the swarm until the block ends. `capability`: as measured last; `bootstrap`: multiaddrs, none of which has to
    answer; `http`: URL of this peer's HTTP API, for commands on this machine. Raises OSError in one line (a full or read-only
    disk)."""
    transport, directory, started_at = network.transport, network.directory, context.clock.unix()

    def meet(other: PeerId, addresses: Sequence[str], answers: bool) -> None:
        transport.learn(other, addresses)
        if context.links is not None:
            context.links.meet(other, answers=answers)

    def record() -> PeerRecord:
        return record_of(context, capability(), started_at)

    ways = MembershipConfig(bootstrap=bootstrap, cache_path=context.home / CACHED_PEERS_FILE)
    membership = Membership(transport, directory, directory, record, ways, meet)
    await serve_status(context, directory, stages)
    running = RunningPeer(
        peer_id=context.peer_id,
        addresses=tuple(transport.all_addresses),
        pid=os.getpid(),
        control=str(transport.runtime_dir / CONTROL_SOCKET),
        http=http,
    )
    async with membership, ControlServer(transport, directory, Path(running.control)):
        with peer_file_kept(context.home, running):
            yield Announcement(record, membership.announced, membership.refused)


def record_of(context: Context, capability: Capability, started_at: float) -> PeerRecord:
    """This peer's record now; `started_at` in unix seconds."""
    links = context.links
    return PeerRecord(
        peer=context.peer_id,
        name=friendly_name(context.peer_id),
        addresses=_recorded(context.transport.addresses),
        role="peer",
        device=capability.device,
        flops_per_second=capability.flops_per_second,
        memory_bytes=capability.memory_bytes,
        free_memory_bytes=context.memory.free_bytes,
        software=SOFTWARE,
        opset=OPSET_VERSION,
        plane=context.plane,
        lacks=tuple(sorted(context.lacks)),
        speeds=capability.speeds.parts,
        cores=capability.cores,
        started_at=started_at,
        up_mbps=0.0 if links is None else links.up_mbps,
        down_mbps=0.0 if links is None else links.down_mbps,
        coordinate=() if links is None else links.coordinate.parts,
        coordinate_error=0.0 if links is None else links.coordinate.error,
    )


def _recorded(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses, the most useful ones first, that a record has room for: with more it would be refused."""
    return tuple(each for each in addresses if len(each) <= MAX_ADDRESS)[:MAX_ADDRESSES]
