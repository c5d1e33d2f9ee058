from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings
from support.examples import examples

from fusion.runtime.hosting.claim_choice import (
    IDLE_FIRST_SECONDS,
    VacantStage,
    beside_the_idle,
    one_each,
    one_early,
    one_to_hand_on,
    share_of_one,
    stages_to_claim,
)
from fusion.swarm.directory.records import ClaimRecord, JobId, PeerRecord
from fusion.swarm.transport import PeerId


def vacancy(
    stage: int = 0, score: float = 0.5, empty: float = 0.0, memory: int = 10, job: str = "a"
) -> VacantStage:
    return VacantStage(job=JobId(job), stage=stage, score=score, empty_seconds=empty, memory_bytes=memory)


def test_what_was_proposed_to_us_goes_first_then_what_is_empty_longest() -> None:
    late, early, ours = vacancy(0, empty=7), vacancy(1, empty=9), vacancy(2, score=1.0)
    assert stages_to_claim([late, early, ours], 100, 8) == (ours, early, late)
    assert stages_to_claim([late, early, ours], 20, 8) == (ours, early)
    assert stages_to_claim([late, early, ours], 100, 1) == (ours,)


def test_a_stage_that_does_not_fit_leaves_room_for_smaller_ones() -> None:
    large, small = vacancy(0, score=1.0, memory=101), vacancy(1, memory=100)
    assert stages_to_claim([large, small], 100, 8) == (small,)
    assert stages_to_claim([small], -1, 8) == ()
    assert stages_to_claim([vacancy(memory=0)], 0, 8) == (vacancy(memory=0),)


def place(vacancy: VacantStage) -> tuple[str, int]:
    return vacancy.job, vacancy.stage


vacancies = st.lists(
    st.builds(
        vacancy,
        st.integers(0, 50),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.floats(0, 100),
        st.integers(0, 60),
        st.sampled_from("ab"),
    ),
    max_size=12,
    unique_by=place,
)


@settings(max_examples=examples(100))
@given(vacancies, st.integers(0, 200), st.integers(0, 6), st.randoms())
def test_the_choice_fits_takes_all_it_can_and_does_not_depend_on_the_order(
    found: list[VacantStage], memory: int, stages: int, random: object
) -> None:
    chosen = stages_to_claim(found, memory, stages)
    assert len(chosen) <= stages and sum(v.memory_bytes for v in chosen) <= memory
    left = memory - sum(v.memory_bytes for v in chosen)
    if len(chosen) < min(stages, share_of_one(stages)):
        assert all(v in chosen or v.memory_bytes > left for v in found)
    random.shuffle(found)  # type: ignore[attr-defined]
    assert stages_to_claim(found, memory, stages) == chosen


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.5, 1.0])), max_size=24),
    st.integers(0, 12),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 6)),
)
def test_authors_share_the_stages(
    wanted: list[tuple[str, float]], free: int, running: dict[str, int]
) -> None:
    found = [
        replace(vacancy(stage=i, score=score, memory=0), account=PeerId(author))
        for i, (author, score) in enumerate(wanted)
    ]
    chosen = stages_to_claim(found, 100, free, {PeerId(a): n for a, n in running.items()})
    most = share_of_one(free + sum(running.values()))
    here = {a: running.get(a, 0) + sum(v.account == a for v in chosen) for a in "abc"}
    taken = {a for a in "abc" if any(v.account == a for v in chosen)}
    for a in taken:
        assert here[a] <= most
        for b in "abc":  # nobody got a stage that another who has fewer still waits for
            waits = any(v.account == b and v not in chosen for v in found)
            assert not waits or here[a] <= here[b] + 1


def peer(name: str, free: int, memory: int = 100, role: str = "peer") -> PeerRecord:
    return PeerRecord(
        peer=PeerId(name), name=name, addresses=(), role=role, device="cpu", flops_per_second=1.0,  # type: ignore[arg-type]
        memory_bytes=memory, free_memory_bytes=free, software="0", opset=1, started_at=0.0,
    )  # fmt: skip


def test_a_peer_with_work_leaves_holes_to_idle_ones_for_a_while() -> None:
    us, hole, ours = PeerId("us"), vacancy(0, empty=7), vacancy(1, score=1.0)
    late = vacancy(2, empty=IDLE_FIRST_SECONDS)
    large = vacancy(3, empty=7, memory=101)
    everything = [hole, ours, late, large]
    assert beside_the_idle(everything, us, [peer("us", 100), peer("idle", 100)]) == (ours, late, large)
    nobody = [peer("us", 100), peer("busy", 90), peer("asks", 100, role="client")]
    assert beside_the_idle(everything, us, nobody) == tuple(everything)


def test_a_standby_with_work_of_its_own_leaves_nothing_to_the_idle() -> None:
    ours = replace(vacancy(0), standby=True)
    assert beside_the_idle([ours, vacancy(1)], PeerId("us"), [peer("idle", 100)]) == (ours,)


def test_a_standby_with_work_of_its_own_leaves_a_stage_to_one_without_for_a_while() -> None:
    ours = replace(vacancy(0), standby=True, idle_standby=True)
    for peers in ([], [peer("idle", 100)]):
        assert beside_the_idle([ours], PeerId("us"), peers) == ()
        late = replace(ours, empty_seconds=IDLE_FIRST_SECONDS)
        assert beside_the_idle([late], PeerId("us"), peers) == (late,)


def test_idle_peers_take_one_stage_each_as_long_as_there_are_others() -> None:
    holes = [vacancy(stage) for stage in range(8)]
    others = [peer("us", 100), peer("idle", 100)]
    assert {len(one_each(holes, PeerId(name), others)) for name in "abcdef"} == {1}
    assert len({one_each(holes, PeerId(name), others) for name in "abcdefghijkl"}) > 3
    assert len(one_each(holes, PeerId("us"), [peer("us", 100), peer("busy", 90)])) == 8
    proposed = [replace(hole, score=1.0) for hole in holes[:2]]
    assert one_each([*proposed, *holes[2:]], PeerId("us"), others) == tuple(proposed)
    standby = replace(vacancy(5), standby=True)
    assert one_each([*holes[:5], standby], PeerId("us"), others) == (standby,)
    assert one_each([], PeerId("us"), others) == ()


def test_of_several_stages_of_a_job_one_goes_to_an_idle_peer_that_is_ready_for_it() -> None:
    job, other = JobId("a"), JobId("b")

    def standby(name: str, *, ready: bool = True, load: float = 0.0) -> ClaimRecord:
        return ClaimRecord(
            job=job,
            stage=0,
            peer=PeerId(name),
            role="standby",
            term=0,
            score=0.5,
            step=0,
            load=load,
            ready=ready,
        )

    idle, cold, busy = standby("idle"), standby("cold", ready=False), standby("busy", load=1.0)
    everybody = [busy, cold, idle]
    ours = {(job, 0): everybody, (job, 2): everybody, (other, 0): everybody}
    assert one_to_hand_on(ours, ()) == (job, 2, (PeerId("idle"),))
    assert one_to_hand_on(ours, [(job, 2)]) == (job, 0, (PeerId("idle"),))
    assert one_to_hand_on(ours, [(job, 0), (job, 2)]) is None
    assert one_to_hand_on({**ours, (job, 2): [busy, cold]}, ()) == (job, 0, (PeerId("idle"),))
    assert one_to_hand_on({(job, 0): everybody, (other, 0): everybody}, ()) is None


def test_of_the_stages_whose_state_is_here_one_is_taken_early_each_peer_another() -> None:
    early = [replace(vacancy(stage), early=True) for stage in range(8)]
    late = vacancy(9)
    chosen = {one_early([*early, late], PeerId(name)) for name in "abcdefghijkl"}
    assert all(late in some and len(some) == 2 for some in chosen) and len(chosen) > 3
    assert one_early([*early, vacancy(8, score=1.0)], PeerId("a")) == (vacancy(8, score=1.0),)
