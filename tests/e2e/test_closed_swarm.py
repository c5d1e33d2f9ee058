"""A closed swarm of real peers: members work together, and nobody else gets an answer, on any protocol."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.text_job import write_job

from fusion.runtime.job.protocol import PROTOCOLS
from fusion.runtime.peer.network import open_network
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.dht.guard import Offer
from fusion.swarm.dht.values import key_id
from fusion.swarm.dht.wire import NotOfThisSwarm, Wire
from fusion.swarm.directory.keys import peers_key
from fusion.swarm.errors import ClosedSwarm, StreamBroken, StreamClosed
from fusion.swarm.identity import Identity
from fusion.swarm.protocol import CONTROL
from fusion.swarm.swarm_key import KEY_FILE, NO_MEMBER, find_key, new_key
from fusion.swarm.transport import PeerId

if TYPE_CHECKING:
    from conftest import Peers

pytestmark = pytest.mark.e2e
SECONDS = 120.0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fusion.cli.main", *arguments],
        capture_output=True, text=True, timeout=SECONDS, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture
def key(tmp_path: Path) -> Path:
    made = command("swarm-key", "new", str(tmp_path / "ours.key"))
    assert made.returncode == 0 and (tmp_path / "ours.key").stat().st_mode & 0o077 == 0
    return tmp_path / "ours.key"


@pytest.mark.slow
def test_members_train_and_answer_and_the_key_is_kept_in_the_home(
    peers: Peers, tmp_path: Path, key: Path
) -> None:
    first = peers.start("first", "--swarm-key", str(key))
    second = peers.start("second", "--swarm-key", str(key), bootstrap=(first.address,))
    laptop = ("--home", str(tmp_path / "laptop"), "--peer", second.address, "--swarm-key", str(key))
    job = write_job(tmp_path / "job.toml", "ours", steps=40, peers=(first.peer_id, second.peer_id))
    said = peers.run("train", str(job), *laptop)
    assert said[-1]["state"] == "done"
    peers.run("jobs", "export", "ours", str(tmp_path / "model"), *laptop)
    peers.run("serve", str(tmp_path / "model"), "--name", "m", *laptop)
    # Through the peer that runs here, and by a way of its own with the key that its home has: neither names it.
    for way in ((), ("--peer", second.address)):
        answer = peers.run(
            "generate", "def ", "--model", "m", "--max-tokens", "4", "--home", str(first.home), *way
        )
        assert len(answer[-1]["tokens"]) == 4
    assert find_key(first.home, None) is not None
    peers.stop(second)
    peers.start("second", bootstrap=(first.address,))  # and starts again without being told
    listed = peers.run("status", "--home", str(first.home))
    assert first.peer_id in str(listed) and second.peer_id in str(listed)


def test_who_has_no_key_or_another_one_is_told_so_in_one_line(
    peers: Peers, tmp_path: Path, key: Path
) -> None:
    member = peers.start("member", "--swarm-key", str(key))
    new_key(tmp_path / "other.key")
    other = ("--swarm-key", str(tmp_path / "other.key"))
    for attempt in (
        ("status", "--peer", member.address),
        ("status", "--peer", member.address, *other),
        ("generate", "x", "--model", "m", "--peer", member.address, *other),
        ("jobs", "list", "--bootstrap", member.address),
        ("start", "--listen", "/ip4/127.0.0.1/tcp/0", "--bootstrap", member.address),
        ("start", "--listen", "/ip4/127.0.0.1/tcp/0", "--bootstrap", member.address, *other),
    ):
        began = time.monotonic()
        said = command(*attempt, "--home", str(tmp_path / "stranger"))
        lines = [line for line in said.stderr.splitlines() if line.startswith("fusion-peer: ")]
        assert said.returncode == 2 and lines == [f"fusion-peer: {NO_MEMBER}"], (attempt, said)
        assert not (tmp_path / "stranger" / KEY_FILE).exists(), "a key that is not right is not kept"
        assert time.monotonic() - began < SECONDS / 2
    missing = command("status", "--swarm-key", str(tmp_path / "none"), "--home", str(tmp_path / "stranger"))
    assert missing.returncode == 2 and "swarm-key new" in missing.stderr and missing.stderr.count("\n") == 1


def test_a_stranger_without_a_key_or_with_another_gets_nothing_and_leaves_nothing(
    peers: Peers, tmp_path: Path, key: Path
) -> None:
    member = peers.start("member", "--swarm-key", str(key))
    there = PeerId(member.peer_id)
    place = key_id(peers_key(0)).to_bytes(20, "big")

    async def visit(name: str, other: Identity | None) -> None:
        store = BlobStore(tmp_path / name, 1 << 20)
        async with (
            asyncio.timeout(SECONDS),
            open_network(
                Identity.generate(), store, listen=("/ip4/127.0.0.1/tcp/0",), swarm_key=other
            ) as here,
        ):
            transport = here.transport
            assert await transport.connect(member.address) == there
            for protocol in PROTOCOLS:
                if protocol is CONTROL:
                    continue
                for kind, header in (
                    ("hello", {}),
                    ("status", {}),
                    ("index", {"digest": "0" * 64}),
                    ("generate", {}),
                ):
                    stream = await transport.open(there, protocol.name)
                    try:
                        with pytest.raises((StreamBroken, StreamClosed)):
                            await stream.send(kind, header)
                            raise AssertionError(await stream.receive())
                    finally:
                        stream.abort()
            with pytest.raises(ClosedSwarm):
                await here.directory.join(there)
            wire = Wire(transport.p2p, transport.peer_id, client=False)
            for call in (
                wire.ping(there, 5.0),
                wire.find(there, [key_id(peers_key(0))], 5.0),
                wire.store(there, [Offer(place, b"\xa1x", b"x", time.time() + 60)], 5.0),
            ):
                with pytest.raises(NotOfThisSwarm):
                    await call
            assert here.directory.neighbours() == ()

    asyncio.run(visit("without", None))
    asyncio.run(visit("with another", new_key(tmp_path / "other.key")))
    said = (peers.root / "member.log").read_text()
    assert "Traceback" not in said
