from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from fusion.runtime.hosting.duties import IDLE_FIRST_SECONDS, Vacancy, beside_the_idle, stages_to_claim
from fusion.swarm.records import JobId, PeerRecord
from fusion.swarm.transport import PeerId


def vacancy(
    stage: int = 0, score: float = 0.5, empty: float = 0.0, memory: int = 10, job: str = "a"
) -> Vacancy:
    return Vacancy(job=JobId(job), stage=stage, score=score, empty_seconds=empty, memory_bytes=memory)


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
    unique_by=lambda v: (v.job, v.stage),
)


@settings(max_examples=100)
@given(vacancies, st.integers(0, 200), st.integers(0, 6), st.randoms())
def test_the_choice_fits_takes_all_it_can_and_does_not_depend_on_the_order(
    found: list[Vacancy], memory: int, seats: int, random: object
) -> None:
    chosen = stages_to_claim(found, memory, seats)
    assert len(chosen) <= seats and sum(v.memory_bytes for v in chosen) <= memory
    left = memory - sum(v.memory_bytes for v in chosen)
    if len(chosen) < seats:
        assert all(v in chosen or v.memory_bytes > left for v in found)
    random.shuffle(found)  # type: ignore[attr-defined]
    assert stages_to_claim(found, memory, seats) == chosen


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
