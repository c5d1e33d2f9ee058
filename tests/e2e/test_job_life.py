"""What becomes of jobs on real peers: launched and left alone, watched, exported, served; stopped; orphaned; crowded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file
from support.jobs import run_to_end, with_client
from support.models import greedy
from support.processes import below
from support.text_job import write_job

from fusion.cli.client import working_peers
from fusion.cli.job_client import find_job, trainer_identity, watch
from fusion.cli.local.chaos_swarm import daemons
from fusion.runtime.capture.models import GPT
from fusion.runtime.job import spec
from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepare import prepare_training
from fusion.runtime.launch.prepared import Prepared
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import Frame, PeerId, call

if TYPE_CHECKING:
    from conftest import Peers

    from fusion.cli.local.fleet import LocalPeer

pytestmark = pytest.mark.e2e
MODEL = GPTConfig(blocks=2, width=32, heads=2, sequence=32)
WAIT_SECONDS = 300.0


def command(peers: Peers, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that may fail, on its own, with what it said."""
    return subprocess.run(
        [sys.executable, "-m", "fusion.cli.main", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=peers.root,
    )


async def prepared_job(context: Context, job: Path, trainer_home: Path) -> Prepared:
    found = spec.load(job)
    peers = await working_peers(context, found.placement.peers)
    trainer = trainer_identity(trainer_home)
    return await asyncio.to_thread(prepare_training, found, peers, context.blobs.store, author=trainer)


async def begin(context: Context, job: Path, trainer_home: Path, step: int) -> JobId:
    """Launch a job, hand it over, and wait until it has come as far as `step`."""
    async with asyncio.timeout(WAIT_SECONDS):
        prepared = await prepared_job(context, job, trainer_home)
        await launch(context, prepared)
        await wait_until_held(context, prepared)
        await reach(context, prepared.job, step)
    return prepared.job


async def reach(context: Context, job: JobId, step: int, least: int = 0) -> Progress:
    """How the job stands once it has come to `step` and has a snapshot; it must never be before the step `least`."""
    async for progress in watch(context, job):
        assert progress.state == "running" and progress.step >= least, progress
        if progress.step >= step and progress.snapshot is not None:
            return progress
    raise AssertionError("the job ended")


async def owners(context: Context, job: JobId, stages: int = 2) -> list[str | None]:
    claims = [winner(await context.directory.claims(job, stage)) for stage in range(stages)]
    return [claim.peer if claim is not None else None for claim in claims]


async def until_idle(context: Context, job: JobId, swarm: Sequence[LocalPeer]) -> None:
    """Until no peer runs a stage of the job."""
    async with asyncio.timeout(WAIT_SECONDS):
        for peer in swarm:
            while any(
                held == job for held, _ in (await status(context, PeerId(peer.peer_id))).header["hosted"]
            ):
                await asyncio.sleep(0.05)


async def status(context: Context, peer: PeerId) -> Frame:
    return await call(context.transport, peer, STATUS.name, "status")


def test_a_job_outlives_its_launcher_and_becomes_a_model_that_answers(peers: Peers, tmp_path: Path) -> None:
    swarm = peers.swarm(3)
    steps = 200
    job = write_job(tmp_path / "job.toml", "life", steps=steps)
    laptop = tmp_path / "laptop"
    began = peers.run("train", str(job), "--detach", "--home", str(laptop), "--peer", swarm[0].address)
    assert began[-1]["event"] == "held" and began[-1]["job"] == began[0]["job"]
    assert not [*laptop.glob("clients/*")]  # the launcher is gone, and its blobs with it
    assert not below(os.getpid(), lambda process: "train" in process.cmdline())

    watched = peers.run("jobs", "watch", "life", "--home", str(swarm[1].home))
    assert watched[-1] == {"event": "done", "job": began[0]["job"], "state": "done", "step": steps}
    seen = [record for record in watched if record["event"] == "progress"]
    assert seen[0]["step"] < steps, "it had ended before anybody watched: the test shows nothing"
    assert seen[-1]["loss"] < 4.0 and seen[-1]["validation_loss"] < 4.0
    assert set(seen[-1]["owners"]) <= {peer.peer_id for peer in swarm}

    directory = tmp_path / "model"
    [exported] = peers.run("jobs", "export", "life", str(directory), "--home", str(swarm[2].home))
    assert exported["step"] == steps
    module = GPT(MODEL)
    module.load_state_dict(load_file(directory / "model.safetensors"), strict=True)
    served = peers.run(
        "serve", str(directory), "--name", "life", "--home", str(laptop), "--peer", swarm[1].address
    )
    assert served[-1]["event"] == "serving"
    said = peers.run(
        "generate", "def ", "--model", "life", "--max-tokens", "20", "--home", str(swarm[2].home)
    )
    tokens = said[-1]["tokens"]
    assert tokens == greedy(module, b"def ", 20) and said[-1]["text"] == bytes(tokens).decode(
        errors="replace"
    )


@pytest.mark.slow
def test_two_jobs_at_once_finish_and_a_third_one_is_stopped_by_its_launcher_alone(
    peers: Peers, tmp_path: Path
) -> None:
    swarm = peers.swarm(2)
    laptop, stranger = tmp_path / "laptop", tmp_path / "stranger"
    files = [write_job(tmp_path / f"{n}.toml", n, steps=150) for n in ("one", "two")]
    endless = write_job(tmp_path / "endless.toml", "endless", steps=10**6)

    async def crowd(context: Context) -> JobId:
        jobs = [await prepared_job(context, file, laptop) for file in files]
        for last in await asyncio.gather(*(run_to_end(context, job) for job in jobs)):
            assert (last.step, last.snapshot_step) == (150, 150) and last.loss is not None and last.loss < 4.0
        return await begin(context, endless, laptop, step=50)

    job = with_client(peers.root / "client", swarm[0].address, crowd)
    refused = command(peers, "jobs", "stop", "endless", "--home", str(stranger), "--peer", swarm[1].address)
    assert refused.returncode in (1, 2) and refused.stdout == ""
    [line] = refused.stderr.splitlines()
    assert "only whoever launched the job may stop it" in line

    async def still_running(context: Context) -> int:
        return (await reach(context, job, 0)).step

    goes_on = with_client(peers.root / "client", swarm[0].address, still_running)
    [stopped] = peers.run("jobs", "stop", "endless", "--home", str(laptop), "--peer", swarm[1].address)
    assert (stopped["job"], stopped["state"]) == (job, "stopped")
    assert stopped["step"] == stopped["saved"] > goes_on, "with a snapshot of its last step"

    async def is_over(context: Context) -> None:
        await until_idle(context, job, swarm)
        assert [progress.state async for progress in watch(context, job)][-1] == "stopped"
        record = await find_job(context, "endless")
        assert record.step == record.snapshot_step == stopped["step"] and record.snapshot is not None
        await asyncio.sleep(2 * HEARTBEAT_SECONDS)  # and nobody takes it up again
        await until_idle(context, job, swarm)
        assert await owners(context, job) == [None, None]

    with_client(peers.root / "client", swarm[1].address, is_over)


@pytest.mark.slow
def test_ctrl_c_on_the_owner_of_a_stage_hands_the_job_to_an_idle_peer(peers: Peers, tmp_path: Path) -> None:
    """First the owner of the second stage leaves, then the lead: each time an idle peer goes on from the snapshot."""
    swarm = {peer.peer_id: peer for peer in peers.swarm(4)}
    steps = 500
    first = list(swarm.values())[:2]
    job_file = write_job(
        tmp_path / "job.toml", "orphan", steps=steps, peers=tuple(peer.peer_id for peer in first)
    )

    def leave(peer: LocalPeer) -> None:
        [daemon] = daemons(peer)
        seconds = peers.stop(peer, signal.SIGINT)
        assert seconds < 5.0 and peer.process.returncode == 0, (seconds, peer.process.returncode)
        assert not daemon.is_running()
        assert set(os.listdir(peer.home)) <= {"blobs", "identity", "jobs", "peers.txt", "scratch"}
        assert not [*peer.home.glob("scratch/*"), *peer.home.glob("blobs/partial/tmp-*")]

    async def live(context: Context) -> Progress:
        job = await begin(context, job_file, tmp_path / "laptop", step=100)
        for stage in (1, 0):
            before = await owners(context, job)
            assert None not in before
            at = await reach(context, job, 0)
            await asyncio.to_thread(leave, swarm[str(before[stage])])
            released = [c for c in await context.directory.claims(job, stage) if c.peer == before[stage]]
            assert [claim.role for claim in released] == ["released"]
            async with asyncio.timeout(WAIT_SECONDS):
                while None in (after := await owners(context, job)):
                    await asyncio.sleep(0.1)
            assert after[stage] != before[stage] and after[1 - stage] == before[1 - stage]
            assert after[stage] not in [peer.peer_id for peer in first]
            async with asyncio.timeout(WAIT_SECONDS):
                # On from the newest snapshot, past where it was, and not from the beginning.
                await reach(context, job, at.step + 50, least=at.snapshot_step)
        async with asyncio.timeout(WAIT_SECONDS):
            async for progress in watch(context, job):
                last = progress
        return last

    entry = list(swarm.values())[3]  # one that stays
    last = with_client(peers.root / "client", entry.address, live)
    assert (last.state, last.step) == ("done", steps), last
