from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commit_model import SAMPLES, Model, ledger_of
from support.examples import examples

from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.history import INITIAL, Version
from fusion.runtime.training.step.lead import LeadState, after, expected, lead
from fusion.runtime.training.step.run_statistics import RunStatistics
from fusion.runtime.training.step.snapshot_state import MAX_LACKS, SnapshotState
from fusion.runtime.training.step.stage import StageState, stage
from fusion.swarm.directory.records import Digest
from fusion.swarm.transport import PeerId

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


def snapshot(step: int, name: str = "a") -> Checkpoint:
    return Checkpoint(step=step, digest=Digest(name * 64), ledger=Ledger(steps=step))


def join(step: int, join_id: m.JoinId = (1, 0, 1), **more: object) -> m.Join:
    return m.Join(step=step, join_id=join_id, **more)  # type: ignore[arg-type]


def gathered(stages: int = 2, step: int = 0, **changes: object) -> LeadState:
    state = LeadState(config=CONFIG, stages=stages, term=7, ledger=Ledger(steps=step))
    state = replace(state, **changes)  # type: ignore[arg-type]
    for i in range(stages):
        state, actions = lead(state, join(step), i)
    assert isinstance(actions[-1], m.Begin) and actions[-1].step == step
    return state


def ready(state: LeadState, squared_norm: float = 1.0, fed: str | None = None) -> m.Ready:
    return m.Ready(state.attempt, state.step, squared_norm=squared_norm, loss=2.0, fed=fed)


def committed(state: LeadState) -> tuple[LeadState, m.Commit]:
    for i in range(state.stages):
        state, actions = lead(state, ready(state), i)
    commit = actions[0]
    assert isinstance(commit, m.Commit)
    return state, commit


# --- the lead


def test_nothing_begins_until_every_stage_has_joined() -> None:
    state = LeadState(config=CONFIG, stages=2, term=7)
    state, actions = lead(state, join(0), 1)
    assert actions == () and state.missing == (0,)
    state, actions = lead(state, join(0), 0)
    assert actions == (m.Begin((7, 1), 0, m.After(codecs=())),)


def test_commit_needs_every_stage_and_carries_the_clip_of_the_whole_norm() -> None:
    state = gathered()
    state, actions = lead(state, ready(state, squared_norm=9.0), 1)
    assert actions == ()
    state, actions = lead(state, ready(state, squared_norm=16.0), 0)
    commit, done = actions
    assert isinstance(commit, m.Commit) and isinstance(done, e.Committed)
    assert commit.step == 0 and state.step == 1 and commit.learning_rate == 0.5
    assert commit.clip_factor == pytest.approx(1.0 / 5.0, rel=1e-6)
    assert set(done.reports) == {0, 1}


def test_what_follows_a_commit() -> None:
    assert after(CONFIG, 1) == m.After()
    assert after(CONFIG, 2) == m.After(snapshot=True)
    assert after(CONFIG, 3) == m.After(evaluate=True)
    assert after(CONFIG, 5) == m.After(evaluate=True, snapshot=True, finish=True)
    assert after(CONFIG, 1, stopping=True) == m.After(evaluate=True, snapshot=True, finish=True)
    assert after(AUTOMATIC, 2) == m.After() and after(AUTOMATIC, 2, due=True) == m.After(snapshot=True)
    assert after(AUTOMATIC, 0, due=True) == m.After()  # of the initial weights nobody needs one
    no_data = replace(CONFIG, data=DataConfig(kind="tokens", train=DIGEST))
    assert not after(no_data, 3).evaluate


def test_a_snapshot_that_is_due_goes_with_the_next_commit_once() -> None:
    state = gathered(1, config=AUTOMATIC)
    state, _ = lead(state, e.SnapshotDue())
    state, commit = committed(state)
    assert commit.after == m.After(snapshot=True)
    state, commit = committed(state)
    assert commit.after == m.After()


def test_new_codecs_go_with_the_next_commit_once_and_with_every_begin() -> None:
    chosen = (("a/0", "int8", "int8"),)
    state, actions = lead(gathered(), e.ChangeCodecs(chosen))
    assert actions == ()
    state, commit = committed(state)
    assert commit.after.codecs == chosen
    state, commit = committed(state)
    assert commit.after.codecs is None
    state, _ = lead(state, m.Suspect((1, 0, 1)), 1)
    state, (begin,) = lead(state, join(2, (2, 0, 1)), 1)
    assert isinstance(begin, m.Begin) and begin.after.codecs == chosen


def test_codecs_that_come_while_a_stage_is_handed_over_are_told_when_it_is_back() -> None:
    chosen = (("a/0", "int8", "int8"),)
    state, _ = lead(gathered(), m.Leaving((1, 0, 1)), 1)
    state, _ = lead(state, e.ChangeCodecs(chosen))
    state, commit = committed(state)
    assert commit.after == m.After(hold=(1,))
    state, (begin,) = lead(state, join(1, (2, 0, 1)), 1)
    assert isinstance(begin, m.Begin) and begin.after.codecs == chosen


def test_one_snapshot_after_the_other() -> None:
    state = gathered(1)  # every 2 steps
    asked = []
    for _ in range(4):
        state, commit = committed(state)
        asked.append(commit.after.snapshot)
    assert asked == [False, True, False, False] and state.snapshots.due
    for event in (m.Saved(replace(snapshot(2), ledger=Ledger(steps=2))), e.SnapshotLost()):
        other, _ = lead(replace(state, config=AUTOMATIC), event)
        assert committed(other)[1].after.snapshot


def test_a_snapshot_that_was_interrupted_is_asked_for_again_and_one_that_is_held_is_not() -> None:
    state = gathered(1, config=AUTOMATIC)
    state, _ = lead(state, e.SnapshotDue())
    state, _ = committed(state)
    state, _ = lead(state, m.Suspect((1, 0, 1)), 0)
    state, (begin,) = lead(state, join(1, (1, 0, 2)), 0)
    assert isinstance(begin, m.Begin) and begin.after.snapshot
    state, _ = lead(state, m.Saved(Checkpoint(step=1, digest=DIGEST, ledger=state.ledger)))
    state, _ = lead(state, m.Suspect((1, 0, 2)), 0)
    state, (begin,) = lead(state, join(1, (1, 0, 3)), 0)
    assert isinstance(begin, m.Begin) and not begin.after.snapshot


def test_a_lost_stage_discards_the_step_and_the_rest_wait_joined() -> None:
    state = gathered(3)
    state, _ = lead(state, ready(state), 0)
    state, actions = lead(state, m.Suspect((1, 0, 1)), 2)
    assert actions == (m.Discard((7, 1)),) and state.missing == (2,)
    assert lead(state, m.Suspect((1, 0, 1)), 2)[1] == ()  # once is enough
    late, actions = lead(state, m.Ready((7, 1), 0), 1)
    assert actions == () and late == state
    state, (begin,) = lead(state, join(0, (1, 0, 2)), 2)
    assert begin == m.Begin((7, 2), 0, m.After(codecs=()), state.statistics)
    assert (state.statistics.discarded, state.statistics.recoveries, state.statistics.losses) == (1, 1, 0)


def test_what_comes_late_or_twice_changes_nothing() -> None:
    state = gathered()
    assert lead(state, join(0), 1) == (state, ())  # the join that it has run since
    old = ready(state, 1)
    state, _ = lead(state, m.Suspect((1, 0, 1)), 1)
    state, _ = lead(state, join(0, (1, 0, 2)), 1)
    assert lead(state, old) == (state, ())
    assert lead(state, m.Suspect((1, 0, 1)), 1) == (state, ())
    assert lead(state, m.Leaving((1, 0, 1)), 1) == (state, ())
    assert lead(state, m.Failed((7, 1), ""), 1) == (state, ())
    assert lead(state, m.Lack((7, 1), ""), 1) == (state, ())


def test_the_owner_before_cannot_join_for_its_stage() -> None:
    state = gathered()
    state, _ = lead(state, join(0, (2, 0, 1)), 1)
    assert lead(state, join(0, (1, 0, 9)), 1) == (state, ())
    assert state.statistics.losses == 1  # a new owner, and nobody handed over to it


def test_a_peer_that_starts_anew_under_the_term_it_had_is_another_host_and_a_loss() -> None:
    state = gathered()
    state, actions = lead(state, join(0, (1, 55, 1)), 1)
    assert [type(a) for a in actions] == [m.Discard, m.Begin] and state.statistics.losses == 1
    assert lead(state, m.Suspect((1, 0, 1)), 1) == (state, ())


def test_a_link_to_a_stage_that_the_job_has_not_holds_nobody_up() -> None:
    state = LeadState(config=CONFIG, stages=2, term=7)
    state, _ = lead(state, join(0, links=((1, 1),)), 0)
    _, actions = lead(state, join(0, links=((0, 1), (99, 3))), 1)
    assert isinstance(actions[-1], m.Begin)


def test_a_squared_norm_below_zero_is_a_fault_of_the_stage_that_says_so() -> None:
    state = gathered(3, peers={stage: PeerId(f"peer {stage}") for stage in range(3)})
    for _ in range(2):  # once more with a look at every tensor
        for i in range(3):
            state, actions = lead(state, ready(state, squared_norm=-9.0 if i == 1 else 1.0), i)
    (discard,) = actions
    assert isinstance(discard, m.Discard) and discard.give_up == ((1, 1, 0),) and state.step == 0


def test_stages_at_unlike_steps_all_go_back_to_the_newest_snapshot_that_any_of_them_knows() -> None:
    state = LeadState(config=CONFIG, stages=2, term=7)
    state, _ = lead(state, join(3, newest=snapshot(2), before=snapshot(1)), 0)
    state, actions = lead(state, join(2), 1)
    assert actions == (m.Restore((7, 1), snapshot(2)),) and state.missing == (0, 1)
    assert state.ledger.steps == 2 and state.snapshots.reported[0] == (snapshot(2), snapshot(1))


def test_stages_of_one_step_and_two_histories_go_back_to_one_snapshot() -> None:
    state = LeadState(
        config=CONFIG, stages=3, term=7, ledger=Ledger(steps=3), history="a" * 64,
        snapshots=SnapshotState(newest=replace(snapshot(2), history="c" * 64)),
    )  # fmt: skip
    for i, history in ((0, "a" * 64), (1, "b" * 64)):
        state, actions = lead(state, join(3, history=history), i)
        assert actions == ()
    state, actions = lead(state, join(3, history=""), 2)  # of a peer that does not say it
    assert actions == (m.Restore((7, 1), state.snapshots.newest),)
    assert state.version == Version(2, "c" * 64)
    for i in range(3):
        state, actions = lead(state, join(2, (1, 0, 2), history="c" * 64), i)
    assert isinstance(actions[0], m.Begin)


def test_lead_and_stages_find_the_same_history() -> None:
    state = gathered(2, history=INITIAL)
    member = StageState(step=0, history=INITIAL)
    for _ in range(3):
        before = state.history
        state, commit = committed(state)
        member = replace(member, phase="ready", attempt=commit.attempt)
        member, _ = stage(member, commit)
        assert member.version == state.version and state.history not in ("", before)


def test_alike_steps_that_the_ledger_is_not_of_go_back_too() -> None:
    state = LeadState(
        config=CONFIG, stages=2, term=7, snapshots=SnapshotState(newest=snapshot(2)), ledger=Ledger(steps=2)
    )
    state, _ = lead(state, join(3), 0)
    _, actions = lead(state, join(3), 1)
    assert actions == (m.Restore((7, 1), snapshot(2)),)


def test_a_snapshot_that_nobody_holds_is_given_up_for_the_one_before_and_stays_given_up() -> None:
    books = SnapshotState.begin(snapshot(2)).learn(snapshot(4, "b"))
    state = LeadState(config=CONFIG, stages=1, term=7, snapshots=books)
    state, (restore,) = lead(state, join(-1), 0)
    for _ in range(MAX_LACKS - 1):
        assert isinstance(restore, m.Restore) and restore.checkpoint == snapshot(4, "b")
        state, (restore,) = lead(state, m.Lack(restore.attempt, ""), 0)
    state, (fell, restore) = lead(state, m.Lack(restore.attempt, ""), 0)
    assert fell == e.FellBack(snapshot(4, "b"))
    assert isinstance(restore, m.Restore) and restore.checkpoint == snapshot(2) and state.ledger.steps == 2
    state, (begin,) = lead(state, join(2, (1, 0, 2), newest=snapshot(4, "b")), 0)
    assert isinstance(begin, m.Begin) and begin.step == 2 and state.snapshots.newest == snapshot(2)


def test_snapshots_that_one_stage_makes_up_crowd_out_none_that_others_know() -> None:
    state = LeadState(config=CONFIG, stages=3, term=7)
    state, _ = lead(state, join(4, newest=snapshot(4), before=snapshot(2)), 0)
    state, _ = lead(state, join(3, newest=snapshot(90), before=snapshot(80)), 1)
    state, actions = lead(state, join(4), 2)
    told = []
    assert state.snapshots.held.step == 0  # nor is the swarm told of what nobody has gone back to
    for _ in range(2 * MAX_LACKS + 1):
        restore = actions[-1]
        assert isinstance(restore, m.Restore)
        told.append(restore.checkpoint.step)
        state, actions = lead(state, m.Lack(restore.attempt, ""), 2)
    assert told == [90] * MAX_LACKS + [80] * MAX_LACKS + [4] and restore.checkpoint == snapshot(4)
    for i in range(3):
        state, actions = lead(state, join(4, (1, 0, 2)), i)
    assert isinstance(actions[-1], m.Begin) and state.snapshots.held == snapshot(4)


def test_a_stage_that_lacks_its_shard_is_asked_again_though_another_was_handed_over_meanwhile() -> None:
    state = LeadState(config=CONFIG, stages=3, term=7, snapshots=SnapshotState(newest=snapshot(4)))
    for i in range(2):
        state, _ = lead(state, join(4), i)
    state, (restore,) = lead(state, join(0), 2)
    assert isinstance(restore, m.Restore)
    for i in range(2):
        state, _ = lead(state, join(4, (1, 0, 2)), i)
    state, (hold,) = lead(state, m.Leaving((1, 0, 2)), 1)
    assert isinstance(hold, m.Hold) and hold.attempt > restore.attempt
    others, _ = lead(state, join(4, (2, 0, 1)), 2)
    assert lead(others, m.Lack(restore.attempt, ""), 2) == (others, ())  # the owner before said so
    state, (again,) = lead(state, m.Lack(restore.attempt, ""), 2)
    assert isinstance(again, m.Restore) and again.attempt > hold.attempt


def test_who_leaves_before_our_own_stage_is_linked_is_told_to_go_once_it_is() -> None:
    state = LeadState(config=CONFIG, stages=3, term=7)
    state, _ = lead(state, join(0), 1)
    state, actions = lead(state, m.Leaving((1, 0, 1)), 1)
    assert actions == ()  # it could not be told
    state, (hold,) = lead(state, join(0), 0)
    assert isinstance(hold, m.Hold) and hold.stage == 1


def test_a_job_whose_stages_are_all_at_the_end_only_finishes() -> None:
    state = LeadState(
        config=CONFIG, stages=1, term=7, snapshots=SnapshotState(newest=snapshot(5)), ledger=Ledger(steps=5)
    )
    _, (begin,) = lead(state, join(5), 0)
    assert isinstance(begin, m.Begin)
    assert begin.after == m.After(evaluate=True, snapshot=True, finish=True, codecs=())


def test_a_step_that_the_lead_before_left_open_counts_as_discarded_once() -> None:
    gone = (6, 3)
    state = LeadState(config=CONFIG, stages=3, term=7)
    state, _ = lead(state, join(2, newest=snapshot(2)), 0)
    for i in (1, 2):
        state, _ = lead(state, join(2, attempt=gone, abandoned=True, newest=snapshot(2)), i)
    assert (state.statistics.discarded, state.statistics.losses) == (1, 1)


# --- the ledger


def test_a_step_of_other_samples_is_discarded_and_run_again() -> None:
    state = gathered(samples=SAMPLES)
    state, _ = lead(state, ready(state, fed=expected(CONFIG, 0, SAMPLES)), 0)
    state, actions = lead(state, ready(state, fed="other"), 1)
    assert [type(a) for a in actions] == [m.Discard, m.Begin] and state.step == 0


def test_without_data_at_the_lead_those_that_read_must_agree() -> None:
    state = gathered(3)
    state, _ = lead(state, ready(state), 0)
    state, _ = lead(state, ready(state, fed="a"), 1)
    state, actions = lead(state, ready(state, fed="b"), 2)
    assert isinstance(actions[0], m.Discard)


def test_the_ledger_chains_what_was_committed() -> None:
    state = gathered(1, samples=SAMPLES)
    for step in range(3):
        state, _ = lead(state, ready(state, fed=expected(CONFIG, step, SAMPLES)), 0)
    assert state.ledger == ledger_of(CONFIG, 3) and state.ledger.samples == 6
    with pytest.raises(ValueError, match="after 3 steps"):
        state.ledger.commit(2, "", 2)


# --- handing over


def chain(stage: int, stages: int, terms: dict[int, int]) -> m.Links:
    """To its neighbours and to the lead."""
    beside = set(range(stages)) if stage == 0 else {0, stage - 1, stage + 1}
    return tuple((j, terms.get(j, 1)) for j in sorted(beside - {stage}) if j < stages)


def linked(stages: int) -> LeadState:
    state = LeadState(config=CONFIG, stages=stages, term=7)
    for i in range(stages):
        state, _ = lead(state, join(0, links=chain(i, stages, {})), i)
    return state


def test_a_leaving_stage_is_held_at_the_next_commit_and_nobody_begins_until_all_are_linked_anew() -> None:
    state = linked(5)
    state, actions = lead(state, m.Leaving((1, 0, 1)), 2)
    assert actions == ()
    state, commit = committed(state)
    assert commit.after == m.After(hold=(2,)) and state.missing == (2,)
    # Each loses its link and finds the new owner in an order of its own; stage 4 does not work with it.
    state, _ = lead(state, join(1, (2, 0, 1), links=chain(2, 5, {})), 2)
    for i in (3, 0, 1):
        assert lead(state, m.Suspect((1, 0, 1)), i)[1] == ()
        state, actions = lead(state, join(1, (1, 0, 2), links=chain(i, 5, {2: 2})), i)
        assert len(actions) == (i == 1)
    assert isinstance(actions[0], m.Begin) and state.step == 1
    # Nothing was lost, nothing discarded.
    assert state.statistics == RunStatistics(high=1, recent=((0, 2.0),))


def test_while_nothing_runs_a_leaving_stage_may_go_at_once() -> None:
    state = gathered(3)
    state, _ = lead(state, m.Suspect((1, 0, 1)), 1)
    state, actions = lead(state, m.Leaving((1, 0, 1)), 2)
    assert actions == (m.Hold((7, 2), 2, (1, 0, 1)),)
    assert lead(state, m.Leaving((1, 0, 1)), 2) == (state, ())


def test_a_step_that_is_discarded_is_a_boundary_for_those_that_want_to_leave() -> None:
    state = gathered(3)
    state, _ = lead(state, m.Leaving((1, 0, 1)), 2)
    state, actions = lead(state, m.Suspect((1, 0, 1)), 1)
    assert actions == (m.Discard((7, 1)), m.Hold((7, 2), 2, (1, 0, 1)))


def test_a_stage_that_could_not_be_handed_over_comes_back_and_the_others_never_left() -> None:
    state = linked(3)
    state, _ = lead(state, m.Leaving((1, 0, 1)), 2)
    state, _ = committed(state)
    state, actions = lead(state, join(1, (1, 0, 2), links=chain(2, 3, {})), 2)
    assert [type(a) for a in actions] == [m.Begin]


def test_a_stage_that_stays_after_all_is_not_waited_for() -> None:
    """Nobody took it while a long step ran, which was then discarded: the job stood still for ever, as its lead had told it to go."""
    state = linked(5)
    last = StageState(step=0, stage=4, linked=True, phase="running", attempt=state.attempt, joins=1)
    for event in (e.Leave(), e.Stay()):
        last, said = stage(last, event)
        for message in said:
            assert isinstance(message, m.Leaving)
            state, _ = lead(state, message, 4)
    state, told = lead(state, m.Suspect((1, 0, 1)), 2)
    assert [type(each) for each in told] == [m.Discard, m.Hold]
    for each in told:
        assert isinstance(each, m.Discard | m.Hold)
        last, said = stage(last, each)
        for message in said:
            if isinstance(message, m.Join):
                state, _ = lead(state, replace(message, links=chain(4, 5, {})), 4)
    state, _ = lead(state, join(0, (2, 0, 1), links=chain(2, 5, {})), 2)
    for i in (3, 0, 1):
        state, actions = lead(state, join(0, (1, 0, 2), links=chain(i, 5, {2: 2})), i)
    assert state.missing == () and isinstance(actions[-1], m.Begin)


def test_the_last_step_ends_the_job_rather_than_hold() -> None:
    state = gathered(2, step=4)
    state, _ = lead(state, m.Leaving((1, 0, 1)), 1)
    _, commit = committed(state)
    assert commit.after.finish and not commit.after.hold


# --- a stage


def begun(**changes: object) -> StageState:
    state = StageState(step=3, linked=True, phase="running", attempt=(2, 4), joins=1)
    return replace(state, **changes)  # type: ignore[arg-type]


def test_a_stage_applies_only_the_commit_of_the_step_it_is_ready_for() -> None:
    state = StageState(step=3)
    state, (joined,) = stage(state, e.Linked())
    assert isinstance(joined, m.Join) and (joined.step, joined.join_id) == (3, (1, 0, 1))
    state, actions = stage(state, m.Begin((1, 1), 3, m.After()))
    assert actions == (e.Run((1, 1), 3, m.After()),)
    commit = m.Commit((1, 1), 3, 0.1, 1.0, m.After(snapshot=True))
    assert stage(state, commit) == (state, ())  # not ready: nothing to apply
    state, actions = stage(state, e.Completed(m.Ready((1, 1), 3)))
    assert actions == (m.Ready((1, 1), 3),)
    assert stage(state, replace(commit, attempt=(1, 0)))[1] == ()
    assert stage(state, replace(commit, step=2))[1] == ()
    state, actions = stage(state, commit)
    assert actions == (e.Apply(0.1, 1.0), e.Run((1, 1), 4, m.After(snapshot=True)))
    assert stage(state, commit) == (state, ())  # twice is not applied twice


def test_a_discard_keeps_the_state_and_what_is_over_never_begins() -> None:
    state = begun(phase="ready")
    assert stage(state, m.Discard((2, 3))) == (state, ())
    state, actions = stage(state, m.Discard((2, 4)))
    assert actions == (e.Drop(),) and state.step == 3
    assert stage(state, m.Begin((2, 4), 3, m.After()))[1] == ()
    assert stage(state, m.Begin((1, 9), 3, m.After()))[1] == ()  # an old lead
    assert stage(state, m.Begin((3, 1), 3, m.After()))[1] == (e.Run((3, 1), 3, m.After()),)
    state, _ = stage(state, m.Discard((2, 6)))  # its begin was lost, or comes late
    assert stage(state, m.Begin((2, 6), 3, m.After()))[1] == ()


def test_a_new_attempt_ends_the_one_under_way() -> None:
    _, actions = stage(begun(), m.Begin((2, 5), 3, m.After()))
    assert actions == (e.Drop(), e.Run((2, 5), 3, m.After()))


def test_a_broken_link_drops_the_step_and_is_told_and_so_is_what_the_lead_may_not_know() -> None:
    state, actions = stage(begun(), e.Unlinked())
    assert actions == (e.Drop(), m.Suspect((1, 0, 1)))
    assert stage(state, m.Begin((2, 5), 3, m.After()))[1] == ()  # not linked
    state, (joined,) = stage(state, e.Linked())
    assert isinstance(joined, m.Join) and joined.abandoned and joined.join_id == (1, 0, 2)
    assert stage(state, m.Discard((2, 4)))[0].abandoned is False


def test_restoring_joins_again_at_the_snapshot_and_only_the_newest_restore_counts() -> None:
    state, actions = stage(begun(phase="ready"), m.Restore((2, 5), snapshot(0)))
    assert actions == (e.Drop(), e.Load((2, 5), snapshot(0)))
    assert stage(state, m.Restore((2, 5), snapshot(0))) == (state, ())
    assert stage(state, m.Begin((2, 6), 3, m.After()))[1] == ()
    assert stage(state, e.Linked())[1] == ()
    state, actions = stage(state, m.Restore((2, 7), snapshot(2)))
    assert actions == (e.Load((2, 7), snapshot(2)),)
    assert stage(state, e.Restored((2, 5), 0)) == (state, ())
    state, (joined,) = stage(state, e.Restored((2, 7), 2))
    assert isinstance(joined, m.Join) and joined.step == 2 and state.step == 2


def test_a_state_that_could_not_be_loaded_is_none() -> None:
    state, _ = stage(begun(), m.Restore((2, 5), snapshot(0)))
    state, actions = stage(state, e.LoadFailed((2, 5), "not here"))
    assert actions == (m.Lack((2, 5), "not here"),) and state.step == -1
    assert stage(state, m.Begin((2, 6), 0, m.After()))[1][0] != e.Run((2, 6), 0, m.After())


def test_a_lead_that_did_not_ask_for_what_could_not_be_loaded_is_told_so_by_a_join() -> None:
    state, _ = stage(begun(), m.Restore((2, 5), snapshot(0)))
    for event in (e.Unlinked(), e.Linked()):  # the lead is another's now
        state, _ = stage(state, event)
    state, (joined,) = stage(state, e.LoadFailed((2, 5), "not here"))
    assert isinstance(joined, m.Join) and joined.step == -1


def test_a_leaving_stage_hands_over_what_it_has_just_applied_and_the_others_wait() -> None:
    state, actions = stage(begun(stage=2), e.Leave())
    assert actions == (m.Leaving((1, 0, 1)),)
    state, _ = stage(state, e.Completed(m.Ready((2, 4), 3)))
    commit = m.Commit((2, 4), 3, 0.1, 1.0, m.After(hold=(2,)))
    state, actions = stage(state, commit)
    assert actions == (e.Apply(0.1, 1.0), e.HandOver(4))
    assert stage(state, m.Begin((2, 5), 4, m.After())) == (state, ())
    assert stage(state, m.Restore((2, 5), snapshot(0))) == (state, ())
    back, (joined,) = stage(state, e.Stay())
    assert back.phase == "idle" and isinstance(joined, m.Join)
    other, _ = stage(begun(stage=1), e.Completed(m.Ready((2, 4), 3)))
    other, actions = stage(other, commit)
    assert actions == (e.Apply(0.1, 1.0),) and other.phase == "idle" and other.step == 4


def test_a_hold_counts_only_as_the_answer_to_the_newest_join() -> None:
    state = begun(stage=2, phase="idle", leaving=True, joins=2)
    assert stage(state, m.Hold((2, 5), 2, (1, 0, 1))) == (state, ())
    assert stage(state, m.Hold((2, 5), 1, (1, 0, 2))) == (state, ())
    assert stage(state, m.Hold((2, 5), 2, (1, 0, 2)))[1] == (e.HandOver(3),)
    (joined,) = stage(replace(state, leaving=False), m.Hold((2, 5), 2, (1, 0, 2)))[1]
    assert isinstance(joined, m.Join) and joined.join_id == (1, 0, 3), "it stays after all"


# --- all of them together


def play(
    seed: int,
    *,
    faults: float,
    leaves: float,
    stays: float = 0.0,
    forks: float = 0.0,
    config: TrainConfig = CONFIG,
) -> Model:
    """Faults and departures while the job runs, then none until it has ended."""
    chance = random.Random(seed)
    model = Model(config, chance.randint(1, 4), chance, forks=forks)
    for turn in range(20_000):
        if turn < 400:
            if chance.random() < faults:
                chance.choice([model.break_a_link, model.kill])()
            if chance.random() < leaves:
                model.leave()
            if stays and chance.random() < stays:
                model.stay()
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
@settings(max_examples=examples(300), deadline=None)
def test_whatever_breaks_every_stage_applies_every_step_once_and_in_order(seed: int) -> None:
    model = play(seed, faults=0.03, leaves=0.0)
    assert [o.applied for o in model.owners] == [list(range(CONFIG.steps))] * model.stages
    assert model.lead.ledger == ledger_of(CONFIG, CONFIG.steps)


@given(st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_owners_that_come_from_another_history_are_sent_back_whatever_breaks(seed: int) -> None:
    model = play(seed, faults=0.03, leaves=0.02, forks=0.5)
    assert [o.applied for o in model.owners] == [list(range(CONFIG.steps))] * model.stages


@given(st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_departures_among_the_faults_lose_nothing_either(seed: int) -> None:
    model = play(seed, faults=0.02, leaves=0.05)
    assert [o.applied for o in model.owners] == [list(range(CONFIG.steps))] * model.stages


@given(st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_whoever_stays_after_all_holds_nobody_up(seed: int) -> None:
    model = play(seed, faults=0.03, leaves=0.05, stays=0.2)
    assert [o.applied for o in model.owners] == [list(range(CONFIG.steps))] * model.stages


@given(st.integers(0, 2**32))
@settings(max_examples=examples(80), deadline=None)
def test_departures_alone_discard_no_step_and_send_nobody_back(seed: int) -> None:
    model = play(seed, faults=0.0, leaves=0.05, config=replace(CONFIG, steps=30))
    assert model.discards == 0 and model.restores == 0
    statistics = model.lead.statistics
    assert (statistics.discarded, statistics.replayed, statistics.losses, statistics.recoveries) == (
        0,
        0,
        0,
        0,
    )
    assert statistics.high == 30
