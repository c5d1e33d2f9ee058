"""Peers of both planes in one swarm: an owner is killed and a standby of the other plane goes on; a ring of both answers."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file
from support.jobs import with_client
from support.models import greedy
from support.text_job import write_job

from fusion.cli.client import working_peers
from fusion.cli.job_client import trainer_identity, watch
from fusion.runtime.capture.models import GPT
from fusion.runtime.job import spec
from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepare import prepare_training
from fusion.swarm.claims.election import winner
from fusion.swarm.transport import PeerId

if TYPE_CHECKING:
    from conftest import Peers

    from fusion.cli.local.fleet import LocalPeer

pytest.importorskip("jax", reason="the extra jax is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS, TOKENS = 400, 24
WAIT_SECONDS = 550.0
MODEL = GPTConfig(blocks=2, width=32, heads=2, sequence=32)


def trained(
    peers: Peers, root: Path, name: str, owners: list[LocalPeer], victim: LocalPeer | None
) -> Progress:
    """Train a job that only `owners` may begin; how it stood at its end. `victim` is killed on the way, once another peer
    stands by for its stage."""
    ids = tuple(owner.peer_id for owner in owners)
    job_file = write_job(root / f"{name}.toml", name, steps=STEPS, peers=ids, live=False, snapshot_every=20)

    async def work(context: Context) -> Progress:
        async with asyncio.timeout(WAIT_SECONDS):
            found = spec.load(job_file)
            known = await working_peers(context, found.placement.peers)
            author = trainer_identity(root / "trainer")
            prepared = await asyncio.to_thread(
                prepare_training, found, known, context.blobs.store, author=author
            )
            job = await launch(context, prepared)
            held = asyncio.create_task(wait_until_held(context, prepared))
            alive, last = victim, None
            async for progress in watch(context, job):
                last = progress
                if alive is not None and progress.step >= 8 and progress.snapshot is not None:
                    stage = prepared.manifest.proposed.index(PeerId(alive.peer_id))
                    claims = await context.directory.claims(job, stage)
                    if any(claim.role == "standby" and claim.ready for claim in claims):
                        owner = winner(claims)
                        assert owner is not None and owner.peer == alive.peer_id
                        alive.process.send_signal(signal.SIGKILL)
                        alive = None
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            assert alive is None, "it ended before anybody was killed: the test shows nothing"
            assert last is not None and (last.state, last.step) == ("done", STEPS), last
            return last

    return with_client(root / f"client-{name}", owners[0].address, work)


def goes_on(peers: Peers, root: Path, first: LocalPeer, victim: LocalPeer, plane: str) -> LocalPeer:
    """The same job twice over both peers. The second time `victim` is killed, and a standby of that plane, which
    is given back, follows it: what was committed is as if nothing had happened."""
    quiet = trained(peers, root, "quiet", [first, victim], None)
    other = peers.start(f"other-{plane}", "--plane", plane, bootstrap=(first.address,))
    rough = trained(peers, root, "rough", [first, victim], victim)
    assert rough.losses >= 1 and set(rough.owners) == {first.peer_id, other.peer_id}
    # No committed sample lost or doubled, though some steps were run again.
    assert (rough.samples, rough.ledger) == (quiet.samples, quiet.ledger)
    print(f"loss {rough.loss}, of the quiet run {quiet.loss}")
    assert quiet.loss is not None and rough.loss == pytest.approx(quiet.loss, rel=1e-3)
    return other


def test_a_standby_with_torch_goes_on_for_an_owner_with_jax(peers: Peers, tmp_path: Path) -> None:
    first = peers.start("first")
    owner = peers.start("owner", "--plane", "jax", bootstrap=(first.address,))
    goes_on(peers, tmp_path, first, owner, "torch")


def test_a_standby_of_the_other_plane_goes_on_and_both_answer_in_one_ring(
    peers: Peers, tmp_path: Path
) -> None:
    first, second = peers.swarm(2)
    other = goes_on(peers, tmp_path, first, second, "jax")

    folder, home = tmp_path / "model", str(tmp_path / "laptop")
    asked = ("--home", home, "--peer", first.address)
    peers.run("jobs", "export", "rough", str(folder), *asked)
    module = GPT(MODEL)
    module.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    peers.run("serve", str(folder), "--name", "mixed", "--stages", "2", *asked)
    [said] = peers.run("generate", "def ", "--model", "mixed", "--max-tokens", str(TOKENS), *asked)
    assert said["tokens"] == greedy(module, b"def ", TOKENS)
    assert set(said["route"]) == {first.peer_id, other.peer_id}
