"""A stage that several peers run: sessions at each of them, and the same tokens whoever goes, comes or becomes slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.served import Peer, Swarm, reference, swarm_of

from fusion.runtime.serving import service
from fusion.runtime.serving.answers import moves
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import JobId, Pair
from fusion.swarm.links.view import LinkView
from fusion.swarm.transport import PeerId

PROMPT = (1, 2, 3, 4, 5, 6, 7)
PATIENT = FailoverConfig(recover_seconds=20)
TOKENS = 60


class FixedLinks:
    """Links as a test says they are; the rest of what a peer asks of them does nothing."""

    def __init__(self) -> None:
        self.slow: set[tuple[PeerId, PeerId]] = set()
        self.peers: list[PeerId] = []
        self.doubted: list[PeerId] = []

    def snapshot(self) -> LinkView:
        every = [(a, b) for a in self.peers for b in self.peers if a != b]
        return LinkView(
            pairs={(a, b): Pair(b, 1.0, 0.01 if (a, b) in self.slow else 100.0, 0.0) for a, b in every}
        )

    async def refresh(self, max_age_seconds: float) -> LinkView:
        return self.snapshot()

    def doubt(self, peer: PeerId) -> None:
        self.doubted.append(peer)


@asynccontextmanager
async def replicated(tmp_path: Path, stage: int = 1) -> AsyncIterator[tuple[Swarm, JobId, Peer, FixedLinks]]:
    """Two stages, a replica of one of them, and the last peer as gateway."""
    async with swarm_of(4, tmp_path, failover=PATIENT) as swarm:
        links = FixedLinks()
        links.peers = [peer.id for peer in swarm.peers]
        for peer in swarm.peers:
            object.__setattr__(peer.context, "links", links)
        job = await swarm.serve("llama", 2)
        replica = swarm.peers[2]
        await become_replica(swarm, replica, job, stage)
        beating = asyncio.create_task(beat_for_ever(swarm))  # this machine may be slow
        try:
            yield swarm, job, replica, links
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


async def become_replica(swarm: Swarm, peer: Peer, job: JobId, stage: int) -> None:
    leases = peer.context.leases
    leases.standbys.stand_by(job, stage, score=0.5, step=0)
    await swarm.stand_by(peer, job, stage)
    while not leases.standbys.is_beside(job, stage):
        await asyncio.sleep(0.002)
    await leases.beat()


async def beat(swarm: Swarm) -> None:
    for peer in swarm.peers:
        if peer.id in swarm.network.transports:
            await peer.context.leases.beat()


async def beat_for_ever(swarm: Swarm) -> None:
    while True:
        await asyncio.sleep(1.0)
        await beat(swarm)


async def answer_while(
    swarm: Swarm, faults: dict[int, Callable[[], Any]], tokens: int = TOKENS, pause: float = 0.0
) -> Answer:
    request = GenerateRequest(prompt_ids=PROMPT, max_tokens=tokens)
    gateway = swarm.peers[-1].id
    async with swarm.client() as transport, aclosing(generate(transport, gateway, request)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                return piece
            happened = faults[piece.index]() if piece.index in faults else None
            if asyncio.iscoroutine(happened):
                await happened
    raise AssertionError("no answer")


def slow_down(peer: Peer, job: JobId, stage: int, seconds: float) -> None:
    """The answer must not be over before it has moved."""
    ring = peer.service._hosted[job, stage].stage
    turn = ring._pass_all_on

    async def unhurried(*given: Any) -> None:
        await asyncio.sleep(seconds)
        await turn(*given)

    ring._pass_all_on = unhurried  # type: ignore[method-assign]


@pytest.mark.heavy
def test_an_idle_standby_serves_beside_the_owner(tmp_path: Path) -> None:
    async def main() -> None:
        async with replicated(tmp_path) as (swarm, job, replica, links):
            claims = await swarm.peers[-1].context.leases.claims(job, 1)
            ours = next(claim for claim in claims if claim.peer == replica.id)
            assert (ours.role, ours.ready, ours.load) == ("replica", True, 0.0)
            links.slow = {(swarm.owners[0].id, swarm.owners[1].id)}
            answer = await answer_while(swarm, {})
            assert list(answer.tokens) == reference("llama", PROMPT, TOKENS)
            assert answer.route == (swarm.owners[0].id, replica.id)
            await swarm.freed()

    asyncio.run(main())


def test_who_owns_stages_only_stands_by(tmp_path: Path) -> None:
    async def main() -> None:
        async with replicated(tmp_path) as (_, job, replica, _):
            leases = replica.context.leases
            leases.standbys.stand_by(job, 1, score=0.5, step=0, ready=True, busy=True)
            assert [claim.role for claim in leases.standbys.claims()] == ["standby"]
            while replica.service._hosted:
                await asyncio.sleep(0.01)
            assert leases.standbys.serve_beside(job, 1) == 0

    asyncio.run(main())


def test_without_room_for_sessions_a_standby_stays_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, memory_bytes=1 << 30) as swarm:
            job = await swarm.serve("llama", 2, memory_bytes=(1 << 19, 1 << 29))
            swarm.peers[2].context.memory.hold((JobId("b" * 64), 0), (1 << 30) - (1 << 20))  # 1 MiB is left
            for stage in (0, 1):
                swarm.peers[2].context.leases.standbys.stand_by(job, stage, score=0.5, step=0)
                await swarm.stand_by(swarm.peers[2], job, stage)
            await asyncio.sleep(0.05)
            roles = {claim.stage: claim.role for claim in swarm.peers[2].context.leases.standbys.claims()}
            assert roles == {0: "replica", 1: "standby"}

    asyncio.run(main())


def test_room_is_kept_for_the_stage_that_was_proposed(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, memory_bytes=1 << 20) as swarm:
            us = swarm.peers[2]
            sizes = {"memory_bytes": (600 << 10, 600 << 10)}
            job = await swarm.serve("llama", 2, replicas=((), (us.id,)), **sizes)
            for stage in (0, 1):
                us.context.leases.standbys.stand_by(job, stage, score=0.5, step=0)
                await swarm.stand_by(us, job, stage)
            await asyncio.sleep(0.05)
            roles = {claim.stage: claim.role for claim in us.context.leases.standbys.claims()}
            assert roles == {0: "standby", 1: "replica"}

    asyncio.run(main())


def test_a_session_that_names_another_term_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with replicated(tmp_path) as (_, job, replica, _):
            stage = replica.service._hosted[job, 1].stage
            (claim,) = replica.context.leases.standbys.claims()
            assert stage._sessions.terms == {claim.term}
            stage.hold(claim.term + 5)
            assert stage._sessions.terms == {claim.term, claim.term + 5}

    asyncio.run(main())


def test_a_replica_may_die_at_any_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with replicated(tmp_path) as (swarm, _, replica, links):
            links.slow = {(swarm.owners[0].id, swarm.owners[1].id)}
            answer = await answer_while(swarm, {20: lambda: swarm.network.kill(replica.id)})
            assert list(answer.tokens) == reference("llama", PROMPT, TOKENS)
            assert answer.route == tuple(peer.id for peer in swarm.owners)
            assert not swarm.successors.reports, "its owner has not gone"

    asyncio.run(main())


def test_an_owner_may_die_and_the_answer_goes_on_over_the_replica(tmp_path: Path) -> None:
    async def main() -> None:
        async with replicated(tmp_path) as (swarm, job, replica, links):
            old = swarm.owners[1].id
            links.slow = {(swarm.owners[0].id, replica.id)}  # the answer begins at the owner
            answer = await answer_while(swarm, {20: lambda: swarm.network.kill(old)})
            assert list(answer.tokens) == reference("llama", PROMPT, TOKENS)
            assert answer.route == (swarm.owners[0].id, replica.id)
            assert {(stage, peer) for stage, peer, _ in swarm.successors.reports} == {(1, old)}
            while not replica.service._hosted[job, 1].owned:
                await asyncio.sleep(0.002)
            await swarm.freed()

    asyncio.run(main())


def test_a_replica_that_becomes_the_owner_keeps_its_sessions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fusion.runtime.serving.answers")

    async def main() -> None:
        async with replicated(tmp_path) as (swarm, job, replica, links):
            owner = swarm.owners[1]
            links.slow = {(swarm.owners[0].id, owner.id)}
            claim = owner.context.leases.holds(job, 1)
            assert claim is not None
            ring = replica.service._hosted[job, 1].stage

            async def take_over() -> None:
                swarm.network.kill(owner.id)
                await swarm.hold(replica, job, 1, over=claim.term)

            answer = await answer_while(swarm, {20: take_over})
            assert list(answer.tokens) == reference("llama", PROMPT, TOKENS)
            assert not [r for r in caplog.records if "looking for another way" in r.message]
            assert replica.service._hosted[job, 1].stage is ring and not replica.service._replicas
            await beat(swarm)
            after = await answer_while(swarm, {}, 5)
            assert after.route == (swarm.owners[0].id, replica.id)
            await swarm.freed()

    asyncio.run(main())


def test_a_replica_runs_on_between_the_claim_and_the_promotion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions were seen off, and its streams ended, where it looked for its claim in that moment."""
    monkeypatch.setattr(service, "LOAD_SECONDS", 0.002)

    async def main() -> None:
        async with replicated(tmp_path) as (swarm, job, replica, _):
            owner, leases = swarm.owners[1], replica.context.leases
            held = owner.context.leases.holds(job, 1)
            assert held is not None
            ring, serving = replica.service._hosted[job, 1].stage, replica.service._hosted[job, 1].running
            swarm.network.kill(owner.id)
            vote = owner.context.leases.voting.vote(job, 1, Holding(owner.id, held.term), replica.id)
            assert await leases.claim(job, 1, 1.0, over=held.term, proof=(vote,)) is not None
            for _ in range(20):  # as long as the directory takes to say how the job stands
                await asyncio.sleep(0.002)
            assert not serving.cancelling()
            await swarm.hold(replica, job, 1, over=held.term)
            assert replica.service._hosted[job, 1].stage is ring and replica.service._hosted[job, 1].owned
            while replica.service._replicas:
                await asyncio.sleep(0.002)
            assert ring.running

    asyncio.run(main())


def test_a_replica_that_leaves_sees_its_sessions_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fusion.runtime.serving.answers")

    async def main() -> None:
        async with replicated(tmp_path) as (swarm, job, replica, links):
            links.slow = {(swarm.owners[0].id, swarm.owners[1].id)}
            slow_down(replica, job, 1, 0.003)

            async def leave() -> None:
                replica.context.leases.standbys.stand_down(job, 1)
                replica.service.forget(job, 1)

            answer = await answer_while(swarm, {10: leave})
            assert list(answer.tokens) == reference("llama", PROMPT, TOKENS)
            assert answer.route == tuple(peer.id for peer in swarm.owners)
            assert not [r for r in caplog.records if "looking for another way" in r.message]
            while replica.service._hosted or replica.service._replicas:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_an_answer_moves_when_its_link_becomes_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "LOOK_SECONDS", 0.01)

    async def main() -> None:
        async with replicated(tmp_path) as (swarm, job, replica, links):
            owners = tuple(peer.id for peer in swarm.owners)
            links.slow = {(owners[0], replica.id)}
            slow_down(swarm.owners[0], job, 0, 0.005)
            routes = []

            def cut() -> None:
                routes.append(dict(swarm.peers[-1].service.gateway._sessions.sessions_per_holder(job)))
                links.slow = {owners}

            answer = await answer_while(swarm, {10: cut})
            assert list(answer.tokens) == reference("llama", PROMPT, TOKENS)
            assert routes == [{(0, owners[0]): 1, (1, owners[1]): 1}]
            assert answer.route == (owners[0], replica.id)
            assert (await answer_while(swarm, {}, 3)).route == (owners[0], replica.id)
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.heavy
def test_the_second_session_goes_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOAD_SECONDS", 0.01)

    async def main() -> None:
        async with replicated(tmp_path) as (swarm, job, replica, _):
            both = [swarm.ask(-1, prompt_ids=PROMPT, max_tokens=TOKENS) for _ in range(2)]
            routes = {answer.route[1] for answer in await asyncio.gather(*both)}
            assert routes == {swarm.owners[1].id, replica.id}, "of one gateway"
            # Another gateway knows by the claims.
            under_way, go_on = asyncio.Event(), asyncio.Event()

            async def wait() -> None:
                under_way.set()
                await go_on.wait()

            slow_down(swarm.owners[0], job, 0, 0.02)
            first = asyncio.create_task(answer_while(swarm, {5: wait}, 80))
            await under_way.wait()
            await asyncio.sleep(0.05)
            await beat(swarm)
            second = await swarm.ask(2, prompt_ids=PROMPT, max_tokens=3)
            go_on.set()
            assert {second.route[1], (await first).route[1]} == {swarm.owners[1].id, replica.id}

    asyncio.run(main())


def test_tokens_that_come_slower_put_the_links_of_the_ring_in_doubt(tmp_path: Path) -> None:
    async def main() -> None:
        async with replicated(tmp_path) as (swarm, job, replica, links):
            links.slow = {(swarm.owners[0].id, replica.id)}
            answer = await answer_while(swarm, {25: lambda: slow_down(swarm.owners[0], job, 0, 0.05)}, 45)
            assert answer.route[1] == swarm.owners[1].id
            assert links.doubted == [swarm.owners[1].id], "what stage 0 feeds, once"

    asyncio.run(main())
