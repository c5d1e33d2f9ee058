from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from fusion.runtime.job import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.training import step as s
from fusion.swarm.records import Digest

DIGEST = Digest("0" * 64)
CONFIG = TrainConfig(
    steps=5,
    microbatches=2,
    microbatch_size=1,
    sequence=4,
    seed=0,
    optimizer=OptimizerConfig(learning_rate=0.5, clip_norm=1.0),
    data=DataConfig(kind="tokens", train=DIGEST, held_out=DIGEST),
    snapshot_every=2,
    evaluate_every=3,
)


def gathered(stages: int = 2, step: int = 0) -> s.LeadState:
    state = s.LeadState(config=CONFIG, stages=stages, term=7)
    for i in range(stages):
        state, actions = s.lead(state, s.Joined(i, step))
    assert isinstance(actions[-1], s.Begin) and actions[-1].step == step
    return state


def ready(state: s.LeadState, stage: int, squared_norm: float = 1.0) -> s.Ready:
    return s.Ready(stage, state.attempt, state.step, s.Report(squared_norm=squared_norm, loss=2.0))


def test_nothing_begins_until_every_stage_has_joined() -> None:
    state = s.LeadState(config=CONFIG, stages=2, term=7)
    state, actions = s.lead(state, s.Joined(1, 0))
    assert actions == () and state.missing == (0,)
    state, actions = s.lead(state, s.Joined(0, 0))
    assert actions == (s.Begin((7, 1), 0, s.After()),)


def test_commit_needs_every_stage_and_carries_the_clip_of_the_whole_norm() -> None:
    state = gathered()
    state, actions = s.lead(state, ready(state, 1, squared_norm=9.0))
    assert actions == ()
    state, actions = s.lead(state, ready(state, 0, squared_norm=16.0))
    commit, committed = actions
    assert isinstance(commit, s.Commit) and isinstance(committed, s.Committed)
    assert commit.step == 0 and state.step == 1 and commit.learning_rate == 0.5
    assert commit.clip_factor == pytest.approx(1.0 / 5.0, rel=1e-6)
    assert set(committed.reports) == {0, 1}


def test_what_follows_a_commit() -> None:
    assert s.after(CONFIG, 1) == s.After()
    assert s.after(CONFIG, 2) == s.After(snapshot=True)
    assert s.after(CONFIG, 3) == s.After(evaluate=True)
    assert s.after(CONFIG, 5) == s.After(evaluate=True, snapshot=True, finish=True)
    assert s.after(CONFIG, 1, stopping=True) == s.After(evaluate=True, snapshot=True, finish=True)
    no_data = replace(CONFIG, data=DataConfig(kind="tokens", train=DIGEST))
    assert not s.after(no_data, 3).evaluate


def test_a_lost_stage_discards_the_step_and_the_rest_wait_joined() -> None:
    state = gathered(3)
    state, _ = s.lead(state, ready(state, 0))
    state, actions = s.lead(state, s.Lost(2))
    assert actions == (s.Discard((7, 1)),) and state.missing == (2,)
    assert s.lead(state, s.Lost(2))[1] == ()  # once is enough
    late, actions = s.lead(state, s.Ready(1, (7, 1), 0, s.Report()))
    assert actions == () and late == state
    state, actions = s.lead(state, s.Joined(2, 0))
    assert actions == (s.Begin((7, 2), 0, s.After()),)


def test_a_ready_of_an_attempt_that_is_over_does_not_count() -> None:
    state = gathered()
    old = ready(state, 1)
    state, _ = s.lead(state, s.Lost(1))
    state, _ = s.lead(state, s.Joined(1, 0))
    assert s.lead(state, old)[0] == state


def test_stages_at_unlike_steps_all_go_back() -> None:
    state = s.LeadState(config=CONFIG, stages=2, term=7)
    state, _ = s.lead(state, s.Joined(0, 3))
    state, actions = s.lead(state, s.Joined(1, 2))
    assert actions == (s.Restore(),) and state.missing == (0, 1)


def test_a_job_whose_stages_are_all_at_the_end_only_finishes() -> None:
    state = s.LeadState(config=CONFIG, stages=1, term=7)
    _, actions = s.lead(state, s.Joined(0, 5))
    assert actions == (s.Begin((7, 1), 5, s.After(evaluate=True, snapshot=True, finish=True)),)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_gradients_that_are_not_finite_fail_the_job_and_are_never_applied(norm: float) -> None:
    state = gathered()
    state, _ = s.lead(state, ready(state, 0))
    state, actions = s.lead(state, ready(state, 1, squared_norm=norm))
    (fail,) = actions
    assert isinstance(fail, s.Fail) and "learning_rate" in fail.message


def test_a_stage_applies_only_the_commit_of_the_step_it_is_ready_for() -> None:
    state = s.StageState(step=3)
    state, actions = s.stage(state, s.Linked())
    assert actions == (s.Join(3),)
    state, actions = s.stage(state, s.Begin((1, 1), 3, s.After()))
    assert actions == (s.Run((1, 1), 3, s.After()),)
    commit = s.Commit((1, 1), 3, 0.1, 1.0, s.After(snapshot=True))
    assert s.stage(state, commit) == (state, ())  # not ready: nothing to apply
    state, actions = s.stage(state, s.Completed((1, 1), 3, s.Report()))
    assert actions == (s.SendReady((1, 1), 3, s.Report()),)
    assert s.stage(state, replace(commit, attempt=(1, 0)))[1] == ()
    assert s.stage(state, replace(commit, step=2))[1] == ()
    state, actions = s.stage(state, commit)
    assert actions == (s.Apply(0.1, 1.0), s.Run((1, 1), 4, s.After(snapshot=True)))
    assert s.stage(state, commit)[1] == ()  # twice is not applied twice


def test_a_discard_keeps_the_state_and_a_lower_attempt_never_begins() -> None:
    state = s.StageState(step=3, linked=True, phase="ready", attempt=(2, 4))
    assert s.stage(state, s.Discard((2, 3))) == (state, ())
    state, actions = s.stage(state, s.Discard((2, 4)))
    assert actions == (s.Drop(),) and state.step == 3
    assert s.stage(state, s.Begin((2, 4), 3, s.After()))[1] == ()
    assert s.stage(state, s.Begin((1, 9), 3, s.After()))[1] == ()  # an old lead
    assert s.stage(state, s.Begin((3, 1), 3, s.After()))[1] == (s.Run((3, 1), 3, s.After()),)


def test_a_new_attempt_ends_the_one_under_way() -> None:
    state = s.StageState(step=3, linked=True, phase="running", attempt=(2, 4))
    _, actions = s.stage(state, s.Begin((2, 5), 3, s.After()))
    assert actions == (s.Drop(), s.Run((2, 5), 3, s.After()))


def test_a_broken_link_drops_the_step_and_is_told() -> None:
    state = s.StageState(step=3, linked=True, phase="running", attempt=(2, 4))
    state, actions = s.stage(state, s.Unlinked())
    assert actions == (s.Drop(), s.Suspect())
    state, actions = s.stage(state, s.Linked())
    assert actions == (s.Join(3),)


def test_restoring_joins_again_at_the_snapshot() -> None:
    state = s.StageState(step=3, linked=True, phase="ready", attempt=(2, 4))
    state, actions = s.stage(state, s.Restore())
    assert actions == (s.Drop(), s.Load())
    assert s.stage(state, s.Begin((2, 5), 3, s.After()))[1] == ()
    assert s.stage(state, s.Linked())[1] == ()
    state, actions = s.stage(state, s.Restored(0))
    assert actions == (s.Join(0),) and state.step == 0


@dataclass
class Swarm:
    """Every stage and the lead, with messages that arrive in any order between pairs but in order within one."""

    stages: int
    chance: random.Random
    lead: s.LeadState = field(init=False)
    states: list[s.StageState] = field(init=False)
    applied: list[list[int]] = field(init=False)
    snapshot: int = 0
    to_stage: list[list[s.StageEvent]] = field(init=False)
    to_lead: list[list[s.LeadEvent]] = field(init=False)
    work: list[s.Run | None] = field(init=False)

    def __post_init__(self) -> None:
        self.lead = s.LeadState(config=CONFIG, stages=self.stages, term=1)
        self.states = [s.StageState(step=0) for _ in range(self.stages)]
        self.applied = [[] for _ in range(self.stages)]
        self.to_stage = [[s.Linked()] for _ in range(self.stages)]
        self.to_lead = [[] for _ in range(self.stages)]
        self.work = [None] * self.stages

    def lead_hears(self, event: s.LeadEvent) -> None:
        self.lead, actions = s.lead(self.lead, event)
        for action in actions:
            if isinstance(action, s.Committed):
                continue
            assert not isinstance(action, s.Fail)
            for queue in self.to_stage:
                queue.append(action)

    def stage_hears(self, i: int, event: s.StageEvent) -> None:
        self.states[i], actions = s.stage(self.states[i], event)
        for action in actions:
            match action:
                case s.Join(step):
                    self.to_lead[i].append(s.Joined(i, step))
                case s.Suspect():
                    self.to_lead[i].append(s.Lost(i))
                case s.Run():
                    self.work[i] = action
                case s.SendReady(attempt, step, report):
                    self.to_lead[i].append(s.Ready(i, attempt, step, report))
                case s.Apply():
                    self.applied[i].append(self.states[i].step - 1)
                case s.Drop():
                    self.work[i] = None
                case s.Load():
                    del self.applied[i][self.snapshot :]
                    self.to_stage[i].append(s.Restored(self.snapshot))

    def shake(self) -> None:
        """One thing that can happen, happens."""
        choices = [
            lambda i=i: self.stage_hears(i, self.to_stage[i].pop(0))
            for i in range(self.stages)
            if self.to_stage[i]
        ]
        choices += [
            lambda i=i: self.lead_hears(self.to_lead[i].pop(0)) for i in range(self.stages) if self.to_lead[i]
        ]
        for i, run in enumerate(self.work):
            if run is not None and not run.after.finish:

                def complete(i: int = i, run: s.Run = run) -> None:
                    self.work[i] = None
                    self.stage_hears(i, s.Completed(run.attempt, run.step, s.Report(squared_norm=1.0)))

                choices.append(complete)
        if choices:
            self.chance.choice(choices)()

    def break_a_link(self) -> None:
        """Frames on the way between a stage and the lead are lost; both ends notice, in any order."""
        i = self.chance.randrange(self.stages)
        self.to_stage[i] = [e for e in self.to_stage[i] if isinstance(e, s.Restored)] + [
            s.Unlinked(),
            s.Linked(),
        ]
        self.to_lead[i].clear()
        self.to_lead[i].append(s.Lost(i))

    def replace_a_stage(self) -> None:
        """A stage dies; its new owner starts from the snapshot."""
        i = self.chance.randrange(self.stages)
        self.states[i] = s.StageState(step=self.snapshot)
        self.applied[i] = list(range(self.snapshot))
        self.work[i] = None
        self.to_stage[i] = [s.Linked()]
        self.to_lead[i] = [s.Lost(i)]

    @property
    def ended(self) -> bool:
        return all(run is not None and run.after.finish for run in self.work) and self.lead.phase == "running"


@pytest.mark.parametrize("seed", range(150))
def test_whatever_breaks_every_stage_applies_every_step_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    swarm = Swarm(stages=chance.randint(1, 4), chance=chance)
    for turn in range(20_000):
        if turn < 300 and chance.random() < 0.03:
            chance.choice([swarm.break_a_link, swarm.replace_a_stage])()
        swarm.shake()
        for applied in swarm.applied:
            assert applied == list(range(len(applied)))
        if swarm.ended and turn > 300:
            break
    assert swarm.ended
    assert [state.step for state in swarm.states] == [CONFIG.steps] * swarm.stages
    assert swarm.applied == [list(range(CONFIG.steps))] * swarm.stages
