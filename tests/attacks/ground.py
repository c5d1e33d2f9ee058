"""The targets of the attacks: three real peers on loopback that train a job and serve a model, and their honest users."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from attacks.honest_answers import Answers, served_model
from attacks.honest_training import STAGES, Committed, TrueLosses, training_job
from attacks.stranger import Scene
from support.directory_records import claim_record, digest
from support.leaks import nothing_left, surround

from fusion.cli.local.fleet import Fleet, LocalPeer, OnRecord, open_fleet
from fusion.runtime.job.context import Context
from fusion.runtime.job.protocol import HOLD, STATUS
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.peer.plane_choice import TORCH
from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import JobId, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.swarm_key import Authorizer, new_key
from fusion.swarm.transport import PeerId, call

HERE = Path(__file__).parent
PEERS = 3
NICENESS = -10
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
OPERATION_SECONDS = 4.0  # for an operation of the directory's honest users: a lease lasts 6 s
HELD_SECONDS = 120.0
WARM_STEPS = 10
HONEST_JOB = JobId(digest("an honest job"))  # only published and claimed, never run


@dataclass
class Ground:
    """The peers and their honest users.

    The trainer is the author of their job and model, the user requests answers and reads the directory, and the author
    publishes records of a job that no peer runs.
    """

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
    held: dict[Place, tuple[PeerId, int]] = field(default_factory=dict)  # owners and terms at the last `look`
    hearers: list[OnRecord] = field(default_factory=list)  # called with each record that a peer prints
    ended: list[LocalPeer] = field(default_factory=list)  # peers that a check has killed
    plane: str = TORCH  # the peers' execution plane

    @cached_property
    def truth(self) -> TrueLosses:
        return TrueLosses(self.user.blobs.store, self.training, self.plane)

    @property
    def scene(self) -> Scene:
        """What a stranger knows about the ground: all of it is public."""
        return Scene(
            addresses=tuple(peer.address for peer in self.peers),
            training=self.training.job,
            serving=self.serving.job,
            trainer=self.trainer.peer_id,
            route=self._route(self.serving.job),
            training_route=self._route(self.training.job),
            weights=self.serving.manifest.weights,
        )

    def _route(self, job: JobId) -> tuple[tuple[PeerId, int], ...]:
        return tuple(self.held[job, stage] for stage in range(STAGES) if (job, stage) in self.held)

    @property
    def living(self) -> list[LocalPeer]:
        return [peer for peer in self.peers if peer not in self.ended]

    async def look(self) -> dict[Place, tuple[PeerId, int]]:
        """Ask the peers who runs each stage of the job and of the model, and under which term."""
        held = {}
        for peer in self.living:
            for job in (self.training.job, self.serving.job):
                for stage in range(STAGES):
                    request = {"job": job, "stage": stage}
                    reply = await call(self.user.transport, PeerId(peer.peer_id), HOLD.name, "holds", request)
                    if reply.header["term"]:
                        held[job, stage] = PeerId(peer.peer_id), int(reply.header["term"])
        self.held = held
        return held

    @property
    def reader(self) -> Directory:
        return self.user.directory

    def reports(self) -> list[list[dict[str, Any]]]:
        """The lines that `attacks.watched` has written for each peer."""
        return [_lines(self.fleet.root / f"{peer.name}.watch") for peer in self.peers]

    def log(self, peer: LocalPeer) -> str:
        return (self.fleet.root / f"{peer.name}.log").read_text("utf-8", "replace")

    async def operation(self, step: int) -> bool:
        """Renew a claim and read it, list all peers, and get the status of each. Returns whether all succeeded."""
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
async def open_ground(
    count: int = PEERS, *, closed: bool = False, plane: str = TORCH
) -> AsyncIterator[Ground]:
    """A ground whose job trains and whose model answers when the block begins.

    Peers 0 and 1 own stages 0 and 1 of the job, peers 1 and 2 those of the model; peer 0 is the user's gateway. `closed`: the
    swarm admits only peers with its key.
    """
    async with AsyncExitStack() as stack:
        _before_others(stack)
        traces = stack.enter_context(nothing_left())
        surround(stack, traces.environment)
        fleet = await stack.enter_async_context(open_fleet("attack-"))
        key_file = fleet.root / "swarm.key"
        key = new_key(key_file) if closed else None
        member = ("--swarm-key", str(key_file)) if closed else ()
        committed = Committed()
        hearers: list[OnRecord] = [committed.hear]

        def hear(record: dict[str, Any]) -> None:
            for hearer in hearers:
                hearer(record)

        peers: list[LocalPeer] = []
        for number in range(count):
            name = f"peer-{number}"
            command = (sys.executable, str(HERE / "watched.py"), str(fleet.root / f"{name}.watch"))
            bootstrap = (peers[0].address,) if peers else ()
            peer = await fleet.start_peer(
                *(name, "--tell-steps", "--plane", plane, *member),
                bootstrap=bootstrap,
                command=command,
                on_record=hear,
            )
            peers.append(peer)
        address = peers[0].address
        user = await stack.enter_async_context(
            open_client(
                ClientConfig(home=fleet.root / "user", peer=address, swarm_key=key_file if closed else None)
            )
        )
        author, author_identity = await _author(stack, address, key)
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
        ground = Ground(
            fleet, peers, user, author, author_identity, trainer, training, serving, committed, answers,
            hearers=hearers, plane=plane,
        )  # fmt: skip
        await ground.look()
        yield ground


async def _author(
    stack: AsyncExitStack, address: str, key: Identity | None
) -> tuple[HivemindDirectory, Identity]:
    identity = Identity.generate()
    authorizer = None if key is None else Authorizer(key, identity.peer_id)
    config = P2PConfig(identity=identity, listen=LOOPBACK, authorizer=authorizer)
    transport = await stack.enter_async_context(P2PTransport.start(config))
    directory = await HivemindDirectory.start(transport.p2p, identity, DhtConfig(client=True))
    stack.push_async_callback(directory.aclose)
    await directory.join(await transport.connect(address))
    return directory, identity


def _before_others(stack: AsyncExitStack) -> None:
    """Raise our priority if we may, so that other work on the machine affects the rates less."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        stack.callback(os.setpriority, os.PRIO_PROCESS, 0, before)


def _lines(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines() if line.endswith("}")]
