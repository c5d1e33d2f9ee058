"""Who may speak for a stage to its neighbours: one peer under one term, once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from support.instant_loop import run
from support.stages import JOB, Node, Swarm, linked, say_hello, swarm, until

from fusion.runtime.job.fields import plain
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.training.step.messages import Hello
from fusion.runtime.training.streams.fence import Overtaken
from fusion.runtime.training.streams.partner import PASSED_OVER_SECONDS, Partner
from fusion.swarm.authority.law import Admission, JobLaw
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.claims.tenure import CONTEST_SECONDS, Holding
from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import Stream


@pytest.mark.parametrize("frozen", [True, False], ids=["dialled", "linked"])
def test_who_claims_a_stage_under_a_term_that_was_used_is_told_and_goes_above(frozen: bool) -> None:
    """The second one joined when the claim of the first had run out, and knew of no term."""

    async def main() -> None:
        async with swarm(3) as made:
            one, old, new = made.nodes
            old.ghost = True
            assert await old.context.leases.claim(JOB, 1, 0.5) is not None
            if frozen:
                old.frozen.clear()
            await one.host(0, [1])
            await asyncio.sleep(1.0)  # one's hello waits for the frozen peer, or it has been welcomed
            made.clock.advance(60.0)
            await one.context.leases.beat()
            assert await new.host(1, [0]) == 1
            old.frozen.set()
            assert new.task is not None
            with pytest.raises(BaseExceptionGroup) as raised:
                await new.task
            assert raised.group_contains(Overtaken, match="held under term 1 by somebody before us")
            await new.context.leases.release(JOB, 1)
            assert await new.host(1, [0]) == 2
            await linked(one, new)
            assert one.neighbours is not None and one.neighbours.owners == {1: new.peer}
            assert await say_hello(old, one) == "stale: 2"

    run(main())


def test_who_has_forgotten_its_own_term_is_told_and_goes_above() -> None:
    """It was killed before it had said hello: nobody but the reader of its claim knows of the term."""

    async def main() -> None:
        async with swarm(2) as made:
            one, two = made.nodes
            leases = two.context.leases
            assert await leases.claim(JOB, 1, 0.5) is not None
            await leases.release(JOB, 1)
            assert (claim := await leases.claim(JOB, 1, 0.5)) is not None and claim.term == 2
            two.frozen.clear()
            await one.host(0, [1])
            await asyncio.sleep(1.0)
            made.clock.advance(60.0)
            anew = Leases(two.peer, two.directory, LeaseConfig(confirm_seconds=0.0))
            two.context = replace(two.context, leases=anew)
            two.frozen.set()
            assert await two.host(1, [0]) == 1
            assert two.task is not None
            with pytest.raises(BaseExceptionGroup) as raised:
                async with asyncio.timeout(60):
                    await two.task
            assert raised.group_contains(Overtaken, match="held under term 2")
            await anew.release(JOB, 1)
            assert await two.host(1, [0]) == 3
            await linked(one, two)

    run(main())


def test_another_owner_under_a_term_is_dialled_where_the_first_has_gone() -> None:
    """Else two stages that each knew an owner of the other before, now gone, would never hear that they have to go
    above its term."""

    async def main() -> None:
        async with swarm(3) as made:
            one, gone, new = made.nodes
            await one.host(0, [1])
            assert await gone.context.leases.claim(JOB, 1, 0.5) is not None
            assert await say_hello(gone, one) == "welcome: 1"
            await made.kill(gone)
            made.clock.advance(60.0)
            await one.context.leases.beat()
            new.ghost = True
            assert (claim := await new.context.leases.claim(JOB, 1, 0.5)) is not None and claim.term == 1
            await asyncio.sleep(5.0)
            assert one.neighbours is not None
            assert one.neighbours._partners[1].outgoing is not None

    run(main())


def test_who_welcomes_us_and_hangs_up_is_dialled_no_more_once_we_know_of_another_owner() -> None:
    """It would keep us from the owner for ever, who cannot dial us where it knows no better than we did."""

    async def main() -> None:
        async with swarm(3) as made:
            one, was, new = made.nodes
            was.ghost = new.ghost = True
            assert await was.context.leases.claim(JOB, 1, 0.5) is not None
            await one.host(0, [1])
            assert one.neighbours is not None
            partner = one.neighbours._partners[1]
            await until(lambda: partner.outgoing is not None)
            made.clock.advance(60.0)
            await one.context.leases.beat()
            assert await new.context.leases.claim(JOB, 1, 0.5, over=1) is not None
            made.cut(one, was)
            await until(lambda: partner.outgoing is not None)
            assert partner._last is not None and partner._last.peer == was.peer  # nobody has told us yet
            assert await one.context.leases.owner(JOB, 1) is not None
            made.cut(one, was)
            await until(lambda: partner._last is not None and partner._last.peer == new.peer)

    run(main())


async def has_its_stage_back(one: Node, was: Node, owner: Node) -> tuple[ClaimRecord, Partner]:
    """`owner` was outbid by `was`, whom `one` dialled, and has its stage back: its claim, and whom `one` has for a partner."""
    claim = await owner.context.leases.claim(JOB, 1, 0.5)
    assert claim is not None and await one.context.leases.owner(JOB, 1) == claim
    rival = replace(claim, peer=was.peer, term=2)
    await was.context.directory.publish(rival)
    assert await one.context.leases.owner(JOB, 1) == rival
    await one.host(0, [1])
    assert one.neighbours is not None
    partner = one.neighbours._partners[1]
    await until(lambda: partner.outgoing is not None)
    assert partner._last == rival
    await was.context.directory.publish(replace(rival, role="released"))
    assert await one.context.leases.owner(JOB, 1) == claim
    return claim, partner


def test_who_has_its_stage_back_from_one_that_outbid_it_is_dialled_again() -> None:
    """Whoever outbid it welcomes us as often as we come, and is nobody's owner."""

    async def main() -> None:
        async with swarm(3) as made:
            one, was, owner = made.nodes
            was.ghost = owner.ghost = True
            claim, partner = await has_its_stage_back(one, was, owner)
            made.cut(one, was)
            async with asyncio.timeout(60.0):
                await until(lambda: partner._last == claim)

    run(main())


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
def test_of_two_owners_in_two_parts_of_a_swarm_the_later_one_gives_way(seen: bool) -> None:
    """A neighbour goes by the earlier one. Its word alone, of an owner whom nobody else sees, ends no other's."""

    async def main() -> None:
        async with swarm(3) as made:
            one, earlier, later = made.nodes
            earlier.ghost = True
            made.network.partition([later.peer], [one.peer, earlier.peer])
            claim = await earlier.context.leases.claim(JOB, 1, 0.5)
            assert claim is not None and await one.context.leases.owner(JOB, 1) == claim
            await one.host(0, [1])
            made.clock.advance(CONTEST_SECONDS)
            later.context.leases.observe(JOB, 1, 1)
            assert await later.host(1, [0]) == 2
            made.network.heal()
            await one.context.leases.beat()
            if seen:
                await earlier.context.leases.beat()
                await later.context.leases.beat()
            assert later.task is not None
            done, _ = await asyncio.wait([later.task], timeout=PASSED_OVER_SECONDS - 1.0)
            assert not done
            done, _ = await asyncio.wait([later.task], timeout=10.0)
            assert bool(done) == seen
            if seen:
                with pytest.raises(BaseExceptionGroup) as raised:
                    await later.task
                assert raised.group_contains(Overtaken, match="held under term 1, not 2")
                await later.context.leases.release(JOB, 1)
                assert await one.context.leases.owner(JOB, 1) == earlier.context.leases.holds(JOB, 1) == claim

    run(main())


def test_an_owner_that_followed_one_of_its_own_part_gives_way_too() -> None:
    """It lacks the proof that the one which it followed is gone, and that is not who its neighbour goes by: each waited for ever."""

    async def main() -> None:
        async with swarm(4) as made:
            one, earlier, later, gone = made.nodes
            earlier.ghost = gone.ghost = True
            for node in made.nodes:
                node.context.leases.know(JobLaw(job=JOB, author=one.peer, stages=2))
            made.network.partition([later.peer, gone.peer], [one.peer, earlier.peer])
            claim = await earlier.context.leases.claim(JOB, 1, 0.5)
            assert claim is not None and await one.context.leases.owner(JOB, 1) == claim
            await one.host(0, [1])
            followed = await gone.context.leases.claim(JOB, 1, 0.5)
            assert followed is not None and await later.context.leases.owner(JOB, 1) == followed
            made.clock.advance(60.0)
            await earlier.context.leases.beat()
            await one.context.leases.beat()
            assert await later.host(1, [0]) == 2
            assert later.context.leases.unproven(JOB, 1) == (gone.peer, 1)
            made.network.heal()
            for each in (one, earlier, later):
                await each.context.leases.beat()
            assert later.context.leases.rivals(JOB, 1) == ((earlier.peer, 1),)
            assert later.task is not None
            done, _ = await asyncio.wait([later.task], timeout=PASSED_OVER_SECONDS + 10.0)
            assert done
            with pytest.raises(BaseExceptionGroup) as raised:
                await later.task
            assert raised.group_contains(Overtaken, match="held under term 1, not 2")

    run(main())


def test_a_stage_that_is_over_welcomes_nobody() -> None:
    """Its partner would believe itself linked to it."""

    async def main() -> None:
        async with swarm(2) as made:
            one, two = made.nodes
            await one.host(0, [1])
            await two.context.leases.claim(JOB, 1, 0.5)
            neighbours = one.neighbours
            await one.end()
            one.neighbours = neighbours  # a hello that came before the end
            assert await say_hello(two, one) == "later: stage 0 is over here"

    run(main())


def test_a_term_used_twice_by_one_peer_is_told_apart() -> None:
    """A peer that lost its memory in a restart may claim a stage under the term that it had before it died."""

    async def main() -> None:
        async with swarm(2) as made:
            one, two = made.nodes
            await one.host(0, [1])
            await two.context.leases.claim(JOB, 1, 0.5)
            assert await say_hello(two, one, incarnation=8) == "welcome: 1"
            assert (
                await say_hello(two, one, incarnation=7) == "stale: 1"
            )  # the dead one's hello, late; or the other way round
            assert await say_hello(two, one, incarnation=8) == "welcome: 1"
            await two.context.leases.release(JOB, 1)
            assert (claim := await two.context.leases.claim(JOB, 1, 0.5)) is not None and claim.term == 2
            assert await say_hello(two, one, incarnation=9, term=2) == "welcome: 1"
            assert await say_hello(two, one, incarnation=8) == "stale: 2"

    run(main())


def test_no_frame_of_a_dead_process_is_taken_once_its_next_one_is_welcome() -> None:
    async def main() -> None:
        async with swarm(2) as made:
            one, two = made.nodes
            await one.host(0, [1])
            streams: list[Stream] = []
            for term, incarnation in ((1, 7), (2, 8)):
                await two.context.leases.claim(JOB, 1, 0.5)
                sealed = two.context.leases.sealed(JOB, 1) or b""
                hello = Hello(
                    job=JOB,
                    source=1,
                    target=0,
                    term=term,
                    target_term=1,
                    incarnation=incarnation,
                    claim=sealed,
                )
                streams.append(await two.context.transport.open(one.peer, STAGE.name))
                await streams[-1].send("hello", plain(hello))
                assert (await streams[-1].receive()).kind == "welcome"
                await streams[-1].send("tie", {"term": term, "of": incarnation})
                if term == 1:
                    await until(lambda: len(one.got) == 1)
                    await two.context.leases.release(JOB, 1)
            with suppress(SwarmError):
                await streams[0].send("tie", {"term": 1, "of": 7})
                await streams[0].send("tie", {"term": 2, "of": 7})
            await asyncio.sleep(1.0)
            assert [frame.header["of"] for _, frame in one.got] == [7, 8]

    run(main())


def test_a_claim_that_proves_nothing_for_its_bearer_is_looked_up_in_the_directory() -> None:
    async def main() -> None:
        async with swarm(3) as made:
            one, two, thief = made.nodes
            await one.host(0, [1])
            claim = await two.context.leases.claim(JOB, 1, 0.5)
            assert claim is not None and (sealed := two.context.leases.sealed(JOB, 1)) is not None
            assert await say_hello(thief, one, claim=sealed) == "stale: 1"
            assert "no claim of stage 1 at term 4 seen yet" in await say_hello(two, one, term=4)
            assert "no claim of stage 1 at term 2" in await say_hello(thief, one, term=2, claim=b"\xff" * 100)
            made.clock.advance(1.0)
            reads = one.directory.reads
            assert await say_hello(two, one) == "welcome: 1"
            assert one.directory.reads == reads
            made.clock.advance(60.0)  # both the seal and what the directory had are over
            assert "no claim of stage 1 at term 1 seen yet" in await say_hello(two, one, claim=sealed)

    run(main())


def test_a_proof_of_a_term_that_is_over_is_refused() -> None:
    async def main() -> None:
        async with swarm(3) as made:
            one, old, new = made.nodes
            await one.host(0, [1])
            await old.context.leases.claim(JOB, 1, 0.5)
            await new.context.leases.claim(JOB, 1, 0.5, over=1, confirm=False)
            sealed = new.context.leases.sealed(JOB, 1)
            assert sealed is not None
            one.context.leases.accept_claim(sealed)
            assert await say_hello(old, one) == "stale: 2"
            assert await say_hello(new, one, term=2) == "welcome: 1"
            assert await say_hello(old, one) == "stale: 2"

    run(main())


async def settled(made: Swarm, *owners: Node) -> None:
    """A job of three stages with these owners, of whom the first one knows the others, for so long that nothing is contested."""
    first = owners[0]
    for node in made.nodes:
        node.context.leases.know(JobLaw(job=JOB, author=first.peer, stages=3))
    await first.host(0, [1])
    for stage, owner in enumerate(owners[1:], 1):
        assert await owner.context.leases.claim(JOB, stage, 0.5) is not None
    await first.context.leases.claims_of(JOB, (1, 2))
    made.clock.advance(CONTEST_SECONDS + 1.0)


def test_who_follows_by_the_vote_of_a_neighbour_that_has_just_come_is_welcome() -> None:
    async def main() -> None:
        async with swarm(5) as made:
            one, old, new, before, after = made.nodes
            await settled(made, one, old, before)
            await before.context.leases.release(JOB, 2)
            assert await after.context.leases.claim(JOB, 2, 0.5) is not None
            await new.context.leases.claims_of(JOB, (0, 1, 2))
            gone = Holding(old.peer, 1)
            votes = [n.context.leases.voting.vote(JOB, 1, gone, new.peer) for n in (one, after)]
            claim = await new.context.leases.claim(JOB, 1, 0.5, over=1, proof=tuple(votes), confirm=False)
            assert claim is not None and (sealed := new.context.leases.sealed(JOB, 1)) is not None
            assert one.context.leases.known_holder(JOB, 2) == before.peer
            assert await say_hello(new, one, term=claim.term, claim=sealed) == "welcome: 1"
            assert one.context.leases.known_holder(JOB, 2) == after.peer

    run(main())


def test_claims_that_strangers_show_have_neighbours_looked_at_once_in_a_while() -> None:
    async def main() -> None:
        async with swarm(4) as made:
            one, old, stranger, other = made.nodes
            await settled(made, one, old, other)
            vote = stranger.context.leases.voting.vote(JOB, 1, Holding(old.peer, 1), stranger.peer)
            await stranger.context.leases.claim(JOB, 1, 0.5, over=1, proof=(vote,), confirm=False)
            sealed = stranger.context.leases.sealed(JOB, 1)
            assert sealed is not None
            reads = one.directory.reads
            for _ in range(10):
                said = await say_hello(stranger, one, term=2, claim=sealed)
                assert "no claim of stage 1 at term 2 seen yet" in said
            assert one.directory.reads - reads == 10 + 2  # the stage, and once its two neighbours

    run(main())


def test_a_frame_in_a_job_for_some_costs_no_look_at_all_claims_of_its_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody may leave some thousand claims there: they cost each frame ten milliseconds."""

    async def main() -> None:
        async with swarm(2) as made:
            one, two = made.nodes
            admission = Admission(kind="granted", roots=(two.peer,))
            for node in made.nodes:
                node.context.leases.know(JobLaw(job=JOB, author=one.peer, stages=2, admission=admission))
            await one.host(0, [1])
            term = await two.host(1, [0])
            await linked(one, two)
            looked = []
            cache = one.context.leases._cache
            monkeypatch.setattr(cache, "seen", lambda *place: looked.append(place) or ())
            assert two.neighbours is not None
            for _ in range(20):
                two.neighbours.post(0, "activation", {})
            await until(lambda: len(one.got) == 20)
            assert not looked and term == 1

    run(main())


def test_who_has_its_stage_back_is_linked_to_while_the_one_that_outbid_it_holds_on_to_us() -> None:
    """Its hello is welcomed; the stream to whoever outbid it would never end by itself."""

    async def main() -> None:
        async with swarm(3) as made:
            one, was, owner = made.nodes
            was.ghost = True
            await has_its_stage_back(one, was, owner)
            await owner.host(1, [0])
            async with asyncio.timeout(60.0):
                await linked(one, owner)
            assert one.neighbours is not None and one.neighbours.owners == {1: owner.peer}

    run(main())
