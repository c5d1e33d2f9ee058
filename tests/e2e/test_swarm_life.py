"""A swarm whose way in is gone, into which many come at once, and which a cut link divides and a healed one unites."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import pytest
from box import kernel
from box.network import Box
from box.spec import Host, NetworkSpec
from support.jobs import with_client

from fusion.cli.local.fleet import Fleet, LocalPeer, open_fleet
from fusion.runtime.job.context import Context
from fusion.swarm.identity import Identity

if TYPE_CHECKING:
    from conftest import Peers

pytestmark = pytest.mark.e2e

JOINERS = 20
SIDES = ("left", "right")
# Long enough for all records of the other side to run out, and for libp2p to give its peers up.
CUT_SECONDS = 20.0
UNITED_SECONDS = 60.0
LISTED_SECONDS = 240.0
NOBODY = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"


async def listed(context: Context, count: int) -> set[str]:
    """The peers that the swarm lists, once they are `count`."""
    async with asyncio.timeout(LISTED_SECONDS):
        while True:
            found = {str(record.peer) for record in await context.directory.peers()}
            if len(found) == count:
                return found
            await asyncio.sleep(0.1)


def test_any_live_peer_is_a_way_in_and_met_peers_are_remembered(peers: Peers) -> None:
    first = peers.start("first")
    second = peers.start("second", bootstrap=(first.address,))
    third = peers.start("third", bootstrap=(first.address,))
    remembered = third.home / "peers.txt"
    deadline = time.monotonic() + LISTED_SECONDS
    while not (remembered.exists() and second.peer_id in remembered.read_text()):
        assert time.monotonic() < deadline, "it remembers nobody"
        time.sleep(0.1)
    peers.stop(first, signal.SIGKILL)
    newcomer = peers.start("newcomer", bootstrap=(second.address,))
    peers.stop(third, signal.SIGKILL)
    back = peers.start("third", bootstrap=(first.address,))  # it knows no other way than the one that is gone
    assert back.peer_id == third.peer_id
    everybody = {second.peer_id, newcomer.peer_id, back.peer_id}

    async def look(context: Context) -> None:
        async with asyncio.timeout(LISTED_SECONDS):
            while await listed(context, len(everybody)) != everybody:
                await asyncio.sleep(0.1)

    with_client(peers.root / "client", back.address, look)


@pytest.mark.alone
@pytest.mark.slow
def test_twenty_join_in_the_same_second(peers: Peers) -> None:
    first = peers.start("first")
    began = time.monotonic()
    joiners = peers.start_together([f"joiner-{i}" for i in range(JOINERS)], bootstrap=(first.address, NOBODY))
    ready = time.monotonic() - began

    async def look(context: Context) -> set[str]:
        return await listed(context, JOINERS + 1)

    found = with_client(peers.root / "client", joiners[-1].address, look)
    print(f"{JOINERS} ready after {ready:.1f} s, all listed after {time.monotonic() - began:.1f} s")
    assert found == {first.peer_id, *(peer.peer_id for peer in joiners)}
    for peer in (first, *joiners):
        lines = (peers.root / f"{peer.name}.log").read_text().splitlines()
        assert not [line for line in lines if "Traceback" in line or line.startswith(" ")], lines


@pytest.mark.slow
@pytest.mark.skipif(bool(kernel.unavailable()), reason=kernel.unavailable() or "it can be made")
def test_two_halves_of_a_swarm_find_each_other_again(traces: str) -> None:
    async def scenario() -> None:
        with Box(NetworkSpec(hosts=tuple(Host(name=side) for side in SIDES))) as box:
            async with open_fleet("fleet-") as fleet:
                first = await start(fleet, box, "first", "left")
                others = await asyncio.gather(
                    *(start(fleet, box, f"other-{i}", SIDES[i % 2], first.address) for i in range(1, 4))
                )
                everybody = {peer.peer_id for peer in (first, *others)}
                here = {first.peer_id, others[1].peer_id}
                assert await united(fleet, box, "left", first, everybody, UNITED_SECONDS)
                box.set_pair(*SIDES, loss=1.0)
                await asyncio.sleep(CUT_SECONDS)
                assert await united(fleet, box, "left", first, here, UNITED_SECONDS)
                assert await united(fleet, box, "right", others[0], everybody - here, UNITED_SECONDS)
                box.set_pair(*SIDES, loss=0.0)
                began = time.monotonic()
                assert await united(fleet, box, "left", first, everybody, UNITED_SECONDS)
                assert await united(fleet, box, "right", others[0], everybody, UNITED_SECONDS)
                print(f"one swarm again after {time.monotonic() - began:.1f} s")

    asyncio.run(scenario())


async def start(fleet: Fleet, box: Box, name: str, side: str, *bootstrap: str) -> LocalPeer:
    return await fleet.start_peer(name, bootstrap=bootstrap, listen=box.listen(side), prefix=box.prefix(side))


async def united(
    fleet: Fleet, box: Box, side: str, through: LocalPeer, wanted: set[str], seconds: float
) -> bool:
    """Whether a newcomer on that side, who knows `through` alone, comes to see exactly these peers."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        [status] = await fleet.run(
            f"status-{time.monotonic_ns()}", "status", "--home", str(fleet.root / "nobody"),
            "--bootstrap", through.address, prefix=box.prefix(side),
        )  # fmt: skip
        found = {each["peer"] for each in status["peers"]}
        print(f"{side}: {len(found)} peers")
        if found == wanted:
            return True
    return False
