"""Peers of this release and of the next one, whose records and op-set are newer by one, in one swarm."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.jobs import with_client
from support.releases import next_release
from support.text_job import write_job

from fusion.cli.job_client import find_job
from fusion.cli.local.fleet import Record
from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.job.context import Context
from fusion.swarm.directory.api import HEARTBEAT_SECONDS

if TYPE_CHECKING:
    from conftest import Peers

    from fusion.cli.local.fleet import LocalPeer

pytestmark = pytest.mark.e2e
SECONDS = 300.0


@pytest.fixture
def newer(tmp_path: Path) -> Sequence[str]:
    return next_release(tmp_path / "next")


def opsets(peers: Peers, through: LocalPeer) -> dict[str, int]:
    async def read(context: Context) -> dict[str, int]:
        return {peer.peer: peer.opset for peer in await context.directory.peers() if peer.role == "peer"}

    return with_client(peers.root / "looking", through.address, read)


@pytest.mark.slow
def test_two_releases_train_one_job_and_the_older_leaves_what_it_cannot_run(
    peers: Peers, tmp_path: Path, newer: Sequence[str]
) -> None:
    old = peers.start("old")
    new = peers.start("new", bootstrap=(old.address,), prefix=newer)
    assert opsets(peers, old) == {old.peer_id: OPSET_VERSION, new.peer_id: OPSET_VERSION + 1}
    home = ("--home", str(tmp_path / "laptop"), "--peer", new.address)
    pinned = write_job(tmp_path / "both.toml", "both", steps=60, peers=(old.peer_id, new.peer_id), live=False)
    said = peers.run("train", str(pinned), *home, prefix=newer)
    seen = [record for record in said if record["event"] == "progress"]
    assert said[-1]["state"] == "done" and set(seen[-1]["owners"]) == {old.peer_id, new.peer_id}

    job = write_job(tmp_path / "newer.toml", "newer", steps=10**6, stages=1)
    job.write_text(job.read_text().replace("heads = 2", "heads = 2\ndropout = 0.1"))
    began = peers.run("train", str(job), "--detach", *home, prefix=newer)
    log = peers.root / "old.log"
    refusal = f"needs op-set {OPSET_VERSION + 1}: this peer knows {OPSET_VERSION}"
    deadline = time.monotonic() + SECONDS
    while refusal not in log.read_text():
        assert time.monotonic() < deadline, "it never looked at the job"
        time.sleep(0.1)

    async def holders(context: Context) -> tuple[str, set[str]]:
        await asyncio.sleep(3 * HEARTBEAT_SECONDS)
        record = await find_job(context, "newer")
        return record.state, {claim.peer for claim in await context.directory.claims(record.job, 0)}

    assert with_client(peers.root / "looking", old.address, holders) == ("running", {new.peer_id})
    assert log.read_text().count(refusal) == 1 and "Traceback" not in log.read_text()
    [stopped] = peers.run("jobs", "stop", began[0]["job"], *home, prefix=newer)
    assert stopped["state"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ours", "next"])
def test_owners_of_either_release_may_be_killed(
    peers: Peers, tmp_path: Path, newer: Sequence[str], launcher: str
) -> None:
    """While a job trains on both; then a model is served on both, and any of them answers."""
    prefix = newer if launcher == "next" else ()
    old = peers.start("old-0")
    rest = {"old-1": (), "new-0": newer, "new-1": newer}
    swarm = [old, *(peers.start(name, bootstrap=(old.address,), prefix=p) for name, p in rest.items())]
    new = swarm[2]
    home = ("--home", str(tmp_path / "laptop"), "--peer", swarm[3].address)
    job = write_job(tmp_path / "job.toml", "both", steps=600, peers=(old.peer_id, new.peer_id))
    killed: list[LocalPeer] = []

    def follow(record: Record) -> None:
        if record["event"] == "progress" and killed_after(len(killed)) <= record["step"]:
            victim = next((peer for peer in (new, old) if peer not in killed), None)
            if victim is not None and victim.peer_id in record["owners"]:
                killed.append(victim)
                victim.process.send_signal(signal.SIGKILL)

    said = peers.run("train", str(job), *home, prefix=prefix, on_record=follow)
    assert (said[-1]["state"], said[-1]["step"], killed) == ("done", 600, [new, old])
    left = [swarm[1], swarm[3]]
    owners = [record["owners"] for record in said if record["event"] == "progress"][-1]
    assert set(owners) <= {peer.peer_id for peer in left}

    directory = tmp_path / "model"
    peers.run("jobs", "export", "both", str(directory), *home, prefix=prefix)
    peers.run("serve", str(directory), "--name", "m", "--stages", "2", *home, prefix=prefix)
    ask = ("generate", "def ", "--model", "m", "--max-tokens", "12", "--home", str(tmp_path / "user"))
    answers = [peers.run(*ask, "--peer", peer.address, prefix=p) for peer in left for p in ((), newer)]
    assert len({tuple(answer[-1]["tokens"]) for answer in answers}) == 1
    peers.stop(left[1], signal.SIGKILL)
    assert peers.run(*ask, "--peer", left[0].address)[-1]["tokens"] == answers[0][-1]["tokens"]


def killed_after(count: int) -> int:
    """The step at which the next owner is killed."""
    return 100 + 200 * count
