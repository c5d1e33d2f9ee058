from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commit_model import SAMPLES, Model, ledger_of

from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.training.step import protocol as s
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.lead import MAX_FAILURES, expected
from fusion.swarm.directory.records import Digest

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
AUTOMATIC = replace(CONFIG, snapshot_every=0, steps=20)


def point(step: int, name: str = "a") -> Checkpoint:
    return Checkpoint(step=step, digest=Digest(name * 64), ledger=s.Ledger(steps=step))


def join(stage: int, step: int, entry: s.Entry = (1, 0, 1), **more: object) -> s.Joined:
    return s.Joined(stage=stage, step=step, entry=entry, **more)  # type: ignore[arg-type]


def gathered(stages: int = 2, step: int = 0, **changes: object) -> s.LeadState:
    state = s.LeadState(config=CONFIG, stages=stages, term=7, ledger=s.Ledger(steps=step))
    state = replace(state, **changes)  # type: ignore[arg-type]
    for i in range(stages):
        state, actions = s.lead(state, join(i, step))
    assert isinstance(actions[-1], s.Begin) and actions[-1].step == step
    return state


def ready(state: s.LeadState, stage: int, squared_norm: float = 1.0, fed: str | None = None) -> s.Ready:
    report = s.StageReport(squared_norm=squared_norm, loss=2.0, fed=fed)
    return s.Ready(stage, state.attempt, state.step, report)


def committed(state: s.LeadState) -> tuple[s.LeadState, s.Commit]:
    for i in range(state.stages):
        state, actions = s.lead(state, ready(state, i))
    commit = actions[0]
    assert isinstance(commit, s.Commit)
    return state, commit


# --- the lead


def test_nothing_begins_until_every_stage_has_joined() -> None:
    state = s.LeadState(config=CONFIG, stages=2, term=7)
    state, actions = s.lead(state, join(1, 0))
    assert actions == () and state.missing == (0,)
    state, actions = s.lead(state, join(0, 0))
    assert actions == (s.Begin((7, 1), 0, s.After(wires=())),)


def test_commit_needs_every_stage_and_carries_the_clip_of_the_whole_norm() -> None:
    state = gathered()
    state, actions = s.lead(state, ready(state, 1, squared_norm=9.0))
    assert actions == ()
    state, actions = s.lead(state, ready(state, 0, squared_norm=16.0))
    commit, done = actions
    assert isinstance(commit, s.Commit) and isinstance(done, s.Committed)
    assert commit.step == 0 and state.step == 1 and commit.learning_rate == 0.5
    assert commit.clip_factor == pytest.approx(1.0 / 5.0, rel=1e-6)
    assert set(done.reports) == {0, 1}


def test_what_follows_a_commit() -> None:
    assert s.after(CONFIG, 1) == s.After()
    assert s.after(CONFIG, 2) == s.After(snapshot=True)
    assert s.after(CONFIG, 3) == s.After(evaluate=True)
    assert s.after(CONFIG, 5) == s.After(evaluate=True, snapshot=True, finish=True)
    assert s.after(CONFIG, 1, stopping=True) == s.After(evaluate=True, snapshot=True, finish=True)
    assert s.after(AUTOMATIC, 2) == s.After() and s.after(AUTOMATIC, 2, due=True) == s.After(snapshot=True)
    assert s.after(AUTOMATIC, 0, due=True) == s.After()  # of the initial weights nobody needs one
    no_data = replace(CONFIG, data=DataConfig(kind="tokens", train=DIGEST))
    assert not s.after(no_data, 3).evaluate


def test_a_snapshot_that_is_due_goes_with_the_next_commit_once() -> None:
    state = gathered(1, config=AUTOMATIC)
    state, _ = s.lead(state, s.SnapshotDue())
    state, commit = committed(state)
    assert commit.after == s.After(snapshot=True)
    state, commit = committed(state)
    assert commit.after == s.After()


def test_new_codecs_go_with_the_next_commit_once_and_with_every_begin() -> None:
    chosen = (("a/0", "int8", "int8"),)
    state, actions = s.lead(gathered(), s.ChangeCodecs(chosen))
    assert actions == ()
    state, commit = committed(state)
    assert commit.after.wires == chosen
    state, commit = committed(state)
    assert commit.after.wires is None
    state, _ = s.lead(state, s.Lost(1, (1, 0, 1)))
    state, (begin,) = s.lead(state, join(1, 2, (2, 0, 1)))
    assert isinstance(begin, s.Begin) and begin.after.wires == chosen


def test_codecs_that_come_while_a_stage_is_handed_over_are_told_when_it_is_back() -> None:
    chosen = (("a/0", "int8", "int8"),)
    state, _ = s.lead(gathered(), s.Leaving(1, (1, 0, 1)))
    state, _ = s.lead(state, s.ChangeCodecs(chosen))
    state, commit = committed(state)
    assert commit.after == s.After(hold=(1,))
    state, (begin,) = s.lead(state, join(1, 1, (2, 0, 1)))
    assert isinstance(begin, s.Begin) and begin.after.wires == chosen


def test_one_snapshot_after_the_other() -> None:
    state = gathered(1)  # every 2 steps
    asked = []
    for _ in range(4):
        state, commit = committed(state)
        asked.append(commit.after.snapshot)
    assert asked == [False, True, False, False] and state.snapshots.due
    for event in (s.Saved(replace(point(2), ledger=s.Ledger(steps=2))), s.SnapshotLost()):
        other, _ = s.lead(replace(state, config=AUTOMATIC), event)
        assert committed(other)[1].after.snapshot


def test_a_snapshot_that_was_interrupted_is_asked_for_again_and_one_that_is_held_is_not() -> None:
    state = gathered(1, config=AUTOMATIC)
    state, _ = s.lead(state, s.SnapshotDue())
    state, _ = committed(state)
    state, _ = s.lead(state, s.Lost(0, (1, 0, 1)))
    state, (begin,) = s.lead(state, join(0, 1, (1, 0, 2)))
    assert isinstance(begin, s.Begin) and begin.after.snapshot
    state, _ = s.lead(state, s.Saved(Checkpoint(step=1, digest=DIGEST, ledger=state.ledger)))
    state, _ = s.lead(state, s.Lost(0, (1, 0, 2)))
    state, (begin,) = s.lead(state, join(0, 1, (1, 0, 3)))
    assert isinstance(begin, s.Begin) and not begin.after.snapshot


def test_a_lost_stage_discards_the_step_and_the_rest_wait_joined() -> None:
    state = gathered(3)
    state, _ = s.lead(state, ready(state, 0))
    state, actions = s.lead(state, s.Lost(2, (1, 0, 1)))
    assert actions == (s.Discard((7, 1)),) and state.missing == (2,)
    assert s.lead(state, s.Lost(2, (1, 0, 1)))[1] == ()  # once is enough
    late, actions = s.lead(state, s.Ready(1, (7, 1), 0, s.StageReport()))
    assert actions == () and late == state
    state, (begin,) = s.lead(state, join(2, 0, (1, 0, 2)))
    assert begin == s.Begin((7, 2), 0, s.After(wires=()), state.tally)
    assert (state.tally.discarded, state.tally.recoveries, state.tally.losses) == (1, 1, 0)


def test_what_comes_late_or_twice_changes_nothing() -> None:
    state = gathered()
    assert s.lead(state, join(1, 0)) == (state, ())  # the join that it has run since
    old = ready(state, 1)
    state, _ = s.lead(state, s.Lost(1, (1, 0, 1)))
    state, _ = s.lead(state, join(1, 0, (1, 0, 2)))
    assert s.lead(state, old) == (state, ())
    assert s.lead(state, s.Lost(1, (1, 0, 1))) == (state, ())
    assert s.lead(state, s.Leaving(1, (1, 0, 1))) == (state, ())
    assert s.lead(state, s.Failed(1, (7, 1), "")) == (state, ())
    assert s.lead(state, s.Lacking(1, (7, 1))) == (state, ())


def test_the_owner_before_cannot_join_for_its_stage() -> None:
    state = gathered()
    state, _ = s.lead(state, join(1, 0, (2, 0, 1)))
    assert s.lead(state, join(1, 0, (1, 0, 9))) == (state, ())
    assert state.tally.losses == 1  # a new owner, and nobody handed over to it


def test_a_peer_that_starts_anew_under_the_term_it_had_is_another_host_and_a_loss() -> None:
    state = gathered()
    state, actions = s.lead(state, join(1, 0, (1, 55, 1)))
    assert [type(a) for a in actions] == [s.Discard, s.Begin] and state.tally.losses == 1
    assert s.lead(state, s.Lost(1, (1, 0, 1))) == (state, ())


def test_stages_at_unlike_steps_all_go_back_to_the_newest_snapshot_that_any_of_them_knows() -> None:
    state = s.LeadState(config=CONFIG, stages=2, term=7)
    state, _ = s.lead(state, join(0, 3, newest=point(2), before=point(1)))
    state, actions = s.lead(state, join(1, 2))
    assert actions == (s.Restore((7, 1), point(2)),) and state.missing == (0, 1)
    assert state.ledger.steps == 2 and state.snapshots.before == point(1)


def test_alike_steps_that_the_ledger_is_not_of_go_back_too() -> None:
    state = s.LeadState(
        config=CONFIG, stages=2, term=7, snapshots=s.SnapshotBooks(newest=point(2)), ledger=s.Ledger(steps=2)
    )
    state, _ = s.lead(state, join(0, 3))
    _, actions = s.lead(state, join(1, 3))
    assert actions == (s.Restore((7, 1), point(2)),)


def test_a_snapshot_that_nobody_holds_is_given_up_for_the_one_before_and_stays_given_up() -> None:
    books = s.SnapshotBooks(newest=point(4, "b"), before=point(2))
    state = s.LeadState(config=CONFIG, stages=1, term=7, snapshots=books)
    state, (restore,) = s.lead(state, join(0, -1))
    for _ in range(s.LACKS - 1):
        assert isinstance(restore, s.Restore) and restore.point == point(4, "b")
        state, (restore,) = s.lead(state, s.Lacking(0, restore.attempt))
    state, (fell, restore) = s.lead(state, s.Lacking(0, restore.attempt))
    assert fell == s.FellBack(point(4, "b"))
    assert isinstance(restore, s.Restore) and restore.point == point(2) and state.ledger.steps == 2
    state, (begin,) = s.lead(state, join(0, 2, (1, 0, 2), newest=point(4, "b")))
    assert isinstance(begin, s.Begin) and begin.step == 2 and state.snapshots.newest == point(2)


def test_a_stage_that_lacks_its_shard_is_asked_again_though_another_was_handed_over_meanwhile() -> None:
    state = s.LeadState(config=CONFIG, stages=3, term=7, snapshots=s.SnapshotBooks(newest=point(4)))
    for stage in range(2):
        state, _ = s.lead(state, join(stage, 4))
    state, (restore,) = s.lead(state, join(2, 0))
    assert isinstance(restore, s.Restore)
    for stage in range(2):
        state, _ = s.lead(state, join(stage, 4, (1, 0, 2)))
    state, (hold,) = s.lead(state, s.Leaving(1, (1, 0, 2)))
    assert isinstance(hold, s.Hold) and hold.attempt > restore.attempt
    others, _ = s.lead(state, join(2, 4, (2, 0, 1)))
    assert s.lead(others, s.Lacking(2, restore.attempt)) == (others, ())  # the owner before said so
    state, (again,) = s.lead(state, s.Lacking(2, restore.attempt))
    assert isinstance(again, s.Restore) and again.attempt > hold.attempt


def test_who_leaves_before_our_own_stage_is_linked_is_told_to_go_once_it_is() -> None:
    state = s.LeadState(config=CONFIG, stages=3, term=7)
    state, _ = s.lead(state, join(1, 0))
    state, actions = s.lead(state, s.Leaving(1, (1, 0, 1)))
    assert actions == ()  # it could not be told
    state, (hold,) = s.lead(state, join(0, 0))
    assert isinstance(hold, s.Hold) and hold.stage == 1


def test_a_job_whose_stages_are_all_at_the_end_only_finishes() -> None:
    state = s.LeadState(
        config=CONFIG, stages=1, term=7, snapshots=s.SnapshotBooks(newest=point(5)), ledger=s.Ledger(steps=5)
    )
    _, (begin,) = s.lead(state, join(0, 5))
    assert isinstance(begin, s.Begin)
    assert begin.after == s.After(evaluate=True, snapshot=True, finish=True, wires=())


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_gradients_that_are_not_finite_fail_the_job_and_are_never_applied(norm: float) -> None:
    state = gathered()
    state, _ = s.lead(state, ready(state, 0))
    state, actions = s.lead(state, ready(state, 1, squared_norm=norm))
    (fail,) = actions
    assert isinstance(fail, s.Fail) and "learning_rate" in fail.message


def test_a_step_that_keeps_failing_fails_the_job_also_under_another_lead() -> None:
    state = gathered()
    for turn in range(MAX_FAILURES - 1):
        state, actions = s.lead(state, s.Failed(1, state.attempt, "no memory"))
        assert isinstance(actions[0], s.Discard)
        state, _ = s.lead(state, join(1, 0, (2 + turn, 0, 1)))
    heir = s.LeadState(config=CONFIG, stages=2, term=8)
    heir, _ = s.lead(heir, join(0, 0, (8, 0, 1)))
    heir, _ = s.lead(heir, join(1, 0, (3, 0, 2), attempt=state.attempt, tally=state.tally))
    assert heir.tally.losses == state.tally.losses + 1  # the lead before
    _, actions = s.lead(heir, s.Failed(1, heir.attempt, "no memory"))
    assert actions == (s.Fail("stage 1: no memory"),)


def test_a_step_that_the_lead_before_left_open_counts_as_discarded_once() -> None:
    gone = (6, 3)
    state = s.LeadState(config=CONFIG, stages=3, term=7)
    state, _ = s.lead(state, join(0, 2, newest=point(2)))
    for i in (1, 2):
        state, _ = s.lead(state, join(i, 2, attempt=gone, abandoned=True, newest=point(2)))
    assert (state.tally.discarded, state.tally.losses) == (1, 1)


# --- the ledger


def test_a_step_of_other_samples_is_discarded_and_run_again_and_then_fails_the_job() -> None:
    state = gathered(samples=SAMPLES)
    right = expected(CONFIG, 0, SAMPLES)
    for turn in range(MAX_FAILURES):
        state, _ = s.lead(state, ready(state, 0, fed=right))
        state, actions = s.lead(state, ready(state, 1, fed="other"))
        if turn < MAX_FAILURES - 1:
            assert [type(a) for a in actions] == [s.Discard, s.Begin] and state.step == 0
    assert actions == (s.Fail("stage 1 fed other samples than those of step 0"),)


def test_without_data_at_the_lead_those_that_read_must_agree() -> None:
    state = gathered(3)
    state, _ = s.lead(state, ready(state, 0))
    state, _ = s.lead(state, ready(state, 1, fed="a"))
    state, actions = s.lead(state, ready(state, 2, fed="b"))
    assert isinstance(actions[0], s.Discard)


def test_the_ledger_chains_what_was_committed() -> None:
    state = gathered(1, samples=SAMPLES)
    for step in range(3):
        state, _ = s.lead(state, ready(state, 0, fed=expected(CONFIG, step, SAMPLES)))
    assert state.ledger == ledger_of(CONFIG, 3) and state.ledger.samples == 6
    with pytest.raises(ValueError, match="after 3 steps"):
        state.ledger.commit(2, "", 2)


# --- handing over


def chain(stage: int, stages: int, terms: dict[int, int]) -> s.Links:
    """To its neighbours and to the lead."""
    beside = set(range(stages)) if stage == 0 else {0, stage - 1, stage + 1}
    return tuple((j, terms.get(j, 1)) for j in sorted(beside - {stage}) if j < stages)


def linked(stages: int) -> s.LeadState:
    state = s.LeadState(config=CONFIG, stages=stages, term=7)
    for i in range(stages):
        state, _ = s.lead(state, join(i, 0, links=chain(i, stages, {})))
    return state


def test_a_leaving_stage_is_held_at_the_next_commit_and_nobody_begins_until_all_are_linked_anew() -> None:
    state = linked(5)
    state, actions = s.lead(state, s.Leaving(2, (1, 0, 1)))
    assert actions == ()
    state, commit = committed(state)
    assert commit.after == s.After(hold=(2,)) and state.missing == (2,)
    # Each loses its link and finds the new owner in an order of its own; stage 4 does not work with it.
    state, _ = s.lead(state, join(2, 1, (2, 0, 1), links=chain(2, 5, {})))
    for i in (3, 0, 1):
        assert s.lead(state, s.Lost(i, (1, 0, 1)))[1] == ()
        state, actions = s.lead(state, join(i, 1, (1, 0, 2), links=chain(i, 5, {2: 2})))
        assert len(actions) == (i == 1)
    assert isinstance(actions[0], s.Begin) and state.step == 1
    # Nothing was lost, nothing discarded.
    assert state.tally == s.RunStatistics(high=1, recent=((0, 2.0),))


def test_while_nothing_runs_a_leaving_stage_may_go_at_once() -> None:
    state = gathered(3)
    state, _ = s.lead(state, s.Lost(1, (1, 0, 1)))
    state, actions = s.lead(state, s.Leaving(2, (1, 0, 1)))
    assert actions == (s.Hold((7, 2), 2, (1, 0, 1)),)
    assert s.lead(state, s.Leaving(2, (1, 0, 1))) == (state, ())


def test_a_step_that_is_discarded_is_a_boundary_for_those_that_want_to_leave() -> None:
    state = gathered(3)
    state, _ = s.lead(state, s.Leaving(2, (1, 0, 1)))
    state, actions = s.lead(state, s.Lost(1, (1, 0, 1)))
    assert actions == (s.Discard((7, 1)), s.Hold((7, 2), 2, (1, 0, 1)))


def test_a_stage_that_could_not_be_handed_over_comes_back_and_the_others_never_left() -> None:
    state = linked(3)
    state, _ = s.lead(state, s.Leaving(2, (1, 0, 1)))
    state, _ = committed(state)
    state, actions = s.lead(state, join(2, 1, (1, 0, 2), links=chain(2, 3, {})))
    assert [type(a) for a in actions] == [s.Begin]


def test_the_last_step_ends_the_job_rather_than_hold() -> None:
    state = gathered(2, step=4)
    state, _ = s.lead(state, s.Leaving(1, (1, 0, 1)))
    _, commit = committed(state)
    assert commit.after.finish and not commit.after.hold


# --- a stage


def begun(**changes: object) -> s.StageState:
    state = s.StageState(step=3, linked=True, phase="running", attempt=(2, 4), joins=1)
    return replace(state, **changes)  # type: ignore[arg-type]


def test_a_stage_applies_only_the_commit_of_the_step_it_is_ready_for() -> None:
    state = s.StageState(step=3)
    state, (joined,) = s.stage(state, s.Linked())
    assert isinstance(joined, s.Join) and (joined.step, joined.entry) == (3, (1, 0, 1))
    state, actions = s.stage(state, s.Begin((1, 1), 3, s.After()))
    assert actions == (s.Run((1, 1), 3, s.After()),)
    commit = s.Commit((1, 1), 3, 0.1, 1.0, s.After(snapshot=True))
    assert s.stage(state, commit) == (state, ())  # not ready: nothing to apply
    state, actions = s.stage(state, s.Completed((1, 1), 3, s.StageReport()))
    assert actions == (s.SendReady((1, 1), 3, s.StageReport()),)
    assert s.stage(state, replace(commit, attempt=(1, 0)))[1] == ()
    assert s.stage(state, replace(commit, step=2))[1] == ()
    state, actions = s.stage(state, commit)
    assert actions == (s.Apply(0.1, 1.0), s.Run((1, 1), 4, s.After(snapshot=True)))
    assert s.stage(state, commit) == (state, ())  # twice is not applied twice


def test_a_discard_keeps_the_state_and_what_is_over_never_begins() -> None:
    state = begun(phase="ready")
    assert s.stage(state, s.Discard((2, 3))) == (state, ())
    state, actions = s.stage(state, s.Discard((2, 4)))
    assert actions == (s.Drop(),) and state.step == 3
    assert s.stage(state, s.Begin((2, 4), 3, s.After()))[1] == ()
    assert s.stage(state, s.Begin((1, 9), 3, s.After()))[1] == ()  # an old lead
    assert s.stage(state, s.Begin((3, 1), 3, s.After()))[1] == (s.Run((3, 1), 3, s.After()),)
    state, _ = s.stage(state, s.Discard((2, 6)))  # its begin was lost, or comes late
    assert s.stage(state, s.Begin((2, 6), 3, s.After()))[1] == ()


def test_a_new_attempt_ends_the_one_under_way() -> None:
    _, actions = s.stage(begun(), s.Begin((2, 5), 3, s.After()))
    assert actions == (s.Drop(), s.Run((2, 5), 3, s.After()))


def test_a_broken_link_drops_the_step_and_is_told_and_so_is_what_the_lead_may_not_know() -> None:
    state, actions = s.stage(begun(), s.Unlinked())
    assert actions == (s.Drop(), s.Suspect((1, 0, 1)))
    assert s.stage(state, s.Begin((2, 5), 3, s.After()))[1] == ()  # not linked
    state, (joined,) = s.stage(state, s.Linked())
    assert isinstance(joined, s.Join) and joined.abandoned and joined.entry == (1, 0, 2)
    assert s.stage(state, s.Discard((2, 4)))[0].abandoned is False


def test_restoring_joins_again_at_the_snapshot_and_only_the_newest_restore_counts() -> None:
    state, actions = s.stage(begun(phase="ready"), s.Restore((2, 5), point(0)))
    assert actions == (s.Drop(), s.Load((2, 5), point(0)))
    assert s.stage(state, s.Restore((2, 5), point(0))) == (state, ())
    assert s.stage(state, s.Begin((2, 6), 3, s.After()))[1] == ()
    assert s.stage(state, s.Linked())[1] == ()
    state, actions = s.stage(state, s.Restore((2, 7), point(2)))
    assert actions == (s.Load((2, 7), point(2)),)
    assert s.stage(state, s.Restored((2, 5), 0)) == (state, ())
    state, (joined,) = s.stage(state, s.Restored((2, 7), 2))
    assert isinstance(joined, s.Join) and joined.step == 2 and state.step == 2


def test_a_state_that_could_not_be_loaded_is_none() -> None:
    state, _ = s.stage(begun(), s.Restore((2, 5), point(0)))
    state, actions = s.stage(state, s.LoadFailed((2, 5)))
    assert actions == (s.Lack((2, 5)),) and state.step == -1
    assert s.stage(state, s.Begin((2, 6), 0, s.After()))[1][0] != s.Run((2, 6), 0, s.After())


def test_a_lead_that_did_not_ask_for_what_could_not_be_loaded_is_told_so_by_a_join() -> None:
    state, _ = s.stage(begun(), s.Restore((2, 5), point(0)))
    for event in (s.Unlinked(), s.Linked()):  # the lead is another's now
        state, _ = s.stage(state, event)
    state, (joined,) = s.stage(state, s.LoadFailed((2, 5)))
    assert isinstance(joined, s.Join) and joined.step == -1


def test_a_leaving_stage_hands_over_what_it_has_just_applied_and_the_others_wait() -> None:
    state, actions = s.stage(begun(stage=2), s.Leave())
    assert actions == (s.SendLeaving((1, 0, 1)),)
    state, _ = s.stage(state, s.Completed((2, 4), 3, s.StageReport()))
    commit = s.Commit((2, 4), 3, 0.1, 1.0, s.After(hold=(2,)))
    state, actions = s.stage(state, commit)
    assert actions == (s.Apply(0.1, 1.0), s.HandOver(4))
    assert s.stage(state, s.Begin((2, 5), 4, s.After())) == (state, ())
    assert s.stage(state, s.Restore((2, 5), point(0))) == (state, ())
    back, (joined,) = s.stage(state, s.Stay())
    assert back.phase == "idle" and isinstance(joined, s.Join)
    other, _ = s.stage(begun(stage=1), s.Completed((2, 4), 3, s.StageReport()))
    other, actions = s.stage(other, commit)
    assert actions == (s.Apply(0.1, 1.0),) and other.phase == "idle" and other.step == 4


def test_a_hold_counts_only_as_the_answer_to_the_newest_join() -> None:
    state = begun(stage=2, phase="idle", leaving=True, joins=2)
    assert s.stage(state, s.Hold((2, 5), 2, (1, 0, 1))) == (state, ())
    assert s.stage(state, s.Hold((2, 5), 1, (1, 0, 2))) == (state, ())
    assert s.stage(replace(state, leaving=False), s.Hold((2, 5), 2, (1, 0, 2)))[1] == ()
    assert s.stage(state, s.Hold((2, 5), 2, (1, 0, 2)))[1] == (s.HandOver(3),)


# --- all of them together


def play(seed: int, *, faults: float, leaves: float, config: TrainConfig = CONFIG) -> Model:
    """Faults and departures while the job runs, then none until it has ended."""
    chance = random.Random(seed)
    model = Model(config, chance.randint(1, 4), chance)
    for turn in range(20_000):
        if turn < 400:
            if chance.random() < faults:
                chance.choice([model.break_a_link, model.kill])()
            if chance.random() < leaves:
                model.leave()
        if turn >= 400 or chance.random() < 0.1:
            model.mend()
        for i in range(model.stages):
            if not model.owners[i].alive and (turn >= 400 or chance.random() < 0.1):
                model.succeed(i)
        for i in model.passed():
            if turn >= 400 or chance.random() < 0.2:
                model.kill(i)
        moved = model.shake()
        if model.ended and not any(o.local for o in model.owners):
            return model
        if not moved and turn > 400 and not model.passed() and all(o.alive for o in model.owners):
            break
    raise AssertionError(
        f"stuck: {model.lead.phase} {model.lead.here.joined} {[o.state for o in model.owners]}"
    )


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_whatever_breaks_every_stage_applies_every_step_once_and_in_order(seed: int) -> None:
    model = play(seed, faults=0.03, leaves=0.0)
    assert [o.applied for o in model.owners] == [list(range(CONFIG.steps))] * model.stages
    assert model.lead.ledger == ledger_of(CONFIG, CONFIG.steps)


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_departures_among_the_faults_lose_nothing_either(seed: int) -> None:
    model = play(seed, faults=0.02, leaves=0.05)
    assert [o.applied for o in model.owners] == [list(range(CONFIG.steps))] * model.stages


@given(st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_departures_alone_discard_no_step_and_send_nobody_back(seed: int) -> None:
    model = play(seed, faults=0.0, leaves=0.05, config=replace(CONFIG, steps=30))
    assert model.discards == 0 and model.restores == 0
    tally = model.lead.tally
    assert (tally.discarded, tally.replayed, tally.losses, tally.recoveries) == (0, 0, 0, 0)
    assert tally.high == 30
