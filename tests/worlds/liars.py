"""Malicious peers of a world: each has an identity of its own, hosts no stage, and sends false records and messages.

The world's seed decides what a liar does and when, with a generator of its own. A liar

* claims stages under terms of all sizes, with forged or replayed votes or its own vote as proof;
* publishes itself as the best standby, and then does not answer a request to take over, or promises what it does not do;
* publishes that the job is done, stopped, failed, far ahead or led by itself;
* sends `hello` for stages that it does not own, with its own claim or one that it has read, and then messages of the protocol;
* reports owners as gone, gives away stages that it does not have, and requests neighbours' votes.

Any peer may claim a vacant stage of an open job, so a liar gets one now and then and leaves it idle; while its lease lasts
that is no fault of the protocol. Some liars do only that: they keep the first vacant stage that they find, renew their claim
to the end of the world, answer that they hold it, accept every stream and do nothing. Liars never compute, so these worlds
do not test wrong numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from worlds.bulletin import WorldDirectory
from worlds.network import WorldTransport
from worlds.virtual_time import Lane

from fusion.runtime.job.fields import plain
from fusion.runtime.job.protocol import HOLD, JOB, STAGE
from fusion.runtime.training.step import messages as m
from fusion.swarm.authority.statements import Statement, seal_statement
from fusion.swarm.claims.election import winner
from fusion.swarm.claims.tenure import ROUNDS, SPARE_TERMS, Holding
from fusion.swarm.claims.votes import Vote, seal_vote
from fusion.swarm.directory.records import MAX_TERM, ClaimRecord, Digest, JobRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId, Stream

if TYPE_CHECKING:
    from worlds.world import World

ACTIVE_SECONDS = 40.0  # liars act for this long; the rest of the world shows whether the job ends
PAUSE_SECONDS = 0.4  # between two acts, on average
ANSWER_SECONDS = 3.0
VACANT = 0.1  # share of the vacant stages that it finds and claims; any peer may claim them
IDLE = 0.3  # share of the liars that only keep a stage
HEARTBEAT_SECONDS = 2.0
FORESEEN = (SwarmError, ValueError, TimeoutError, OSError)


def liar_names(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"liar-{i}") for i in range(count))


class Liar:
    def __init__(self, world: World, peer_id: PeerId) -> None:
        self._world = world
        self._id = peer_id
        self._rng = random.Random(f"{world.plan.seed} {peer_id}")
        self.lane = Lane(peer_id)
        self._seen: list[ClaimRecord] = []
        self._chance = random.Random(f"{world.plan.seed} {peer_id} idle")
        self._kept: tuple[int, int] | None = None  # the stage that this liar keeps, and its term
        self._acts: tuple[Callable[[], Awaitable[object]], ...] = (
            self._claim, self._claim, self._claim, self._stand_by, self._gossip, self._gossip, self._hello, self._hello,
            self._report, self._give, self._stop, self._release,
        )  # fmt: skip

    async def run(self) -> None:
        world = self._world
        self._transport = WorldTransport(world.network, self._id, self.lane, lambda lane, error: None)
        self._directory = WorldDirectory(world.bulletin, self._id)
        await self._transport.serve(HOLD.name, self._answer)
        await self._transport.serve(STAGE.name, self._welcome)
        if self._chance.random() < IDLE:
            await self._keep()
        while world.loop.now < ACTIVE_SECONDS:
            await asyncio.sleep(self._rng.expovariate(1 / PAUSE_SECONDS))
            act = self._rng.choice(self._acts)
            with contextlib.suppress(*FORESEEN):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await act()

    async def _keep(self) -> None:
        """Claim the first vacant stage that is found, and renew the claim until another peer has followed it."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS * (0.1 if self._kept is None else 1.0))
            stage = self._chance.randrange(self._world.plan.stages) if self._kept is None else self._kept[0]
            with contextlib.suppress(*FORESEEN):
                claims = await self._directory.claims(self._world.job, stage)
                others = [claim for claim in claims if claim.peer != self._id and claim.role == "owner"]
                if self._kept is None and not others:
                    self._kept = stage, 1 + max((claim.term for claim in claims), default=0)
                elif self._kept is not None and any(claim.term > self._kept[1] for claim in others):
                    self._kept = None
                    return
                if self._kept is not None:
                    await self._publish(stage, "owner", self._kept[1], ())

    # --- records

    async def _look(self) -> tuple[int, ClaimRecord | None]:
        """A random stage, and the claim of its owner according to the directory."""
        stage = self._rng.randrange(self._world.plan.stages)
        claims = await self._directory.claims(self._world.job, stage)
        self._seen = [*self._seen, *claims][-40:]
        return stage, winner([claim for claim in claims if claim.peer != self._id])

    def _votes(self, stage: int, held: ClaimRecord | None, successor: PeerId) -> tuple[bytes, ...]:
        """False proofs that `held` is over: none, replayed votes, this liar's vote, or forged votes of others."""
        kind = self._rng.randrange(4)
        if held is None or kind == 0:
            return ()
        if kind == 1:
            return tuple(vote for claim in self._seen for vote in claim.proof)[:8]
        voters = [self._id] if kind == 2 else [*self._world.processes]
        holding = Holding(held.peer, held.term)
        now = int(self._directory.now())
        return tuple(
            seal_vote(
                Vote(voter=voter, holding=holding, at=now),
                self._world.job,
                stage,
                successor,
                self._directory.sign,
            )
            for voter in voters[:8]
        )

    def _term(self, held: ClaimRecord | None) -> int:
        known = 0 if held is None else held.term
        near = (known, known + 1, known + 2, known + ROUNDS, known + ROUNDS + 1)
        far = (SPARE_TERMS, SPARE_TERMS + 30, 5000, MAX_TERM - 1)
        return max(1, self._rng.choice((*near, *near, *far)))

    async def _claim(self) -> None:
        stage, held = await self._look()
        if held is not None or self._rng.random() < VACANT:
            await self._publish(stage, "owner", self._term(held), self._votes(stage, held, self._id))

    async def _stand_by(self) -> None:
        stage, held = await self._look()
        await self._publish(stage, "standby", self._term(held), ())

    async def _release(self) -> None:
        stage, held = await self._look()
        await self._publish(stage, "released", self._term(held), ())

    async def _publish(self, stage: int, role: Any, term: int, proof: tuple[bytes, ...]) -> None:
        await self._directory.publish(self._record(stage, role, term, proof))

    def _record(self, stage: int, role: Any, term: int, proof: tuple[bytes, ...]) -> ClaimRecord:
        return ClaimRecord(
            job=self._world.job, stage=stage, peer=self._id, role=role, term=term, score=1.0, step=10**6, load=0.0,
            ready=True, proof=proof,
        )  # fmt: skip

    async def _gossip(self) -> None:
        """Publish a false job record: as the job's lead, or with forged statements of other peers."""
        world, rng = self._world, self._rng
        state = rng.choice(("running", "done", "stopped", "failed", "launching"))
        _, held = await self._look()
        digests = [digest for disk in world.disks for digest in disk.blobs]
        snapshot = rng.choice([None, Digest("e" * 64), *digests[-4:]])
        record = JobRecord(
            job=world.job, name="world", kind="train", state=state, term=self._term(held),
            step=rng.choice((0, world.plan.steps, 10**6)), lead=rng.choice((self._id, None)), stages=world.plan.stages,
            snapshot=snapshot, snapshot_step=-1 if snapshot is None else world.plan.steps, author=self._id,
            proof=tuple(self._statement(state, snapshot) for _ in range(rng.randrange(3))),
        )  # fmt: skip
        await self._directory.publish(record)

    def _statement(self, state: Any, snapshot: Digest | None) -> bytes:
        world = self._world
        signer = self._rng.choice([self._id, world.manifest.author, *world.processes])
        statement = Statement(
            job=world.job, state=state, term=1, step=world.plan.steps, snapshot=snapshot,
            snapshot_step=-1 if snapshot is None else world.plan.steps, signer=signer, at=int(self._directory.now()),
        )  # fmt: skip
        return seal_statement(statement, self._directory.sign)

    # --- streams that the liar opens

    async def _hello(self) -> None:
        """Send `hello` for a stage to the owner of another one, then random messages."""
        source, held = await self._look()
        target, owner = await self._look()
        if owner is None:
            return
        claim = self._directory.sealed(
            self._record(source, "owner", self._term(held), self._votes(source, held, self._id))
        )
        sent_claim = self._rng.choice((b"", claim, *list(self._world.bulletin.sealed)[-3:]))
        hello = m.Hello(
            job=self._world.job, source=source, target=target, term=self._term(held), target_term=owner.term,
            incarnation=self._rng.getrandbits(32), claim=sent_claim,
        )  # fmt: skip
        stream = await self._transport.open(owner.peer, STAGE.name)
        try:
            await stream.send("hello", plain(hello))
            for _ in range(self._rng.randrange(4)):
                await self._message(stream, hello.term, source)
            await stream.receive()
        finally:
            stream.abort()

    async def _message(self, stream: Stream, term: int, source: int) -> None:
        attempt = (self._rng.randint(1, 3), self._rng.randint(1, 3))
        step = self._rng.randrange(self._world.plan.steps)
        message: m.Message = self._rng.choice(
            (
                m.Failed(attempt, "made up"),
                m.Lack(attempt, "made up"),
                m.Finish(self._rng.choice(("done", "stopped", "failed")), "made up"),
                m.Ready(
                    attempt,
                    step,
                    squared_norm=math.nan,
                    loss=1.0,
                    fed="",
                    not_finite=("activations received",),
                ),
            )
        )
        await stream.send(*m.encode(message, term))

    async def _report(self) -> None:
        """Report an owner as gone to a random peer (`suspect`), or request that peer's vote (`gone`)."""
        stage, held = await self._look()
        if held is not None:
            vote = next(iter(self._votes(stage, held, self._id)), b"")
            kind = self._rng.choice(("suspect", "gone"))
            header = {
                "job": self._world.job,
                "stage": stage,
                "peer": held.peer,
                "term": held.term,
                "word": vote,
            }
            await self._request(HOLD.name, kind, {**header, "yours": self._rng.random() < 0.5})

    async def _give(self) -> None:
        """Hand over a stage that another peer owns."""
        stage, held = await self._look()
        if held is not None:
            successor = self._rng.choice([*self._world.processes])
            vote = next(iter(self._votes(stage, held, successor)), b"")
            header = {"job": self._world.job, "stage": stage, "term": held.term, "handover": {}, "word": vote}
            await self._request(HOLD.name, "take", header)

    async def _stop(self) -> None:
        header = {"job": self._world.job, "statement": self._statement("stopped", None)}
        await self._request(JOB.name, "stop", header)

    async def _request(self, protocol: str, kind: str, header: dict[str, Any]) -> None:
        stream = await self._transport.open(self._rng.choice([*self._world.processes]), protocol)
        try:
            await stream.send(kind, header)
            await stream.receive()
        finally:
            stream.abort()

    # --- streams that other peers open

    async def _answer(self, stream: Stream) -> None:
        """Answer a request of `/fusion/hold/2` about a stage, at random; a liar that keeps a stage answers `holds`."""
        frame = await stream.receive()
        stage = frame.header.get("stage", 0)
        if self._kept is not None and frame.kind == "holds":
            await stream.send("holds", {"term": self._kept[1] if stage == self._kept[0] else 0})
            return
        match self._rng.randrange(4):
            case 0:
                await asyncio.sleep(ANSWER_SECONDS)
            case 1:
                await stream.send("no", {"message": "made up"})
            case 2:
                await stream.send("holds", {"term": self._term(None)})
            case _:
                term = int(frame.header.get("term", 0)) + 1
                claim = self._directory.sealed(self._record(stage, "owner", term, ()))
                await stream.send("owner", {"claim": claim})

    async def _welcome(self, stream: Stream) -> None:
        """Accept a stream from a peer that believes us the owner of a stage, and never send anything on it."""
        frame = await stream.receive()
        await stream.send("welcome", {"term": frame.header.get("target_term", 0)})
        while self._kept is not None:
            await stream.receive()
        await asyncio.sleep(ANSWER_SECONDS)
