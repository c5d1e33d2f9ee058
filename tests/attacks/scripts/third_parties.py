"""What a stranger can have peers do to somebody who is no peer: records say where a peer listens, and they are dialled there."""

from __future__ import annotations

import asyncio
from typing import Any

from attacks.ground import Ground
from attacks.hold import Attack
from attacks.stranger import Stranger, store_request
from attacks.verdict import Verdict
from support.directory_records import peer_record

from fusion.swarm.identity import Identity

NAMES = 256  # of peers that there are not, in each wave
ADDRESSES = 4  # of each, which is as many as a peer tries
BATCH = 64
LISTED_SECONDS = 6.0
WAVE_SECONDS = 12.0
DIALS_PER_SECOND = 1.0  # of three peers together, at the most


async def dialled_by_peers(one: Stranger) -> dict[str, Any]:
    """Hundreds of peers that there are not are listed for a moment, all of them at the addresses of one who is no peer; then
    others. Connections to these are counted."""
    dials = 0

    async def count(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dials
        dials += 1
        writer.close()

    servers = [await asyncio.start_server(count, "127.0.0.1", 0) for _ in range(ADDRESSES)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    began = asyncio.get_running_loop().time()
    while one.time_left:
        offers = []
        for _ in range(NAMES):
            name = Identity.generate()
            addresses = tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{name.peer_id}" for port in ports)
            offers.append(one.sealed(peer_record(name, addresses=addresses), LISTED_SECONDS, name))
        for at in range(0, NAMES, BATCH):
            await one.everywhere("store", store_request(offers[at : at + BATCH]))
        await asyncio.sleep(min(WAVE_SECONDS, one.until - asyncio.get_running_loop().time()))
    for server in servers:
        server.close()
    return {"dials": dials, "dials_per_second": dials / (asyncio.get_running_loop().time() - began)}


async def few_dials(ground: Ground, verdict: Verdict) -> None:
    rate = verdict.notes["dials_per_second"]
    if rate > DIALS_PER_SECOND:
        verdict.notes["fault: dials"] = f"{rate:.0f} connections a second to one who is no peer"


ATTACKS = {"dialled_by_peers": Attack(dialled_by_peers, seconds=30.0, check=few_dials)}
