"""Real peers, with their daemons and the directory, train over a network in a box."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from box import kernel
from box.network import Box
from box.network_file import NETWORKS, read_network
from support.processes import marked
from support.text_job import write_job

from fusion.cli.local.fleet import open_fleet

REASON = kernel.unavailable()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(REASON), reason=REASON)]
HOSTS = ("pair-1", "trio-1", "straggler")
STEPS = 5
GONE_SECONDS = 30.0


def test_a_swarm_of_three_trains_on_network_c() -> None:
    async def scenario() -> None:
        with Box(read_network(NETWORKS / "c.toml")) as box:
            async with open_fleet("fleet-") as fleet:
                first, *others = HOSTS
                way_in = await fleet.start_peer(first, listen=box.listen(first), prefix=box.prefix(first))
                joined = await asyncio.gather(
                    *(
                        fleet.start_peer(
                            host,
                            bootstrap=[way_in.address],
                            listen=box.listen(host),
                            prefix=box.prefix(host),
                        )
                        for host in others
                    )
                )
                job = write_job(fleet.root / "job.toml", "boxed", steps=STEPS, stages=3)
                said = await fleet.run(
                    "train", "train", str(job), "--home", str(fleet.root / "laptop"), "--peer", way_in.address,
                    prefix=box.prefix("trio-2"),
                )  # fmt: skip
                assert (said[-1]["event"], said[-1]["state"], said[-1]["step"]) == ("done", "done", STEPS)
                owners = next(record["owners"] for record in said if record.get("owners"))
                assert set(owners) == {peer.peer_id for peer in (way_in, *joined)}
                for host in HOSTS[:2]:
                    there, back = box.carried(host, "straggler"), box.carried("straggler", host)
                    print(f"{host} and straggler: {there}, {back}")
                    assert min(there.bytes, back.bytes) > 0

    asyncio.run(scenario())


def test_peers_in_a_box_go_with_its_owner_however_it_goes(tmp_path: Path) -> None:
    code = (
        "import asyncio\n"
        "from box.network import Box\n"
        "from box.spec import Host, NetworkSpec\n"
        "from fusion.cli.local.fleet import open_fleet\n"
        "async def scenario():\n"
        "    with Box(NetworkSpec(hosts=(Host(name='a'), Host(name='b')))) as box:\n"
        "        async with open_fleet() as fleet:\n"
        "            await fleet.start_peer('a', listen=box.listen('a'), prefix=box.prefix('a'))\n"
        "            print('up', flush=True)\n"
        "            await asyncio.sleep(1000)\n"
        "asyncio.run(scenario())\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    # TMPDIR is also the mark by which its processes are known.
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
            assert len(marked(tmp_path)) >= 4, "the router, the janitor, the peer and its daemon"
        finally:
            owner.kill()
    deadline = time.monotonic() + GONE_SECONDS
    while (left := (marked(tmp_path), os.listdir(tmp_path))) != ([], []) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == ([], [])
