"""Every peer of a job is killed at once, then all start again on what their disks hold."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.jobs import with_client
from support.text_job import write_job

from fusion.cli.job_client import watch
from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import Progress

if TYPE_CHECKING:
    from conftest import Peers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS = 10**6  # it does not end
BEFORE = 100
WAIT_SECONDS = 300.0


def test_a_job_survives_the_death_of_everybody(peers: Peers, tmp_path: Path) -> None:
    swarm = peers.swarm(3)
    job_file = write_job(tmp_path / "job.toml", "phoenix", steps=STEPS, snapshot_every=25)
    began = peers.run(
        "train", str(job_file), "--detach", "--home", str(tmp_path / "laptop"), "--peer", swarm[0].address
    )
    job = began[0]["job"]

    async def far_enough(context: Context) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            async for progress in watch(context, job):
                if progress.snapshot_step >= BEFORE:
                    return
        raise AssertionError("it ended before anybody was killed")

    with_client(peers.root / "client", swarm[0].address, far_enough)
    [status] = peers.run("status", "--home", str(swarm[1].home))
    [kept] = [record["snapshot_step"] for record in status["jobs"] if record["job"] == job]
    assert {claim["stage"] for claim in status["stages"]} == {0, 1}
    idle = {peer.peer_id for peer in swarm} - {claim["peer"] for claim in status["stages"]}
    standbys = [claim for claim in status["standbys"] if claim["peer"] in idle]
    assert {claim["stage"] for claim in standbys} == {0, 1}
    assert all(claim["behind"] >= 0 for claim in standbys)

    for peer in swarm:
        peer.process.send_signal(signal.SIGKILL)
    for peer in swarm:
        peers.wait(peer)
    again = [peers.start("peer-2")]
    again += [peers.start(f"peer-{n}", bootstrap=(again[0].address,)) for n in (1, 0)]
    assert {peer.peer_id for peer in again} == {peer.peer_id for peer in swarm}

    async def goes_on(context: Context) -> Progress:
        first: Progress | None = None
        async with asyncio.timeout(WAIT_SECONDS):
            async for progress in watch(context, job):
                if progress.loss is None:
                    continue  # the lead has nothing committed yet
                first = first or progress
                if progress.step >= first.step + BEFORE:
                    return first
        raise AssertionError("it ended")

    first = with_client(peers.root / "client", again[0].address, goes_on)
    assert first.step > kept >= BEFORE
