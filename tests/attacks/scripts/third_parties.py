"""Attacks with records of peers that do not exist: they make a swarm dial the addresses of a third party, and make users place
their jobs on peers that do not exist."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.scripts.stolen_stages import owners
from attacks.stranger import Stranger, store_request
from attacks.verdict import Verdict
from support.directory_records import peer_record

from fusion.runtime.job.protocol import HOLD
from fusion.runtime.placing.answering_peers import answering_peers
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId, call

NAMES = 256  # false peers in each wave
ADDRESSES = 4  # of each false peer, as many as a peer tries
GHOSTS = 2000
GHOST_SECONDS = 110.0
BATCH = 64
KNOWN_SECONDS = 6.0  # until peers have read the list of peers
ANSWER_SECONDS = 6.0
LISTED_SECONDS = 6.0
WAVE_SECONDS = 12.0
DIALS_PER_SECOND = 1.0  # the most of three peers together


@dataclass
class ThirdParty:
    """A host that is no peer, and counts the connections to it."""

    ports: tuple[int, ...]
    dials: int = 0

    def record_of(self, name: Identity) -> PeerRecord:
        """The record of a false peer, with this host's addresses."""
        return peer_record(
            name, addresses=tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{name.peer_id}" for port in self.ports)
        )


@asynccontextmanager
async def third_party() -> AsyncIterator[ThirdParty]:
    async def count(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.dials += 1
        writer.close()

    servers = [await asyncio.start_server(count, "127.0.0.1", 0) for _ in range(ADDRESSES)]
    found = ThirdParty(tuple(server.sockets[0].getsockname()[1] for server in servers))
    try:
        yield found
    finally:
        for server in servers:
            server.close()


async def dialled_by_peers(one: Stranger) -> dict[str, Any]:
    """Publish waves of hundreds of false peers, each for a moment and all at a third party's addresses, and count the
    connections to it."""
    began = asyncio.get_running_loop().time()
    async with third_party() as third:
        while one.time_left:
            await list_ghosts(one, third, NAMES, LISTED_SECONDS)
            await asyncio.sleep(max(0.0, min(WAVE_SECONDS, one.until - asyncio.get_running_loop().time())))
        return _counted(third, began)


def _counted(third: ThirdParty, began: float) -> dict[str, Any]:
    return {
        "dials": third.dials,
        "dials_per_second": third.dials / (asyncio.get_running_loop().time() - began),
    }


async def list_ghosts(one: Stranger, third: ThirdParty, count: int, seconds: float) -> list[PeerId]:
    """Publish `count` false peers for `seconds`, and return their identities."""
    names = [Identity.generate() for _ in range(count)]
    offers = [one.sealed(third.record_of(name), seconds, name) for name in names]
    for at in range(0, count, BATCH):
        await one.everywhere("store", store_request(offers[at : at + BATCH]))
    return [name.peer_id for name in names]


async def named_in_reports(one: Stranger) -> dict[str, Any]:
    """Report to every peer that an owner has vanished; each report names another false peer."""
    answers: Counter[str] = Counter()
    async with third_party() as third:
        names = await list_ghosts(one, third, NAMES, GHOST_SECONDS)
        await asyncio.sleep(KNOWN_SECONDS)
        began, third.dials = asyncio.get_running_loop().time(), 0
        while one.time_left:
            for (job, stage), _ in owners(one):
                await one.pace()
                about = {"job": job, "stage": stage, "word": b"", "yours": True}
                for victim in one.peers:
                    about |= {"peer": random.choice(names), "term": random.randrange(1, 1 << 20)}
                    with suppress(SwarmError, TimeoutError):
                        async with asyncio.timeout(ANSWER_SECONDS):
                            answers[
                                (await call(one.transport, victim, HOLD.name, "suspect", about)).kind
                            ] += 1
        return {"answers": dict(answers), **_counted(third, began)}


async def few_dials(ground: Ground, verdict: Verdict) -> None:
    rate = verdict.notes["dials_per_second"]
    if rate > DIALS_PER_SECOND:
        verdict.notes["fault: dials"] = f"{rate:.0f} connections a second to one who is no peer"


async def ghost_peers(one: Stranger) -> dict[str, Any]:
    """Publish two thousand false peers with more memory and speed than all others."""
    said = 0
    while one.time_left and said < GHOSTS:
        offers = []
        for _ in range(BATCH):
            name = Identity.generate()
            addresses = (f"/ip4/127.0.0.1/tcp/1/p2p/{name.peer_id}",)
            ghost = peer_record(
                name,
                addresses=addresses,
                flops_per_second=1e18,
                memory_bytes=1 << 50,
                free_memory_bytes=1 << 50,
            )
            offers.append(one.sealed(ghost, GHOST_SECONDS, name))
        await one.everywhere("store", store_request(offers))
        said += len(offers)
    await asyncio.sleep(max(0.0, one.until - asyncio.get_running_loop().time()))
    return {"said": said}


async def no_ghost_gets_a_stage(ground: Ground, verdict: Verdict) -> None:
    listed, began = await ground.reader.peers(), asyncio.get_running_loop().time()
    peers = await answering_peers(ground.user, listed)
    verdict.notes |= {"listed": len(listed), "asked_seconds": asyncio.get_running_loop().time() - began}
    if len(listed) < GHOSTS // 2:
        verdict.notes["fault: listed"] = "the ghosts were not even listed"
    if {peer.peer for peer in peers} != {peer.peer_id for peer in ground.peers}:
        verdict.notes["fault: placed"] = (
            f"a job would be placed on {len(peers)} peers, of {len(ground.peers)}"
        )


ATTACKS = {
    "ghost_peers": Attack(ghost_peers, seconds=20.0, check=no_ghost_gets_a_stage, alone=True),
    "named_in_reports": Attack(named_in_reports, seconds=16.0, check=few_dials),
    "dialled_by_peers": Attack(dialled_by_peers, seconds=30.0, check=few_dials),
}
