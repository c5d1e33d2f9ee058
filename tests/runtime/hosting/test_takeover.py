from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hosting import Peer, Swarm, reads_of, swarm, until
from support.instant_loop import run

from fusion.runtime.hosting import vote_requests
from fusion.runtime.hosting.handover import LAST_OFFERS
from fusion.runtime.hosting.idle_owners import STAYS_SECONDS, IdleOwners
from fusion.runtime.hosting.owner_probe import GONE, SILENT, OwnerProbe, Sign
from fusion.runtime.hosting.takeover import Takeovers, verdict_on
from fusion.runtime.job.protocol import HOLD
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.claims.election import rank, winner
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.claims.votes import Vote as Word
from fusion.swarm.claims.votes import parse_vote, seal_vote
from fusion.swarm.directory.records import ClaimRecord, JobId, Place, Record
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream, call

NEIGHBOURS: dict[JobId, Leases] = {}  # of the jobs that have one
VOTES: dict[PeerId, Takeovers] = {}  # theirs


async def one_job(
    made: Swarm, standbys: int, *, alone: bool = True, vacant: int = 0, **changes: Any
) -> tuple[JobId, Peer, list[Peer]]:
    """A job of one stage that its owner runs, and peers that stand by for it, the best first. Not `alone`: with a second
    stage, whose owner votes on the first. `vacant`: stages behind it that nobody holds."""
    owner = await made.join()
    idle = [await made.join() for _ in range(standbys)]
    others = (not alone) + vacant
    job = await made.launch(made.manifest(owner, *[None] * others, **changes), stages=1 + others)
    voter = None if alone else await neighbour(made, job)
    if voter is not None:
        NEIGHBOURS[job] = voter
    await owner.look()
    await until(lambda: (job, 0) in owner.service.running)
    await owner.context.leases.beat()
    if voter is not None:
        await voter.claims(job, 0)
    for peer in idle:
        await peer.look()
        await until(lambda peer=peer: (job, 0) in peer.service.prepared)  # type: ignore[misc]
        await peer.context.leases.beat()
    order = {claim.peer: claim for claim in await owner.context.leases.claims(job, 0)}
    assert all(order[peer.id].role == "standby" and order[peer.id].ready for peer in idle)
    return job, owner, sorted(idle, key=lambda peer: rank(order[peer.id]), reverse=True)


async def neighbour(made: Swarm, job: JobId, stage: int = 1) -> Leases:
    """Of a peer that owns that stage and only answers what others ask of it."""
    identity = Identity.generate()
    transport = MemoryTransport(made.network, identity.peer_id)
    leases = await know(
        Leases(
            identity.peer_id,
            MemoryDirectory(made.network, identity, made.clock),
            LeaseConfig(confirm_seconds=0),
        ),
        job,
        stage + 1,
    )
    VOTES[leases.peer_id] = Takeovers(transport, leases, made.check_seconds)
    await VOTES[leases.peer_id].start(Nobody())
    assert await leases.claim(job, stage, 1.0) is not None
    leases.update(job, stage, ready=True)
    await leases.beat()
    await leases.claims(job, 0)
    return leases


async def know(leases: Leases, job: JobId, stages: int = 2) -> Leases:
    """As whoever asks a job for something knows it: its law, and who holds its stages."""
    leases.know(JobLaw(job=job, author=Identity.generate().peer_id, stages=stages))
    for stage in range(stages):
        await leases.claims(job, stage)
    return leases


async def onlooker(made: Swarm, job: JobId, stages: int = 2) -> Peer:
    peer = await made.join()
    await know(peer.context.leases, job, stages)
    return peer


def vanish(made: Swarm, peer: Peer) -> None:
    """As SIGKILL does it: no goodbye, and nothing of it goes on."""
    made.network.kill(peer.id)


class Frozen:
    """A peer that is stopped: it takes streams, and says nothing."""

    def __init__(self, peer: Peer) -> None:
        self.going_on = asyncio.Event()
        handlers = peer.context.transport.handlers  # type: ignore[attr-defined]
        self._before = dict(handlers._handlers)
        handlers._handlers = {protocol: self._wait(handler) for protocol, handler in self._before.items()}

    def _wait(self, handler: Any) -> Any:
        async def later(stream: Stream) -> None:
            await self.going_on.wait()
            await handler(stream)

        return later


# --- an owner of another release, or one that is just starting


def test_an_owner_that_does_not_speak_the_protocol_is_not_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (successor,) = await one_job(made, 1)
            witness = await made.join()
            del owner.context.transport.handlers._handlers[HOLD.name]  # type: ignore[attr-defined]
            assert (
                await OwnerProbe(successor.context.transport, made.check_seconds).look(owner.id, job, 0)
                == SILENT
            )
            assert await witness.context.takeover.suspect(job, 0, owner.id, 1) is None  # type: ignore[union-attr]
            assert (job, 0) in owner.service.running and successor.service.begun == []

    run(main())


# --- a killed owner


def test_who_sees_the_owner_vanish_gets_the_claim_of_its_heir(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2, alone=False)
            witness = await onlooker(made, job)
            vanish(made, owner)
            assert witness.context.takeover is not None
            claim = await witness.context.takeover.suspect(job, 0, owner.id, 1)
            assert claim is not None and (claim.peer, claim.term, claim.role) == (first.id, 2, "owner")
            await until(lambda: (job, 0) in first.service.running)
            assert first.service.terms[job, 0] == 2 and second.service.begun == []
            assert winner(witness.context.leases.recent(job, 0)) == claim
            # Nothing was waited for: the dead owner's claim is still in the directory, and outranked.
            assert {c.peer: c.term for c in await second.context.directory.claims(job, 0)}[owner.id] == 1
            assert (job, 0) not in first.hosting._pool.places

    run(main())


def test_a_heartbeat_in_the_middle_of_a_takeover_leaves_what_is_warm(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1, alone=False, memory_bytes=(600, 600))
            witness = await onlooker(made, job)
            directory, beats = first.context.directory, list[int]()
            publish = directory.publish

            async def publish_in_a_heartbeat(record: Record, **options: Any) -> None:
                await publish(record, **options)
                if isinstance(record, ClaimRecord) and record.role == "owner" and not beats:
                    beats.append(first.context.memory.free_bytes)
                    await first.hosting.beat()

            directory.publish = publish_in_a_heartbeat  # type: ignore[method-assign]
            vanish(made, owner)
            assert witness.context.takeover is not None
            claim = await witness.context.takeover.suspect(job, 0, owner.id, 1)
            assert claim is not None and claim.peer == first.id and beats == [400], "no room for it twice"
            await until(lambda: (job, 0) in first.service.running)
            assert (job, 0) in first.service.prepared, "it was forgotten"

    run(main())


def test_a_neighbour_that_has_just_come_is_asked_for_its_word(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (successor,) = await one_job(made, 1, alone=False)
            witness = await onlooker(made, job)
            before = NEIGHBOURS[job]
            await before.release(job, 1)
            made.network.kill(before.peer_id)
            after = await neighbour(made, job)  # the successor does not know of it
            assert before.peer_id in successor.context.leases.voting.voters(job, 0, owner.id)
            vanish(made, owner)
            claim = await witness.context.takeover.suspect(job, 0, owner.id, 1)  # type: ignore[union-attr]
            assert claim is not None and (claim.peer, claim.term) == (successor.id, 2)
            await after.claims(job, 0)
            assert after.known_holder(job, 0) == successor.id

    run(main())


def test_who_has_just_come_asks_a_neighbour_of_whom_it_knows_nothing(tmp_path: Path) -> None:
    """Its own majority would be none to those who know of that neighbour."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (successor,) = await one_job(made, 1, alone=False, vacant=1)
            other = await neighbour(made, job, stage=2)  # the successor has read nothing of that stage
            witness = await onlooker(made, job, stages=3)
            leases = successor.context.leases
            assert leases.known_tenure(job, 2) is None
            assert leases.voting.voters(job, 0, owner.id) == (NEIGHBOURS[job].peer_id,)
            vanish(made, owner)
            claim = await witness.context.takeover.suspect(job, 0, owner.id, 1)  # type: ignore[union-attr]
            assert claim is not None and (claim.peer, claim.term) == (successor.id, 2)
            voters = {parse_vote(data).voter for data in claim.proof}
            assert voters == {NEIGHBOURS[job].peer_id, other.peer_id}

    run(main())


def test_who_reports_believes_a_successor_by_the_word_of_a_neighbour_that_has_just_come(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (successor,) = await one_job(made, 1, alone=False)
            witness = await onlooker(made, job)
            made.clock.advance(4.0)  # no claim contests the owner's by its rank any more
            before = NEIGHBOURS[job]
            await before.release(job, 1)
            after = await neighbour(made, job)
            await successor.context.leases.claims(job, 1)
            vanish(made, owner)
            assert witness.context.leases.voting.voters(job, 0, owner.id) == (before.peer_id,)
            claim = await witness.context.takeover.suspect(job, 0, owner.id, 1)  # type: ignore[union-attr]
            assert claim is not None and (claim.peer, claim.term) == (successor.id, 2)
            assert witness.context.leases.voting.voters(job, 0, owner.id) == (after.peer_id,)

    run(main())


def test_many_reports_make_one_takeover(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2, alone=False)
            witnesses = [await onlooker(made, job) for _ in range(3)] + [second, first]
            vanish(made, owner)
            claims = await asyncio.gather(
                *(w.context.takeover.suspect(job, 0, owner.id, 1) for w in witnesses * 4)  # type: ignore[union-attr]
            )
            assert {(claim.peer, claim.term) for claim in claims if claim is not None} == {(first.id, 2)}
            assert None not in claims and first.service.begun == [(job, 0)] and second.service.begun == []

    run(main())


def test_reports_of_every_kind_at_once_make_one_takeover(tmp_path: Path) -> None:
    """With the vote of a neighbour or without, to whoever takes it itself or may ask others: memory for the stage is set aside once."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1, alone=False)
            votes = VOTES[NEIGHBOURS[job].peer_id]
            assert first.context.takeover is not None
            holder = first.context.takeover._holder  # type: ignore[attr-defined]
            take_over, calls = holder.take_over, list[Any]()

            async def slowly(*args: Any) -> ClaimRecord | None:
                calls.append(args)
                await asyncio.sleep(0.05)
                claim: ClaimRecord | None = await take_over(*args)
                return claim

            holder.take_over = slowly
            vanish(made, owner)
            about = {"job": job, "stage": 0, "peer": owner.id, "term": 1}
            vote = await votes._votes.vote((job, 0), Holding(owner.id, 1), first.id)
            assert vote
            kinds = [{"word": each, "yours": yours} for each in (vote, b"") for yours in (False, True)]
            witness = await onlooker(made, job)
            replies = await asyncio.gather(
                *(
                    call(witness.context.transport, first.id, HOLD.name, "suspect", {**about, **kind})
                    for kind in kinds
                )
            )
            assert {reply.kind for reply in replies} == {"owner"}
            assert len(calls) == 1 and first.service.begun == [(job, 0)]

    run(main())


def test_the_next_standby_takes_over_when_the_best_died_as_well(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2, alone=False)
            witness = await onlooker(made, job)
            vanish(made, owner)
            vanish(made, first)
            claim = await witness.context.takeover.suspect(job, 0, owner.id, 1)  # type: ignore[union-attr]
            assert claim is not None and claim.peer == second.id
            await until(lambda: (job, 0) in second.service.running)

    run(main())


def test_heirs_may_die_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, successors = await one_job(made, 2, alone=False)
            witness = await onlooker(made, job)
            for term, successor in enumerate(successors, 2):
                vanish(made, owner)
                claim = await witness.context.takeover.suspect(job, 0, owner.id, term - 1)  # type: ignore[union-attr]
                assert claim is not None and (claim.peer, claim.term) == (successor.id, term)
                owner = successor
            vanish(made, owner)
            assert await witness.context.takeover.suspect(job, 0, owner.id, 3) is None  # type: ignore[union-attr]

    run(main())


def test_a_late_report_is_answered_with_who_followed_already(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1, alone=False)
            early, late = await onlooker(made, job), await onlooker(made, job)
            vanish(made, owner)
            claim = await early.context.takeover.suspect(job, 0, owner.id, 1)  # type: ignore[union-attr]
            again = await late.context.takeover.suspect(job, 0, owner.id, 1)  # type: ignore[union-attr]
            assert claim is not None and again is not None and again.term == claim.term
            assert claim.peer == again.peer == first.id
            assert first.service.begun == [(job, 0)]

    run(main())


@pytest.mark.heavy
def test_standbys_asked_at_the_same_moment_leave_one_owner_and_never_two_of_one_term(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            owner = await made.join()
            idle = [await made.join() for _ in range(2)]
            voters = []
            for number in range(20):
                manifest = made.manifest(owner, None, name=f"work-{number}", memory_bytes=(1, 1))
                job = await made.launch(manifest, stages=2)
                voters.append((job, await neighbour(made, job)))
                await owner.look()
                await until(lambda: (job, 0) in owner.service.running)  # noqa: B023
                for peer in (owner, *idle, *idle, owner):
                    await peer.context.leases.beat()
                    await peer.look()
            held: list[Place] = []
            for peer in idle:
                await peer.context.leases.beat()
                peer.service.on_host = lambda job, term: held.append((job, term))
            jobs = [job for job, _ in owner.hosting.hosted]
            for job, voter in voters:
                await voter.claims(job, 0)
            vanish(made, owner)
            for job in jobs:
                header = {"job": job, "stage": 0, "peer": owner.id, "term": 1}
                transports = [made.client(), made.client()]
                await asyncio.gather(
                    *(
                        call(t, p.id, HOLD.name, "suspect", header)
                        for t, p in zip(transports, idle, strict=True)
                    )
                )
            for _ in range(2):
                for peer in idle:
                    await peer.context.leases.beat()
            assert len(set(held)) == len(held) >= len(jobs) == 20
            for job in jobs:
                assert sum(peer.hosting.holds(job, 0) > 0 for peer in idle) == 1

    run(main())


# --- reports that are wrong


def answering(peer: Peer, kind: str, header: dict[str, Any]) -> None:
    """From now on the peer answers so to all requests about a stage."""

    async def answer(stream: Stream) -> None:
        frame = await stream.receive()
        if frame.kind == "holds":
            await stream.send("holds", {"term": 0})
        else:
            await stream.send(kind, header)

    peer.context.transport.handlers._handlers[HOLD.name] = answer  # type: ignore[attr-defined]


def test_a_standby_that_answers_with_a_claim_of_another_stage_takes_nobodys_place(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (liar, successor) = await one_job(made, 2, alone=False)
            witness = await onlooker(made, job)
            answering(liar, "owner", {"claim": NEIGHBOURS[job].sealed(job, 1)})
            vanish(made, owner)
            assert witness.context.takeover is not None
            claim = await witness.context.takeover.suspect(job, 0, owner.id, 1)
            assert claim is not None and (claim.job, claim.stage, claim.peer) == (job, 0, successor.id)

    run(main())


def test_an_owner_that_lives_keeps_its_stage(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            witness = await onlooker(made, job)
            assert await witness.context.takeover.suspect(job, 0, owner.id, 1) is None  # type: ignore[union-attr]
            # Cut off from the witness alone it lives as well: the standby reaches it.
            made.network.partition([owner.id], [witness.id])
            assert await witness.context.takeover.suspect(job, 0, owner.id, 1) is None  # type: ignore[union-attr]
            assert first.service.begun == [] and (job, 0) in owner.service.running

    run(main())


@pytest.mark.parametrize("breaks", [1, 2, 4])
def test_an_owner_that_the_standby_alone_does_not_reach_keeps_its_stage(tmp_path: Path, breaks: int) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1, alone=False)
            witness = await onlooker(made, job)
            handlers = owner.context.transport.handlers._handlers  # type: ignore[attr-defined]
            answers, broken = handlers[HOLD.name], []

            async def busy(stream: Stream) -> None:
                if len(broken) < breaks:
                    broken.append(stream)
                    stream.abort()
                else:
                    await answers(stream)

            handlers[HOLD.name] = busy
            claim = await witness.context.takeover.suspect(job, 0, owner.id, 1)  # type: ignore[union-attr]
            assert len(broken) == breaks
            # Twice each is gone: for the standby that gets the report, and for the neighbour that votes.
            assert (claim is None) == (first.service.begun == []) == (breaks < 4)

    run(main())


@pytest.mark.parametrize("lie", [{"peer": Identity.generate().peer_id}, {"term": 900}, {"term": 2**31 - 1}])
def test_a_lie_about_who_owned_the_stage_takes_nothing(tmp_path: Path, lie: dict[str, Any]) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            header = {"job": job, "stage": 0, "peer": owner.id, "term": 1, **lie}
            reply = await call(made.client(), first.id, HOLD.name, "suspect", header)
            assert reply.kind in ("alive", "no") and first.service.begun == []

    run(main())


def test_nobody_can_use_the_terms_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1, alone=False)
            vanish(made, owner)
            header = {"job": job, "stage": 0, "peer": owner.id, "term": 2**30}
            reply = await call(made.client(), first.id, HOLD.name, "suspect", header)
            claim = first.context.leases.holds(job, 0)
            assert reply.kind == "owner" and claim is not None and claim.term == 2

    run(main())


@pytest.mark.parametrize("kind", ["forged", "nonsense", "long"])
def test_a_report_with_a_false_word_does_not_hold_a_takeover_up(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1, alone=False)
            vanish(made, owner)
            vote = {"nonsense": b"nonsense", "long": bytes(4096)}.get(kind, b"")
            if kind == "forged":
                statement = Word(
                    voter=NEIGHBOURS[job].peer_id, holding=Holding(owner.id, 1), at=int(made.clock())
                )
                vote = seal_vote(statement, job, 0, first.id, Identity.generate().sign)
            header = {"job": job, "stage": 0, "peer": owner.id, "term": 1, "word": vote}
            reply = await call(made.client(), first.id, HOLD.name, "suspect", header)
            claim = first.context.leases.holds(job, 0)
            assert reply.kind == "owner" and claim is not None and vote not in claim.proof

    run(main())


def test_a_peer_that_does_not_stand_by_takes_nothing_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            owner, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(owner))
            await owner.look()
            vanish(made, owner)
            header = {"job": job, "stage": 0, "peer": owner.id, "term": 1}
            reply = await call(made.client(), other.id, HOLD.name, "suspect", header)
            assert reply.kind == "no" and "standby" in reply.header["message"]

    run(main())


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        ("suspect", {"job": "x", "stage": -1, "peer": "p", "term": 1}),
        ("suspect", {"job": "x", "stage": 0, "peer": "p", "term": "1"}),
        ("holds", {"stage": 2.5}),
        ("take", {"job": "x", "stage": 0, "term": 2**40, "handover": {}}),
        ("dance", {"stage": 0, "term": 0}),
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path: Path, kind: str, header: dict[str, Any]) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            peer = await made.join()
            stream = await made.client().open(peer.id, HOLD.name)
            await stream.send(kind, header)
            reply = await stream.receive()
            assert reply.kind == "error" and "\n" not in reply.header["message"]

    run(main())


def test_who_has_just_begun_to_stand_by_goes_above_an_owner_that_it_never_saw(tmp_path: Path) -> None:
    """The owner's lease ran out before its standby had read anything of the stage; its neighbours know the term that it had."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1, alone=False)
            vanish(made, owner)
            made.clock.advance(91.0)
            forget_claims(first, job)
            header = {"job": job, "stage": 0, "peer": owner.id, "term": 5}
            reply = await call(made.client(), first.id, HOLD.name, "suspect", header)
            claim = first.context.leases.holds(job, 0)
            assert reply.kind == "owner" and claim is not None and claim.term == 6

    run(main())


def forget_claims(peer: Peer, job: JobId) -> None:
    """As if it had come when they had run out."""
    cache = peer.context.leases._cache
    for known in (cache._read, cache._tenures, cache._hints):
        known.pop((job, 0), None)  # type: ignore[attr-defined]


# --- a frozen owner


def test_a_frozen_owner_is_followed_when_its_claim_has_run_out_and_rejoins_when_it_wakes(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            witness = await onlooker(made, job)
            frozen = Frozen(owner)
            suspect = witness.context.takeover.suspect  # type: ignore[union-attr]
            assert await suspect(job, 0, owner.id, 1) is None  # it may only sleep for a moment
            assert first.service.begun == []
            made.clock.advance(5.0)  # its claim lasts three heartbeats
            await first.context.leases.beat()
            assert await suspect(job, 0, owner.id, 1) is None
            made.clock.advance(2.0)
            claim = await suspect(job, 0, owner.id, 1)
            assert claim is not None and (claim.peer, claim.term) == (first.id, 2)
            frozen.going_on.set()
            await owner.context.leases.beat()  # it says its old claim, and finds a higher one
            await until(lambda: owner.hosting.hosted == ())
            assert owner.service.running == {} and (job, 0) in first.service.running
            await first.context.leases.beat()
            await made.announce(job)
            await owner.look()
            await owner.context.leases.beat()
            claims = {c.peer: (c.role, c.term) for c in await first.context.leases.claims(job, 0)}
            assert (claims[first.id], claims[owner.id]) == (("owner", 2), ("standby", 2))

    run(main())


def test_without_a_witness_the_best_standby_notices_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2)
            Frozen(owner)
            made.clock.advance(91.0)
            for peer in (second, first):
                await peer.context.leases.beat()
                await made.announce(job)
            for peer in (second, first):
                await peer.look()
            await until(lambda: (job, 0) in first.service.running)
            assert second.service.begun == [] and first.service.terms[job, 0] == 2

    run(main())


def test_an_owner_whose_claim_ran_out_but_who_answers_is_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            made.clock.advance(91.0)  # the directory lost it
            await first.context.leases.beat()
            await made.announce(job)
            await first.look()
            assert first.service.begun == []
            vanish(made, owner)
            await first.look()
            await until(lambda: (job, 0) in first.service.running)

    run(main())


def test_an_owner_that_finds_a_higher_claim_shown_to_it_gives_way_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, _ = await one_job(made, 1, alone=False)
            rival = Identity.generate()
            directory = MemoryDirectory(made.network, rival, made.clock)
            claim = ClaimRecord(
                job=job, stage=0, peer=rival.peer_id, role="owner", term=5, score=0.1, step=0, load=0.0
            )
            made.clock.advance(4.0)
            await owner.context.leases.beat()
            with pytest.raises(RecordError):  # nobody bears it out
                owner.context.leases.accept_claim(directory.sealed(claim))
            vote = NEIGHBOURS[job].voting.vote(job, 0, Holding(owner.id, 1), rival.peer_id)
            claim = replace(claim, proof=(vote,))
            assert owner.context.leases.accept_claim(directory.sealed(claim)) == claim
            await until(lambda: owner.hosting.hosted == ())
            assert owner.context.leases.owned() == () and owner.hosting.holds(job, 0) == 0

    run(main())


# --- a leave


def test_an_owner_that_leaves_hands_over_what_it_says(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2)
            await owner.hosting.leave()
            assert owner.service.passed_on == [(job, 0)] and owner.service.running == {}
            assert first.service.handovers[job, 0] == {"step": 7} and first.service.terms[job, 0] == 2
            assert (job, 0) in first.service.running and second.service.begun == []
            await owner.leave()
            await owner.context.leases.aclose()
            claims = {c.peer: (c.role, c.term) for c in await second.context.leases.claims(job, 0)}
            assert claims[first.id] == ("owner", 2) and claims[owner.id] == ("released", 1)
            await owner.hosting.leave()  # once more does nothing

    run(main())


def test_whoever_asks_for_our_word_on_many_terms_has_the_stage_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vote_requests, "READ_SECONDS", 60.0)

    async def main() -> None:
        async with swarm(tmp_path) as made:
            owner, ours = await made.join(), await made.join()
            job = await made.launch(made.manifest(owner, ours), stages=2)
            for peer in (owner, ours):
                await peer.look()
                await until(lambda peer=peer: bool(peer.service.running))  # type: ignore[misc]
            await ours.look()
            assert ours.id in ours.context.leases.voting.voters(job, 0, owner.id)
            read = reads_of(ours, monkeypatch)
            stranger = made.client()
            headers = [{"job": job, "stage": 0, "peer": owner.id, "term": term} for term in range(2, 42)]
            for header in headers[:20]:
                assert (await call(stranger, ours.id, HOLD.name, "gone", header)).header["word"] == b""
            await asyncio.gather(
                *(call(stranger, ours.id, HOLD.name, "gone", header) for header in headers[20:])
            )
            assert len(read) <= 2

    run(main())


def test_a_stage_is_taken_without_the_directory_and_a_stranger_has_none_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            await first.context.leases.claims(job, 0)
            read = reads_of(first, monkeypatch)
            for unknown in ("4" * 64, "x"):
                header = {"job": unknown, "stage": 0, "term": 1, "handover": {}}
                assert (await call(made.client(), first.id, HOLD.name, "take", header)).kind == "no"
            vote = owner.context.leases.voting.vote(job, 0, Holding(owner.id, 1), first.id)
            header = {"job": job, "stage": 0, "term": 1, "handover": {"step": 7}, "word": vote}
            reply = await call(owner.context.transport, first.id, HOLD.name, "take", header)
            assert reply.kind == "taking" and read == []

    run(main())


def test_strangers_have_a_stage_read_once_and_nobody_dialled_who_does_not_claim_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            bystander, stranger, dialled = made.client(), made.client(), list[str]()

            async def noted(stream: Stream) -> None:
                dialled.append((await stream.receive()).kind)

            await bystander.serve(HOLD.name, noted)
            directory = first.context.directory
            claims = directory.claims

            async def slowly(*place: Any) -> Any:
                await asyncio.sleep(0.05)
                return await claims(*place)

            monkeypatch.setattr(directory, "claims", slowly)
            await first.context.leases.claims(job, 0)
            read = reads_of(first, monkeypatch)
            about = {"job": job, "stage": 0, "word": b""}
            replies = await asyncio.gather(
                *(
                    call(stranger, first.id, HOLD.name, kind, {**about, **more, "term": term})
                    for term in range(20)
                    for kind, more in (
                        ("suspect", {"peer": bystander.peer_id, "yours": True}),
                        ("take", {"handover": {}}),
                    )
                )
            )
            assert {each.kind for each in replies} == {"alive", "no"} and dialled == [] and len(read) <= 2
            assert (job, 0) in owner.service.running and first.service.begun == []

    run(main())


def test_only_the_owner_can_hand_a_stage_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            header = {"job": job, "stage": 0, "term": 1, "handover": {}}
            reply = await call(made.client(), first.id, HOLD.name, "take", header)
            assert reply.kind == "no" and "does not own" in reply.header["message"]
            owned = owner.context.transport
            reply = await call(owned, first.id, HOLD.name, "take", {**header, "term": 3})
            assert reply.kind == "no"
            reply = await call(
                owned, first.id, HOLD.name, "take", {**header, "handover": {"x": b"0" * 20_000}}
            )
            assert reply.kind == "no" and "16384" in reply.header["message"]
            assert first.service.begun == []

    run(main())


@pytest.mark.parametrize("own", [False, True])
def test_who_takes_a_stage_with_a_claim_of_another_or_of_its_owner_has_not_taken_it(
    tmp_path: Path, own: bool
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2, alone=False)
            await owner.context.leases.claims(job, 1)
            leases, stage = (owner.context.leases, 0) if own else (NEIGHBOURS[job], 1)
            answering(first, "taking", {"claim": leases.sealed(job, stage)})
            await owner.hosting.leave()
            assert (job, 0) in second.service.running and (job, 0) not in owner.service.running

    run(main())


async def false_standbys(made: Swarm, job: JobId, count: int, *, there: bool) -> list[str]:
    """So many stand by for the first stage with the best of scores, and say nothing when it is offered to them; nor that they are
    `there`. Gives the kinds of frames that they receive."""
    received = list[str]()

    async def hang(stream: Stream) -> None:
        received.append((await stream.receive()).kind)
        if there and received[-1] == "holds":
            await stream.send("holds", {"term": 0})
        else:
            await stream.receive()

    for _ in range(count):
        identity = Identity.generate()
        await MemoryTransport(made.network, identity.peer_id).serve(HOLD.name, hang)
        claim = ClaimRecord(
            job=job, stage=0, peer=identity.peer_id, role="standby", term=0, score=0.9, step=2**40, load=0.0, ready=True
        )  # fmt: skip
        await MemoryDirectory(made.network, identity, made.clock).publish(claim, ttl_seconds=6.0)
    return received


def test_those_who_stand_by_and_are_not_there_do_not_keep_an_owner_from_leaving(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            received = await false_standbys(made, job, 100, there=False)
            await owner.hosting.leave()
            assert (job, 0) in first.service.running and received == ["holds"] * 100

    run(main())


def test_an_owner_leaves_in_time_among_those_who_are_there_and_take_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, _ = await one_job(made, 1)
            received = await false_standbys(made, job, 100, there=True)
            await owner.hosting.leave()
            assert received.count("take") == LAST_OFFERS and (job, 0) in owner.service.running

    run(main())


def test_who_leaves_while_another_takes_its_stage_gives_it_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would hold it under one term, each with its release."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2)
            claimed, leaving = second.context.leases.claim, list[asyncio.Task[None]]()

            async def claim(*place: Any, **how: Any) -> ClaimRecord | None:
                leaving.append(asyncio.create_task(owner.hosting.leave()))
                await asyncio.sleep(0.1)
                return await claimed(*place, **how)

            monkeypatch.setattr(second.context.leases, "claim", claim)
            owner.context.takeover.give_away(job, 0, second.id)
            await until(lambda: bool(leaving))
            await leaving[0]
            assert second.hosting.hosted == ((job, 0),) and first.hosting.hosted == owner.hosting.hosted == ()

    run(main())


def test_who_takes_a_stage_and_whose_answer_is_lost_has_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2)
            claimed = first.context.leases.claim

            async def claim(*place: Any, **how: Any) -> None:
                await claimed(*place, **how)
                await asyncio.Event().wait()

            monkeypatch.setattr(first.context.leases, "claim", claim)
            await owner.hosting.leave()
            assert first.context.leases.holds(job, 0) is not None
            assert second.context.leases.holds(job, 0) is None

    run(main())


def test_whoever_cannot_hand_over_releases(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1)
            vanish(made, first)
            await owner.hosting.leave()
            assert (job, 0) in owner.service.running
            await owner.leave()
            [claim] = [c for c in await owner.context.directory.claims(job, 0) if c.peer == owner.id]
            assert claim.role == "released"

    run(main())


def test_whoever_leaves_takes_nothing_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first, second) = await one_job(made, 2, alone=False)
            await first.hosting.leave()
            await first.context.leases.beat()
            vanish(made, owner)
            claim = await second.context.takeover.suspect(job, 0, owner.id, 1)  # type: ignore[union-attr]
            assert claim is not None and claim.peer == second.id and first.service.begun == []

    run(main())


# --- the pure decision


def claim_of(peer: str, role: Any = "owner", term: int = 1) -> ClaimRecord:
    return ClaimRecord(
        job=JobId("0" * 64), stage=0, peer=PeerId(peer), role=role, term=term, score=0.5, step=0, load=0.0
    )


def test_a_standby_believes_what_it_saw() -> None:
    owner, other = PeerId("owner"), PeerId("other")
    named = [claim_of("owner"), claim_of("us", "standby")]
    assert verdict_on(named, {owner: GONE}) == "take"
    assert verdict_on(named, {owner: Sign("holds", 1)}) == "alive"
    assert verdict_on(named, {owner: SILENT}) == "frozen"
    assert verdict_on(named[1:], {owner: SILENT}) == "take"  # and its claim has run out
    assert verdict_on(named, {other: GONE}) == "alive"  # nobody looked whether the owner is there
    assert verdict_on(named, {other: GONE, owner: SILENT}) == "frozen"
    assert verdict_on(named, {other: GONE, owner: GONE}) == "take"


class Nobody:
    """Holds no stage, and takes none over."""

    occupied = False

    def holds(self, job: JobId, stage: int) -> int:
        return 0


def test_a_client_may_ask_and_is_never_asked_in_vain(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, (first,) = await one_job(made, 1, alone=False)
            identity = Identity.generate()
            transport = MemoryTransport(made.network, identity.peer_id)
            directory = MemoryDirectory(made.network, identity, made.clock)
            leases = await know(Leases(identity.peer_id, directory, LeaseConfig()), job)
            asking = Takeovers(transport, leases, made.check_seconds)
            await asking.start(Nobody())
            reply = await call(made.client(), identity.peer_id, HOLD.name, "holds", {"job": job, "stage": 0})
            assert reply.header["term"] == 0
            vanish(made, owner)
            claim = await asking.suspect(job, 0, owner.id, 1)
            assert claim is not None and claim.peer == first.id

    run(main())


# --- an owner that answers, and does nothing


async def idle_owner(made: Swarm, vacant: int = 0) -> tuple[JobId, Peer, Peer, Takeovers]:
    """A job whose first stage has an owner with whom its neighbour's steps stand still, and a standby that knows who that is."""
    job, owner, (successor,) = await one_job(made, 1, alone=False, vacant=vacant)
    await know(successor.context.leases, job, 2 + vacant)
    voter = NEIGHBOURS[job]
    VOTES[voter.peer_id].vote_against(job, 0, owner.id, 1, 60.0)
    return job, owner, successor, VOTES[voter.peer_id]


def test_an_owner_that_does_nothing_is_followed_though_it_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, successor, votes = await idle_owner(made)
            claim = await votes.suspect(job, 0, owner.id, 1)
            assert claim is not None and (claim.peer, claim.term) == (successor.id, 2)
            await until(lambda: (job, 0) in successor.service.running)
            await owner.context.leases.beat()
            await until(lambda: (job, 0) not in owner.service.running)
            # Idle as it is now, it stands by before all others, and must not be handed the stage.
            for takeover in (votes, successor.context.takeover):
                assert takeover is not None
                assert not await takeover.attends(owner.id, job, 0)
                assert await takeover.attends(owner.id, JobId("another"), 0)

    run(main())


@pytest.mark.parametrize("how", ["nobody votes", "it is over", "the job goes on", "another holder"])
def test_an_owner_that_answers_keeps_its_stage_where_nobody_votes_against_it(
    tmp_path: Path, how: str
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, successor, votes = await idle_owner(made)
            if how == "it is over":
                votes.vote_against(job, 0, owner.id, 1, 0.0)
            elif how == "another holder":
                votes.vote_against(job, 0, successor.id, 1, 60.0)
            else:
                votes.withdraw_votes(job)
            witness = await onlooker(made, job)
            takeover = witness.context.takeover if how == "nobody votes" else votes
            assert takeover is not None and await takeover.suspect(job, 0, owner.id, 1) is None
            assert (job, 0) in owner.service.running and successor.service.begun == []

    run(main())


def test_a_report_without_a_vote_takes_nothing_though_there_is_one(tmp_path: Path) -> None:
    """Anybody may report, and what that costs must not depend on what others think of an owner."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, successor, votes = await idle_owner(made)
            witness = await onlooker(made, job)
            assert await witness.context.takeover.suspect(job, 0, owner.id, 1) is None  # type: ignore[union-attr]
            about = {"job": job, "stage": 0, "peer": owner.id, "term": 1}
            stranger = Identity.generate()
            vote = seal_vote(
                Word(voter=stranger.peer_id, holding=Holding(owner.id, 1), at=int(made.clock())),
                *(job, 0, successor.id, stranger.sign),
            )
            reply = await call(
                witness.context.transport, successor.id, HOLD.name, "suspect", {**about, "word": vote}
            )
            assert reply.kind == "alive" and successor.service.begun == []
            # A report of that kind under way does not hold up one with a vote.
            looked, go_on = asyncio.Event(), asyncio.Event()
            probe = successor.context.takeover._probe  # type: ignore[union-attr]
            look = probe.look

            async def slow(*args: Any) -> Sign:
                looked.set()
                await go_on.wait()
                return await look(*args)

            probe.look = slow  # type: ignore[method-assign]
            idle = asyncio.create_task(witness.context.takeover.suspect(job, 0, owner.id, 1))  # type: ignore[union-attr]
            await looked.wait()
            voted = asyncio.create_task(votes.suspect(job, 0, owner.id, 1))
            await asyncio.sleep(0.01)
            go_on.set()
            await idle
            claim = await voted
            assert claim is not None and claim.peer == successor.id

    run(main())


def test_a_voter_votes_for_nobody_who_is_not_ready(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, successor, votes = await idle_owner(made)
            holding = Holding(owner.id, 1)
            assert await votes._votes.vote((job, 0), holding, successor.id)
            stranger = await onlooker(made, job)
            assert not await votes._votes.vote((job, 0), holding, stranger.id)
            for ready in (False, True):
                stranger.context.leases.standbys.stand_by(job, 0, score=0.5, step=0, ready=ready)
                await stranger.context.leases.beat()
                await NEIGHBOURS[job].claims(job, 0)
                assert bool(await votes._votes.vote((job, 0), holding, stranger.id)) == ready

    run(main())


def test_of_two_that_came_to_one_stage_and_do_nothing_a_voter_votes_against_either(tmp_path: Path) -> None:
    """Others may go by the one that it does not go by (world 2203800)."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, _, successor, votes = await idle_owner(made)
            rival = (await onlooker(made, job)).id
            for term in (1, 2):
                assert bool(await votes._votes.vote((job, 0), Holding(rival, term), successor.id)) == (
                    term == 1
                )
            votes.withdraw_votes(job)
            assert not await votes._votes.vote((job, 0), Holding(rival, 1), successor.id)

    run(main())


def test_one_neighbour_of_two_takes_no_stage_from_an_owner_that_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, successor, votes = await idle_owner(made, vacant=1)
            other = await neighbour(made, job, 2)
            for peer in (successor.context.leases, NEIGHBOURS[job], other):
                await know(peer, job, 3)
            assert await votes.suspect(job, 0, owner.id, 1) is None
            assert (job, 0) in owner.service.running and successor.service.begun == []
            VOTES[other.peer_id].vote_against(job, 0, owner.id, 1, 60.0)
            claim = await votes.suspect(job, 0, owner.id, 1)
            assert claim is not None and claim.peer == successor.id

    run(main())


def test_whoever_votes_against_an_owner_and_stands_by_asks_none_of_its_allies_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, owner, successor, _ = await idle_owner(made)
            reported_to = []
            for _ in range(5):
                ally = await onlooker(made, job)
                leases = ally.context.leases
                leases.standbys.stand_by(job, 0, score=1.0, step=2**40, ready=True)
                await leases.beat()

                async def hang(stream: Stream, ally: Peer = ally) -> None:
                    if (await stream.receive()).kind == "suspect":
                        reported_to.append(ally.id)
                    await asyncio.Event().wait()

                ally.context.transport.handlers._handlers[HOLD.name] = hang  # type: ignore[attr-defined]
            await successor.context.leases.claims(job, 0)
            taking = successor.context.takeover
            assert taking is not None
            taking.vote_against(job, 0, owner.id, 1, 60.0)
            claim = await taking.suspect(job, 0, owner.id, 1)
            assert claim is not None and claim.peer == successor.id and reported_to == []

    run(main())


def test_whoever_has_voted_against_an_owner_for_long_is_needed_itself() -> None:
    now = [0.0]
    idle, place, owner = IdleOwners(lambda: now[0]), (JobId("job"), 0), PeerId("owner")
    idle.add(place, Holding(owner, 3), 60.0)
    assert not idle.stays(place)
    for now[0] in (20.0, 40.0):
        idle.add(place, Holding(owner, 4), 60.0)
    assert idle.stays(place)
    idle.add(place, Holding(PeerId("other"), 5), 60.0)
    assert not idle.stays(place), "that is another one"
    now[0] += STAYS_SECONDS
    assert idle.stays(place)
    idle.forget(place[0])
    assert not idle.stays(place)


def test_an_owner_that_raises_its_own_term_is_voted_against_all_the_same() -> None:
    now = [0.0]
    idle, owner, place = IdleOwners(lambda: now[0]), PeerId("owner"), (JobId("job"), 0)
    idle.add(place, Holding(owner, 3), 60.0)
    assert idle.has(place, Holding(owner, 3)) and idle.has(place, Holding(owner, 9))
    assert not idle.has(place, Holding(owner, 2)), "that was before"
    assert not idle.has(place, Holding(PeerId("other"), 9))
    now[0] = 60.0
    assert not idle.has(place, Holding(owner, 3))
