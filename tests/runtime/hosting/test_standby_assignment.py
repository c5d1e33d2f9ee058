from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.runtime.hosting.standby_assignment import (
    PATIENCE_SECONDS,
    SPARE,
    WANTED,
    Candidate,
    Standby,
    StandbyCapacity,
    UncoveredStage,
    places_to_cover,
)
from fusion.swarm.directory.records import JobId, Place
from fusion.swarm.transport import PeerId

JOB = JobId("a" * 64)
ROOMY = StandbyCapacity(disk_bytes=10**12, max_stages=64)
MEMORY = 1000
SCORE = 0.5
BUSY_SCORE = 0.0005


def opening(stage: int, *standbys: Standby, **changes: object) -> UncoveredStage:
    made = UncoveredStage(
        job=JOB, stage=stage, owner=PeerId(f"owner-{stage}"), memory_bytes=600, disk_bytes=1200, standbys=standbys
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def candidate(name: str, idle: bool = True, free: int = MEMORY) -> Candidate:
    return Candidate(peer=PeerId(name), free_memory_bytes=free, idle=idle)


def standby(name: str, ready: bool = True, score: float = SCORE) -> Standby:
    return Standby(peer=PeerId(name), score=score, ready=ready)


def stages(places: tuple[Place, ...]) -> list[int]:
    return sorted(stage for _, stage in places)


class World:
    """Peers that all decide at once, from the same view, once a heartbeat; what they chose is seen at the next."""

    def __init__(self, peers: list[Candidate], stages: int, owners: tuple[str, ...] = ()) -> None:
        self.peers = peers
        self.owners = owners or tuple(f"owner-{stage}" for stage in range(stages))
        self.held: dict[str, set[int]] = {peer.peer: set() for peer in peers}
        self.short: dict[int, float] = dict.fromkeys(range(stages), 0.0)
        self.changes = 0

    def beat(self, seen: dict[str, list[Candidate]] | None = None) -> None:
        chosen = {}
        for us in self.peers:
            openings = [
                opening(
                    stage,
                    *(
                        standby(p.peer, score=SCORE if p.idle else BUSY_SCORE)
                        for p in self.peers
                        if p != us and stage in self.held[p.peer]
                    ),
                    covered=stage in self.held[us.peer],
                    owner=PeerId(self.owners[stage]),
                    next_owner=PeerId(self.owners[(stage + 1) % len(self.owners)]),
                    short_seconds=self.short[stage],
                )
                for stage in self.short
                if self.owners[stage] != us.peer
            ]
            others = (seen or {}).get(us.peer, self.peers)
            score = SCORE if us.idle else BUSY_SCORE
            chosen[us.peer] = set(stages(places_to_cover(openings, us, others, score, ROOMY)))
        self.changes += sum(chosen[peer] != held for peer, held in self.held.items())
        self.held = chosen
        for stage in self.short:
            self.short[stage] = 0.0 if self.count(stage) >= WANTED else self.short[stage] + 2.0

    def count(self, stage: int) -> int:
        return sum(stage in held for held in self.held.values())


def test_two_standbys_cover_all_four_stages() -> None:
    world = World([candidate("a"), candidate("b")], 4)
    world.beat()
    assert world.held == {"a": {0, 1, 2, 3}, "b": {0, 1, 2, 3}}


def test_more_standbys_share_the_stages() -> None:
    world = World([candidate(name) for name in "abcd"], 4)
    world.beat()
    assert [len(held) for held in world.held.values()] == [2, 2, 2, 2]
    assert [world.count(stage) for stage in range(4)] == [WANTED] * 4


def test_what_does_not_fit_is_left_to_others() -> None:
    us = candidate("us", free=500)
    assert places_to_cover([opening(0), opening(1, memory_bytes=400)], us, [], SCORE, ROOMY) == ((JOB, 1),)
    room = StandbyCapacity(disk_bytes=2500, max_stages=64)
    assert len(places_to_cover([opening(s) for s in range(4)], candidate("us"), [], SCORE, room)) == 2
    room = StandbyCapacity(disk_bytes=10**12, max_stages=3)
    assert len(places_to_cover([opening(s) for s in range(4)], candidate("us"), [], SCORE, room)) == 3


def test_a_peer_that_cannot_run_the_graph_is_not_waited_for() -> None:
    older, newer = candidate("a"), [replace(candidate(name), opset=2) for name in "bc"]
    holes = [opening(stage, opset=2) for stage in range(4)]
    for us, other in (newer, newer[::-1]):
        assert len(places_to_cover(holes, us, [older, other], SCORE, ROOMY)) == 4
    assert places_to_cover(holes, older, newer, SCORE, ROOMY) == ()


def test_a_stage_without_a_ready_owner_gets_no_new_standby_and_keeps_its_own() -> None:
    us = candidate("us")
    assert places_to_cover([opening(0, owner=None)], us, [], SCORE, ROOMY) == ()
    assert places_to_cover([opening(0, owner=None, covered=True)], us, [], SCORE, ROOMY) == ((JOB, 0),)
    assert places_to_cover([opening(0, owner=us.peer)], us, [], SCORE, ROOMY) == ()


def test_the_stage_with_the_fewest_standbys_comes_first() -> None:
    room = StandbyCapacity(disk_bytes=1200, max_stages=64)
    openings = [opening(0, standby("x")), opening(1), opening(2, standby("x"))]
    assert places_to_cover(openings, candidate("us"), [candidate("x")], SCORE, room) == ((JOB, 1),)


def test_peers_with_work_of_their_own_come_only_where_no_idle_one_does() -> None:
    busy = candidate("us", idle=False)
    assert stages(places_to_cover([opening(0)], busy, [candidate("x")], BUSY_SCORE, ROOMY)) == []
    assert stages(places_to_cover([opening(0)], busy, [candidate("x", free=10)], BUSY_SCORE, ROOMY)) == [0]
    assert stages(places_to_cover([opening(0, standby("x"))], busy, [], BUSY_SCORE, ROOMY)) == []


def test_the_heir_of_a_stage_holds_its_snapshots_already() -> None:
    owners = ("a", "b", "c", "d")
    world = World([candidate(name, idle=False) for name in owners], 4, owners)
    world.beat()
    assert world.held == {"b": {0}, "c": {1}, "d": {2}, "a": {3}}


def test_a_candidate_that_does_not_come_is_not_waited_for() -> None:
    """One of the candidates cannot stand by (its disk is full, say), which nobody else can know."""
    names = [f"peer-{n}" for n in range(6)]
    world = World([candidate(name) for name in names], 1)
    world.beat()
    first = {name for name, held in world.held.items() if held}
    assert len(first) == WANTED
    absent = [candidate(name) for name in sorted(first)]
    rest = World([peer for peer in world.peers if peer.peer not in first], 1)
    seen = {peer.peer: [*rest.peers, *absent] for peer in rest.peers}
    for _ in range(int(2 * (WANTED + 1) * PATIENCE_SECONDS)):
        rest.beat(seen)
    assert WANTED <= rest.count(0) <= WANTED + SPARE


def test_a_surplus_leaves_once_enough_others_are_ready() -> None:
    many = [standby(f"peer-{n}", score=0.9) for n in range(WANTED + SPARE)]
    us = candidate("us")
    assert places_to_cover([opening(0, *many, covered=True)], us, [], 0.1, ROOMY) == ()
    assert places_to_cover([opening(0, *many, covered=True)], us, [], 1.0, ROOMY) == ((JOB, 0),)
    loading = [replace(each, ready=False) for each in many]
    assert places_to_cover([opening(0, *loading, covered=True)], us, [], 0.1, ROOMY) == ((JOB, 0),)
    assert places_to_cover([opening(0, *many[1:], covered=True)], us, [], 0.1, ROOMY) == ((JOB, 0),)


peers = st.lists(
    st.tuples(st.booleans(), st.sampled_from([500, 1000])), min_size=1, max_size=12
)  # idle or not, free memory


def candidates(drawn: list[tuple[bool, int]]) -> list[Candidate]:
    return [candidate(f"peer-{n}", idle, free) for n, (idle, free) in enumerate(drawn)]


@pytest.mark.heavy
@given(peers, st.integers(1, 6))
@settings(max_examples=examples(40))
def test_a_swarm_settles_and_stays_as_it_is(drawn: list[tuple[bool, int]], count: int) -> None:
    world = World(candidates(drawn), count)
    world.beat()
    for _ in range(30):
        world.beat()
    before = world.changes
    for _ in range(30):
        world.beat()
    assert world.changes == before
    fitting = [peer for peer in world.peers if peer.free_memory_bytes >= 600]
    idle = sum(peer.idle for peer in fitting)
    for stage in range(count):
        assert min(WANTED, max(idle, min(1, len(fitting)))) <= world.count(stage) <= WANTED + SPARE


@given(peers, st.integers(1, 6), st.data())
@settings(max_examples=examples(40))
def test_whoever_vanishes_is_replaced_and_newcomers_disturb_nobody(
    drawn: list[tuple[bool, int]], count: int, data: st.DataObject
) -> None:
    world = World(candidates(drawn), count)
    for _ in range(30):
        world.beat()
    gone = data.draw(st.sampled_from(world.peers))
    world.peers.remove(gone)
    del world.held[gone.peer]
    world.peers.append(candidate("newcomer"))
    world.held["newcomer"] = set()
    survivors = {peer: set(held) for peer, held in world.held.items()}
    for _ in range(30):
        world.beat()
    idle = sum(peer.idle and peer.free_memory_bytes >= 600 for peer in world.peers)
    for stage in range(count):
        assert min(WANTED, idle) <= world.count(stage) <= WANTED + SPARE
    for peer in world.peers:
        if peer.idle:  # what an idle peer has brought to itself, it keeps
            assert survivors[peer.peer] <= world.held[peer.peer]


@given(peers, st.integers(1, 6), st.integers(0, 4000), st.integers(0, 6), st.randoms(use_true_random=False))
@settings(max_examples=examples(40))
def test_the_choice_keeps_its_bounds_and_does_not_depend_on_the_order(
    drawn: list[tuple[bool, int]], count: int, disk: int, most: int, random: object
) -> None:
    everybody = candidates(drawn)
    us, room = everybody[0], StandbyCapacity(disk_bytes=disk, max_stages=most)
    openings = [opening(stage, covered=stage % 2 == 0) for stage in range(count)]
    chosen = places_to_cover(openings, us, everybody, SCORE, room)
    assert len(chosen) <= most and sum(1200 for _ in chosen) <= disk
    assert us.free_memory_bytes >= 600 or not chosen
    random.shuffle(openings)  # type: ignore[attr-defined]
    random.shuffle(everybody)  # type: ignore[attr-defined]
    assert places_to_cover(openings, us, everybody, SCORE, room) == chosen
