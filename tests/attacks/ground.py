"""Where attacks are held: three real peers on loopback that train a job and serve a model, and honest users of them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.honest_answers import Answers, served_model
from attacks.honest_training import Committed, training_job
from attacks.stranger import Scene
from support.directory_records import claim_record, digest
from support.leaks import nothing_left

from fusion.cli.local.fleet import Fleet, LocalPeer, open_fleet
from fusion.runtime.job.context import Context
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.launch.launch import Prepared, launch, wait_until_held
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.swarm.claims.election import winner
from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PConfig, P2PTransport
from fusion.swarm.transport import PeerId, call

HERE = Path(__file__).parent
PEERS = 3
NICENESS = -10
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
OPERATION_SECONDS = 4.0  # for an operation of the directory's honest users: a lease lasts 6 s
HELD_SECONDS = 120.0
WARM_STEPS = 10
HONEST_JOB = JobId(digest("an honest job"))  # that is only published and claimed


@dataclass
class Ground:
    """The peers and their honest users: a trainer, whose job and model they run; a user, who asks and reads the
    directory; an author, who publishes records of a job that nobody runs."""

    fleet: Fleet
    peers: list[LocalPeer]
    user: Context
    author: HivemindDirectory
    author_identity: Identity
    trainer: Identity
    training: Prepared
    serving: Prepared
    committed: Committed
    answers: Answers
    route: tuple[
        tuple[PeerId, int], ...
    ]  # owner and term of each stage of the served model, when the ground was opened

    @property
    def scene(self) -> Scene:
        """What a stranger knows of it: all of this is public."""
        return Scene(
            addresses=tuple(peer.address for peer in self.peers),
            training=self.training.job,
            serving=self.serving.job,
            trainer=self.trainer.peer_id,
            route=self.route,
            weights=self.serving.manifest.weights,
        )

    @property
    def reader(self) -> Directory:
        return self.user.directory

    def reports(self) -> list[list[dict[str, Any]]]:
        """Of each peer, what `attacks.watched` wrote."""
        return [_lines(self.fleet.root / f"{peer.name}.watch") for peer in self.peers]

    def log(self, peer: LocalPeer) -> str:
        return (self.fleet.root / f"{peer.name}.log").read_text("utf-8", "replace")

    async def operation(self, step: int) -> bool:
        """A claim is renewed and read, all peers are listed, and each of them says what it does."""
        record = claim_record(self.author_identity, job=HONEST_JOB, step=step)
        try:
            async with asyncio.timeout(OPERATION_SECONDS):
                await self.author.publish(record)
                claims = await self.reader.claims(HONEST_JOB, 0)
                listed = {each.peer for each in await self.reader.peers()}
                for peer in self.peers:
                    await call(self.user.transport, PeerId(peer.peer_id), STATUS.name, "status")
        except (SwarmError, TimeoutError):
            return False
        return record in claims and {peer.peer_id for peer in self.peers} <= listed


@asynccontextmanager
async def open_ground(count: int = PEERS) -> AsyncIterator[Ground]:
    """The job trains and the model answers when the block begins. Stages 0 and 1 of the job are at the peers 0 and 1, those
    of the model at 1 and 2; the user asks the peer 0."""
    async with AsyncExitStack() as stack:
        _before_others(stack)
        traces = stack.enter_context(nothing_left())
        _environment(stack, traces.environment)
        fleet = await stack.enter_async_context(open_fleet("attack-"))
        committed = Committed()
        peers: list[LocalPeer] = []
        for number in range(count):
            name = f"peer-{number}"
            command = (sys.executable, str(HERE / "watched.py"), str(fleet.root / f"{name}.watch"))
            bootstrap = (peers[0].address,) if peers else ()
            peer = await fleet.start_peer(
                name, "--tell-steps", bootstrap=bootstrap, command=command, on_record=committed.hear
            )
            peers.append(peer)
        address = peers[0].address
        user = await stack.enter_async_context(
            open_client(ClientConfig(home=fleet.root / "user", peer=address))
        )
        author, author_identity = await _author(stack, address)
        trainer = Identity.generate()
        ids = [PeerId(peer.peer_id) for peer in peers]
        training = await fleet.in_thread(training_job, user.blobs.store, trainer, [ids[0], ids[1 % count]])
        serving = await fleet.in_thread(served_model, user.blobs.store, trainer, [ids[1 % count], ids[-1]])
        committed.job = training.job
        answers = Answers(user.transport, ids[0], serving.manifest.name)
        async with asyncio.timeout(HELD_SECONDS):
            for prepared in (training, serving):
                await launch(user, prepared)
            for prepared in (training, serving):
                await wait_until_held(user, prepared)
            await committed.begun(WARM_STEPS)
            await answers.learn()
        owners = [winner(await user.directory.claims(serving.job, stage)) for stage in range(2)]
        route = tuple((owner.peer, owner.term) for owner in owners if owner is not None)
        yield Ground(
            fleet, peers, user, author, author_identity, trainer, training, serving, committed, answers, route
        )


async def _author(stack: AsyncExitStack, address: str) -> tuple[HivemindDirectory, Identity]:
    identity = Identity.generate()
    config = P2PConfig(identity=identity, listen=LOOPBACK)
    transport = await stack.enter_async_context(P2PTransport.start(config))
    directory = await HivemindDirectory.start(transport.p2p, identity, DhtConfig(client=True))
    stack.push_async_callback(directory.aclose)
    await directory.join(await transport.connect(address))
    return directory, identity


def _before_others(stack: AsyncExitStack) -> None:
    """Where we may: what is compared with quiet must not depend on what else this machine does."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        stack.callback(os.setpriority, os.PRIO_PROCESS, 0, before)


def _lines(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines() if line.endswith("}")]


def _environment(stack: AsyncExitStack, environment: dict[str, str]) -> None:
    before = {name: os.environ.get(name) for name in environment}
    folder = tempfile.tempdir

    def restore() -> None:
        tempfile.tempdir = folder
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    stack.callback(restore)
    os.environ.update(environment)
    tempfile.tempdir = environment["TMPDIR"]
