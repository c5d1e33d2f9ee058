"""What follows when the arithmetic of a stage fails, or is said to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.planes.learning_rate import MAX_SKIPPED, SKIPPED
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import faults as f
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.lead import LeadState, lead
from fusion.runtime.training.step.stage import StageState, stage
from fusion.swarm.directory.records import Digest
from fusion.swarm.transport import PeerId

A, B, C, D = (PeerId(name) for name in ("A", "B", "C", "D"))
NOBODY: frozenset[PeerId] = frozenset()
CONFIG = TrainConfig(
    steps=5,
    microbatches=2,
    microbatch_size=1,
    sequence=4,
    seed=0,
    optimizer=OptimizerConfig(learning_rate=0.5),
    data=DataConfig(kind="tokens", train=Digest("0" * 64)),
    snapshot_every=100,
)
NAN = math.nan


class Job:
    """A lead, and who holds each stage under which term."""

    def __init__(self, *owners: PeerId, spare: frozenset[PeerId] = NOBODY) -> None:
        self.owners = list(owners)
        self.terms = [1] * len(owners)
        self.joins = 0
        self.state = LeadState(config=CONFIG, stages=len(owners), term=1, spare=lambda stage: spare)
        for i in range(len(owners)):
            self.join(i)

    def join(self, stage: int, step: int = 0, **more: object) -> tuple[e.LeadAction, ...]:
        self.joins += 1
        self.state = replace(self.state, peers=dict(enumerate(self.owners)))
        join = m.Join(step=step, join_id=(self.terms[stage], 0, self.joins), **more)  # type: ignore[arg-type]
        return self.hear(stage, join)

    def follow(self, stage: int, peer: PeerId) -> tuple[e.LeadAction, ...]:
        """The peer is the next owner of the stage."""
        self.owners[stage], self.terms[stage] = peer, self.terms[stage] + 1
        return self.join(stage)

    def hear(self, stage: int, message: e.LeadEvent) -> tuple[e.LeadAction, ...]:
        self.state, actions = lead(self.state, message, stage)
        return actions

    def fail(self, stage: int, text: str = "no memory") -> tuple[e.LeadAction, ...]:
        return self.hear(stage, m.Failed(self.state.attempt, text))

    def step(self, *words: tuple[str, ...], fed: tuple[str, ...] = ()) -> tuple[e.LeadAction, ...]:
        """Every stage says what it saw; the norm of one that saw anything is no number."""
        actions: tuple[e.LeadAction, ...] = ()
        attempt, step = self.state.attempt, self.state.step
        for i, said in enumerate(words):
            norm = NAN if said else 1.0
            ready = m.Ready(attempt, step, squared_norm=norm, not_finite=said if self.looks else ())
            actions = self.hear(i, replace(ready, fed=fed[i] if fed else None))
        return actions

    @property
    def looks(self) -> bool:
        return self.state.checks(self.state.step)


def dismissed(actions: tuple[e.LeadAction, ...]) -> list[int]:
    return [stage for a in actions if isinstance(a, m.Discard) for stage, _, _ in a.give_up]


def failed(actions: tuple[e.LeadAction, ...]) -> str:
    (fail,) = actions
    assert isinstance(fail, e.Fail)
    return fail.text


# --- arithmetic that raises


def test_a_stage_that_fails_goes_to_another_peer_and_the_job_only_where_two_agree() -> None:
    job = Job(A, B, spare=frozenset({C}))
    assert dismissed(job.fail(1)) == [1] and job.state.missing == (1,)
    assert any(isinstance(action, m.Begin) for action in job.follow(1, C))
    assert failed(job.fail(1)) == "step 0 at stage 1: no memory (two peers agree: B and C)"


def test_one_owner_that_fails_again_and_again_fails_the_job_only_where_nobody_else_can_take_the_stage() -> (
    None
):
    job = Job(A, B)
    for _ in range(f.PATIENCE - 1):
        assert dismissed(job.fail(1)) == [1]
        job.follow(1, B)
    text = failed(job.fail(1))
    assert text == "step 0 at stage 1: no memory (3 times at B; no other peer can take the stage)"
    liar = Job(A, B, spare=frozenset({C}))
    for _ in range(20):
        assert dismissed(liar.fail(1)) == [1]
        liar.follow(1, B)


def test_whoever_is_to_leave_its_stage_joins_no_more() -> None:
    job = Job(A, B, spare=frozenset({C}))
    job.fail(1)
    assert job.join(1) == () and job.state.missing == (1,)
    job.follow(1, C)
    assert job.state.phase == "running"


def test_a_step_that_is_committed_is_forgiven() -> None:
    job = Job(A, B, spare=frozenset({C}))
    job.fail(1)
    job.follow(1, C)
    job.step((), ())
    assert job.state.step == 1 and job.state.faults == ()
    assert dismissed(job.fail(1)) == [1]


def test_a_job_of_one_stage_does_not_wait_for_what_nobody_would_remember() -> None:
    job = Job(A, spare=frozenset({B}))
    for _ in range(f.PATIENCE - 1):
        assert dismissed(job.fail(0)) == [0]
        job.follow(0, A)
    assert "3 times at A" in failed(job.fail(0))


# --- the lead after it


def test_the_next_lead_believes_what_a_majority_of_the_others_remember() -> None:
    job = Job(A, B, C, spare=frozenset({D}))
    (discard, *_) = job.fail(0)
    assert isinstance(discard, m.Discard)
    heard, _ = stage(StageState(step=0, stage=1, attempt=(1, 1), phase="running"), discard)
    assert heard.faults == discard.faults == (f.Fault(0, 0, A, 1, "no memory"),)
    for others, known in ((heard.faults, heard.faults), ((), ())):
        state = LeadState(
            config=CONFIG, stages=3, term=2, spare=lambda stage: frozenset({A}), peers={0: D, 1: B, 2: C}
        )
        for i, faults in ((0, ()), (1, heard.faults), (2, others)):
            state, actions = lead(state, m.Join(step=0, join_id=(2, 0, 1), faults=faults), i)
        (begin,) = actions
        assert isinstance(begin, m.Begin) and begin.faults == state.faults == known
    assert f.majority({B: heard.faults}) == heard.faults and f.majority({}) == ()


# --- samples


def test_three_times_other_samples_move_the_stage() -> None:
    job = Job(A, B, spare=frozenset({C}))
    for _ in range(f.PATIENCE - 1):
        assert dismissed(job.step((), (), fed=("a", "b"))) == [] and job.state.phase == "running"
    assert dismissed(job.step((), (), fed=("a", "b"))) == [1]
    alone = Job(A, B)
    for _ in range(f.PATIENCE):
        actions = alone.step((), (), fed=("a", "b"))
    assert failed(actions).startswith("step 0 at stage 1: fed other samples")


# --- numbers


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (((f.SENT, f.GRADIENTS), (f.RECEIVED, f.LOSS), (f.RECEIVED,)), (0, f.SENT)),
        (((), (f.SENT,), (f.RECEIVED, f.LOSS)), (1, f.SENT)),
        (((), (), (f.LOSS, f.GRADIENTS)), (2, f.LOSS)),
        (
            ((f.GRADIENTS,), (f.GRADIENTS_RECEIVED, f.GRADIENTS_SENT), (f.GRADIENTS_SENT,)),
            (2, f.GRADIENTS_SENT),
        ),
        (((f.GRADIENTS_RECEIVED, f.GRADIENTS), (f.GRADIENTS_SENT,), ()), (1, f.GRADIENTS_SENT)),
        (((f.GRADIENTS,), (), ()), (0, f.GRADIENTS)),
        (((), (f.RECEIVED,), ()), (0, f.RECEIVED)),
        (((), (f.GRADIENTS_RECEIVED,), ()), (2, f.GRADIENTS_RECEIVED)),
        (((f.RECEIVED,), (), ()), (0, f.RECEIVED)),
        (((), (), (f.GRADIENTS_RECEIVED,)), (2, f.GRADIENTS_RECEIVED)),
    ],
)
def test_the_first_that_makes_it_is_the_culprit(
    words: tuple[tuple[str, ...], ...], culprit: tuple[int, str]
) -> None:
    reports = [m.Ready((1, 1), 0, squared_norm=NAN, not_finite=said) for said in words]
    assert f.culprit(reports) == culprit


@pytest.mark.parametrize("norm", [NAN, math.inf])
@pytest.mark.parametrize("loss", [None, NAN])
def test_a_step_that_is_not_finite_is_run_again_with_a_look_and_its_maker_moved(
    norm: float, loss: float | None
) -> None:
    job = Job(A, B, spare=frozenset({C}))
    job.hear(0, m.Ready(job.state.attempt, 0, squared_norm=1.0))
    last = m.Ready(job.state.attempt, 0, squared_norm=norm if loss is None else 1.0, loss=loss)
    discard, begin = job.hear(1, last)
    assert isinstance(discard, m.Discard) and isinstance(begin, m.Begin) and begin.after.look
    assert dismissed(job.step((), (f.LOSS,))) == [1]
    (begin,) = job.follow(1, C)
    assert isinstance(begin, m.Begin) and begin.after.look
    text = failed(job.step((), (f.LOSS,)))
    assert text.startswith("step 0 at stage 1: loss not finite") and text.endswith(
        "(two peers agree: B and C)"
    )
    assert "optimizer.learning_rate" in text


def test_a_gradient_that_overflows_in_float16_costs_its_step_and_no_more_of_them_than_a_scale_can_be_halved() -> (
    None
):
    job = Job(A, B, spare=frozenset({C}))
    job.state = replace(job.state, config=replace(CONFIG, precision="fp16"))

    def step(norm: float, loss: float = 2.0) -> tuple[e.LeadAction, ...]:
        attempt, now = job.state.attempt, job.state.step
        job.hear(0, m.Ready(attempt, now, squared_norm=1.0))
        return job.hear(1, m.Ready(attempt, now, squared_norm=norm, loss=loss))

    commit, committed = step(math.inf, NAN)
    assert isinstance(commit, m.Commit) and commit.clip_factor == SKIPPED and job.state.step == 1
    assert isinstance(committed, e.Committed) and committed.reports[1].loss is None
    commit, _ = step(4.0)
    assert isinstance(commit, m.Commit) and commit.clip_factor > 0
    for _ in range(MAX_SKIPPED):
        commit, _ = step(math.inf)
        assert isinstance(commit, m.Commit) and commit.clip_factor == SKIPPED
    discard, begin = step(math.inf)
    assert isinstance(discard, m.Discard) and isinstance(begin, m.Begin) and begin.after.look
    assert job.state.step == MAX_SKIPPED + 2


def test_numbers_that_are_not_finite_once_only_cost_a_step() -> None:
    job = Job(A, B)
    job.step((), (f.LOSS,))
    assert job.looks
    job.step((), ())
    assert job.state.step == 1 and not job.looks


def test_where_nobody_stands_by_the_owner_leaves_so_that_another_may_come() -> None:
    job = Job(A, B)
    job.step((), (f.LOSS,))
    for _ in range(f.PATIENCE - 1):
        assert dismissed(job.step((), (f.LOSS,))) == [1]
        job.follow(1, B)
    assert "3 times at B; no other peer" in failed(job.step((), (f.LOSS,)))
    honest = Job(A, B)
    honest.step((), (f.LOSS,))
    assert dismissed(honest.step((), (f.LOSS,))) == [1]
    honest.follow(1, C)
    honest.step((), ())
    assert honest.state.step == 1


def test_where_one_peer_has_the_whole_job_it_goes_back_once_before_it_fails() -> None:
    job = Job(B, B)
    job.step((), (f.LOSS,))
    discard, restore = job.step((), (f.LOSS,))
    assert dismissed((discard,)) == [] and isinstance(restore, m.Restore)
    for i in range(2):
        actions = job.join(i)
    assert isinstance(actions[0], m.Begin) and actions[0].after.look
    assert "2 times at B; no other peer" in failed(job.step((), (f.LOSS,)))


words = st.lists(
    st.sampled_from([f.RECEIVED, f.SENT, f.LOSS, f.GRADIENTS_RECEIVED, f.GRADIENTS_SENT, f.GRADIENTS]),
    min_size=1,
    unique=True,
).map(tuple)


@given(st.integers(2, 5), st.data(), st.integers(0, 2**32))
@settings(max_examples=examples(200), deadline=None)
def test_a_liar_moves_itself_and_others_once_and_fails_no_job(
    stages: int, data: st.DataObject, seed: int
) -> None:
    liar = data.draw(st.integers(0, stages - 1))
    names = [PeerId(f"P{i}") for i in range(stages)]
    fresh = (PeerId(f"S{i}") for i in range(1000))
    job = Job(*names, spare=frozenset({A, B, C, D, *(PeerId(f"S{i}") for i in range(100))}))
    moved: Counter[int] = Counter()
    for _ in range(20):
        if job.owners[liar] != names[liar]:
            break
        lies = data.draw(words)
        actions = job.step(*(lies if i == liar else () for i in range(stages)))
        for i in dismissed(actions):
            moved[i] += 1
            job.follow(i, next(fresh))
        assert job.state.phase == "running", actions
    assert job.owners[liar] != names[liar]
    assert all(count == 1 for count in moved.values())
    assert set(moved) <= {liar - 1, liar, liar + 1}
    assert job.step(*((),) * stages) and job.state.step == 1


def test_a_stage_that_is_told_to_go_goes_and_no_other() -> None:
    fault = f.Fault(1, 3, A, 1, "loss not finite")
    state = StageState(step=3, stage=1, term=2, incarnation=7, attempt=(1, 4), phase="ready")
    after, actions = stage(state, m.Discard((1, 4), (fault,), ((1, 2, 7),)))
    assert actions == (e.Drop(), e.GiveUp("loss not finite")) and after.faults == (fault,)
    for give_up in ((2, 2, 7), (1, 1, 7), (1, 2, 8)):
        _, actions = stage(state, m.Discard((1, 4), (fault,), (give_up,)))
        assert actions == (e.Drop(),)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([A, B, C])), max_size=40))
def test_faults_are_counted_by_stage_step_and_peer_and_few_are_kept(
    found: list[tuple[int, int, PeerId]],
) -> None:
    faults: f.Faults = ()
    for at, step, peer in found:
        faults = f.add(faults, at, step, peer, "x" * 500)
    assert len(faults) <= f.REMEMBERED and all(len(fault.text) <= f.MAX_TEXT for fault in faults)
    if len(set(found)) <= f.REMEMBERED:
        assert {(x.stage, x.step, x.peer): x.times for x in faults} == Counter(found)
    assert all(fault.step > 1 for fault in f.overcome(faults, 1))
    assert f.merged(faults, faults) == faults
