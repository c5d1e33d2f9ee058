"""The streams between stages: who is dialled, who is believed, and what happens when one of them vanishes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from support.instant_loop import run
from support.stages import JOB, Node, linked, linked_pair, now, swarm, until

from fusion.runtime.job.size_text import needs
from fusion.runtime.training.step.messages import After, Begin, Join
from fusion.runtime.training.streams.fence import Overtaken
from fusion.runtime.training.streams.partner import PATIENCE_SECONDS
from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.errors import StaleTerm


def test_stages_link_in_whatever_order_they_come_and_frames_cross() -> None:
    async def main() -> None:
        async with swarm(3) as made:
            one, two, three = made.nodes
            await one.host(0, [1, 2])
            await asyncio.sleep(5.0)
            assert one.neighbours is not None and one.neighbours.waiting_for.startswith(
                "stage 1 needs a peer"
            )
            await two.host(1, [0, 2])
            await three.host(2, [0, 1])
            began = now()
            await linked(one, two, three)
            assert now() - began < 0.1  # nobody waited for its next try: a hello tells who is there
            assert one.neighbours.waiting_for == ""
            assert one.neighbours.owners == {1: two.peer, 2: three.peer}
            one.neighbours.post(2, "tie", {}, [b"abc"])
            await until(lambda: bool(three.got))
            assert three.got[0][0] == 0 and bytes(three.got[0][1].payload) == b"abc"
            assert one.neighbours.sent_bytes == 3

    run(main())


def test_a_stage_that_nobody_holds_is_waited_for_by_what_it_needs() -> None:
    async def main() -> None:
        async with swarm(2) as made:
            one, two = made.nodes
            await one.host(0, [1], memory=(0, 1288490189))
            await asyncio.sleep(1.0)
            assert one.neighbours is not None
            assert one.neighbours.waiting_for == "stage 1 needs a peer with 1.2 GiB free"
            two.context.leases.standbys.stand_by(JOB, 1, score=0.5, step=0)
            await two.context.leases.beat()
            await asyncio.sleep(2.0)
            assert "a standby is about to" in one.neighbours.waiting_for

    run(main())


def test_the_need_of_a_stage_in_words() -> None:
    assert needs(2, ()) == "stage 2 needs a peer"
    assert needs(1, (0, 5 << 20)) == "stage 1 needs a peer with 5 MiB free"
    assert needs(0, (3 << 30,)) == "stage 0 needs a peer with 3.0 GiB free"


def test_a_killed_owner_is_followed_without_a_look_at_the_directory() -> None:
    """Its neighbours ask for an successor at once, and link to it at once."""

    async def main() -> None:
        async with swarm(4) as made:
            one, two, three, spare = made.nodes
            for node, stage in ((one, 0), (two, 1), (three, 2)):
                await node.host(stage, [s for s in range(3) if s != stage])
            await linked(one, two, three, for_seconds=1.0)
            died = two.neighbours.term  # type: ignore[union-attr]

            async def follow(stage: int, term: int) -> ClaimRecord | None:
                if spare.neighbours is None:
                    await spare.host(stage, [0, 2], over=term)
                sealed = spare.context.leases.sealed(JOB, stage)
                assert sealed is not None
                return one.context.leases.accept_claim(sealed)

            one.successors.successor = three.successors.successor = follow
            victim = two.peer
            reads = [node.directory.reads for node in (one, three)]
            await made.kill(two)
            killed = now()
            await linked(one, three, spare)
            assert now() - killed < 0.1
            assert [node.directory.reads for node in (one, three)] == reads
            assert set(one.successors.asked + three.successors.asked) == {(1, victim, died)}
            assert spare.neighbours is not None and spare.neighbours.term == died + 1
            assert [state for _, state in one.linked] == [True, False, True]

    run(main())


def test_whoever_was_not_told_of_the_heir_is_dialled_by_it() -> None:
    async def main() -> None:
        async with swarm(3) as made:
            one, two, spare = made.nodes
            await one.host(0, [1])
            await two.host(1, [0])
            await linked(one, two, for_seconds=1.0)
            await made.kill(two)
            await asyncio.sleep(3.0)  # one.successors knows of nobody
            assert not one.now_linked
            asked = len(one.successors.asked)
            assert 1 <= asked <= 3  # not with every try
            await spare.host(1, [0], over=1)
            began = now()
            await linked(one, spare)
            assert now() - began < 0.05

    run(main())


def test_whoever_gave_its_claim_up_is_not_dialled_for_ever_where_another_claims_the_stage() -> None:
    """It had come to the stage in our eyes alone, welcomes us and hangs up."""

    async def main() -> None:
        async with swarm(3) as made:
            one, two, liar = made.nodes
            await two.host(1, [0])
            liar.ghost = True
            assert await liar.context.leases.claim(JOB, 1, 0.5, over=9, confirm=False) is not None
            await one.host(0, [1])
            await until(lambda: one.peer in liar.greeted)
            assert one.context.leases.known_term(JOB, 1) == 10 and one.peer not in two.greeted
            await liar.context.leases.release(JOB, 1)
            await one.context.leases.claims(JOB, 1)  # as its heartbeat reads them
            made.cut(one, liar)
            await asyncio.sleep(1.0)
            assert one.peer in two.greeted  # one of them is told that it was overtaken

    run(main())


def test_a_silent_neighbour_is_left_alone() -> None:
    async def main() -> None:
        async with linked_pair() as (_made, one, _two):
            await asyncio.sleep(3.0)
            assert one.now_linked and len(one.linked) == 1 and not one.successors.asked

    run(main())


def test_a_stream_that_breaks_between_healthy_peers_is_dialled_again_and_nobody_suspected() -> None:
    async def main() -> None:
        async with linked_pair(for_seconds=1.0) as (made, one, two):
            made.cut(one, two)
            began = now()
            await until(lambda: len(one.linked) >= 3 and len(two.linked) >= 3)
            await linked(one, two)
            assert now() - began < 0.05
            assert not one.successors.asked and not two.successors.asked

    run(main())


def test_a_mistake_of_our_own_costs_the_stream_and_suspects_nobody() -> None:
    async def main() -> None:
        async with linked_pair() as (_made, one, two):
            two.refuse = "we do not understand this"
            for _ in range(20):
                assert one.neighbours is not None
                one.neighbours.post(1, "tie", {})
                await asyncio.sleep(0.1)
            assert 2 <= sum(not state for _, state in one.linked) <= 20  # no spin
            two.refuse = ""
            await asyncio.sleep(1.0)
            await linked(one, two)
            assert not one.successors.asked and not two.successors.asked

    run(main())


def test_a_peer_that_does_not_answer_the_redial_is_suspected_and_trusted_again_when_it_does() -> None:
    """It swaps, say: its streams broke, and its standbys take a while to find out that it lives."""

    async def main() -> None:
        async with linked_pair(for_seconds=1.0) as (made, one, two):

            async def nobody(stage: int, term: int) -> None:
                await asyncio.Event().wait()

            one.successors.successor = nobody
            two.frozen.clear()
            made.cut(one, two)
            await asyncio.sleep(PATIENCE_SECONDS / 2)
            assert not one.successors.asked
            await asyncio.sleep(PATIENCE_SECONDS)
            assert one.successors.asked == [(1, two.peer, 1)]
            two.frozen.set()
            await linked(one, two)
            assert one.successors.cancelled == 1 and len(one.successors.asked) == 1

    run(main())


def test_an_owner_that_was_never_linked_and_cannot_be_dialled_is_suspected() -> None:
    """It died during the recovery from another death."""

    async def main() -> None:
        async with swarm(3) as made:
            one, two, spare = made.nodes
            await two.host(1, [0])
            await made.kill(two)
            one.successors.successor = lambda stage, term: _takes_over(spare, one, stage, term)
            await one.host(0, [1])
            began = now()
            await linked(one, spare)
            assert now() - began < 0.1 and one.successors.asked == [(1, two.peer, 1)]

    run(main())


async def _takes_over(spare: Node, asker: Node, stage: int, term: int) -> ClaimRecord:
    if spare.neighbours is None:
        await spare.host(stage, [0], over=term)
    sealed = spare.context.leases.sealed(JOB, stage)
    assert sealed is not None
    return asker.context.leases.accept_claim(sealed)


def test_an_owner_that_left_without_an_heir_is_reported_when_the_directory_names_nobody() -> None:
    async def main() -> None:
        async with swarm(3) as made:
            one, two, spare = made.nodes
            await one.host(0, [1])
            await two.host(1, [0])
            await linked(one, two)
            one.successors.successor = lambda stage, term: _takes_over(spare, one, stage, term)
            await two.end()
            await two.context.leases.release(JOB, 1)
            await linked(one, spare)
            assert (1, two.peer, 1) in one.successors.asked

    run(main())


def test_a_frozen_owner_that_wakes_after_its_stage_was_taken_is_refused() -> None:
    async def main() -> None:
        async with swarm(3) as made:
            one, old, new = made.nodes
            await one.host(0, [1])
            await old.host(1, [0])
            await linked(one, old)
            # It is still linked, but says nothing for a minute: its claim runs out, another follows.
            await new.host(1, [0], over=1)
            await linked(one, new)
            assert one.neighbours is not None and one.neighbours.owners == {1: new.peer}
            assert old.task is not None
            with pytest.raises(BaseExceptionGroup) as raised:
                await old.task
            assert raised.group_contains(Overtaken, match="held under term 2, not 1")
            await asyncio.sleep(1.0)
            assert one.neighbours.owners == {1: new.peer} and one.now_linked

    run(main())


def test_while_a_frozen_owner_is_dialled_its_heir_is_linked_to() -> None:
    async def main() -> None:
        async with swarm(3) as made:
            one, old, new = made.nodes
            old.frozen.clear()
            await old.host(1, [0])
            await one.host(0, [1])
            await asyncio.sleep(1.0)
            assert not one.now_linked
            await new.host(1, [0], over=1)
            began = now()
            await linked(one, new)
            assert now() - began < 0.05  # not after the dial that nobody answers

    run(main())


@pytest.mark.parametrize(
    ("attempt", "linked_after"), [((1, 1 << 40), True), ((2, 1), False), ((0, 1), False)]
)
def test_a_lead_speaks_of_attempts_of_its_own_term_alone(
    attempt: tuple[int, int], linked_after: bool
) -> None:
    """Stages go by the highest that they have heard of: those of the next lead are above, whatever this one says."""

    async def main() -> None:
        async with linked_pair() as (_, one, two):
            assert one.neighbours is not None and one.neighbours.term == 1
            one.neighbours.send(1, Begin(attempt, 0, After()))
            await asyncio.sleep(0.01)
            assert [state for _, state in two.linked][:2] == ([True] if linked_after else [True, False])

    run(main())


@pytest.mark.parametrize(("term", "linked_after"), [(1, True), (1 << 40, False), (0, False)])
def test_a_stage_joins_under_the_term_that_it_is_held_under_alone(term: int, linked_after: bool) -> None:
    """A lead goes by the highest join of a stage: that of the next owner would count for nothing."""

    async def main() -> None:
        async with linked_pair() as (_, one, two):
            assert two.neighbours is not None and two.neighbours.term == 1
            two.neighbours.send(0, Join(step=0, join_id=(term, 0, 1)))
            await asyncio.sleep(0.01)
            assert [state for _, state in one.linked][:2] == ([True] if linked_after else [True, False])

    run(main())


def test_an_answer_to_a_suspicion_that_is_over_changes_nothing() -> None:
    async def main() -> None:
        async with swarm(3) as made:
            one, two, other = made.nodes
            await one.host(0, [1])
            await two.host(1, [0])
            await linked(one, two)
            neighbours = one.neighbours
            assert neighbours is not None
            claim = await other.context.leases.claim(JOB, 1, 0.5, over=1, confirm=False)
            assert claim is not None
            one.successors.successor = lambda stage, term: _late(claim)
            made.cut(one, two)
            with suppress(StaleTerm):
                await asyncio.sleep(2.0)
            assert not one.successors.asked and neighbours.owners == {1: two.peer}

    run(main())


async def _late(claim: ClaimRecord) -> ClaimRecord:
    await asyncio.sleep(1.0)
    return claim
