"""The lead's side of joins, losses, restores and handovers: a step begins once every stage has joined. Pure."""

from __future__ import annotations

from dataclasses import replace

from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.attendance import supersedes
from fusion.runtime.training.step.faults import majority, merged
from fusion.runtime.training.step.history import Version
from fusion.runtime.training.step.lead_state import LeadState, Result
from fusion.runtime.training.step.run_statistics import Attempt


def after(config: TrainConfig, step: int, *, stopping: bool = False, due: bool = False) -> m.After:
    """What stages do after the commit that leads to `step`. `due`: take a snapshot."""
    finish = stopping or step >= config.steps
    held_out = config.data.held_out is not None
    return m.After(
        evaluate=held_out and step > 0 and (finish or _every(config.evaluate_every, step)),
        snapshot=finish or (step > 0 and (due or _every(config.snapshot_every, step))),
        finish=finish,
    )


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def join(state: LeadState, stage: int, join: m.Join) -> Result:
    known = state.here.join_ids.get(stage)
    if known is not None and not supersedes(join.join_id, known):
        return state, ()
    if state.dismissed.get(stage) == join.join_id[:2]:  # its owner was told to give the stage up
        return state, ()
    # A stage that joins again was away: its part of the running step is lost.
    state, actions = lose(replace(state, here=state.here.stay(stage)), stage)
    # Losses of later steps cannot be true yet, and would displace all others.
    interruptions = state.interruptions.merge(join.statistics.before(state.step))
    if state.here.replaced(stage, join.join_id):
        interruptions = interruptions.lose()
    if 0 < join.attempt[0] < state.term:
        interruptions = interruptions.lose_lead()
    if join.abandoned:  # by itself: the lead of that attempt has gone
        interruptions = interruptions.discard(join.attempt)
    state = replace(
        state,
        here=state.here.join(stage, join),
        snapshots=state.snapshots.learn(join.newest, stage).learn(join.before, stage),
        interruptions=interruptions,
        dismissed={s: owner for s, owner in state.dismissed.items() if s != stage},
    )
    state = replace(state, remembered={**state.remembered, stage: (state.owner(stage), join.faults)})
    state, more = gather(state)
    state, held = hold(state)
    return state, (*actions, *more, *held)


def lose(state: LeadState, stage: int) -> Result:
    running = state.phase == "running"
    state = replace(state, phase="gathering", here=state.here.lose(stage), ready={})
    if not running:
        return state, ()
    discard = m.Discard(state.attempt, state.faults)
    interruptions = replace(state.interruptions.discard(state.attempt), broken=True)
    state, actions = hold(replace(state, interruptions=interruptions))
    return state, (discard, *actions)


def gather(state: LeadState) -> Result:
    """Once every stage has joined: begin a step, or restore a snapshot where their states differ."""
    if state.missing or state.phase != "gathering" or not state.here.agree:
        return state, ()
    if not Version.agree((state.version, *state.here.joined.values())):
        return restore(state)
    step, config, snapshots = state.step, state.config, state.snapshots
    # A snapshot that was requested at this step and is incomplete will stay so: its stages have joined again.
    due = snapshots.newest.step != step and (snapshots.due or snapshots.requested == step)
    following = after(config, step, stopping=state.stopping, due=due)
    if snapshots.newest.step == step and not following.finish:
        following = replace(following, snapshot=False)  # it was just restored
    # A new owner knows only the codecs that the job began with, and others may have received those of an earlier lead.
    codecs = config.codecs if state.codecs is None else state.codecs
    state = _recall(state)
    following = replace(following, codecs=codecs, look=state.checks(step))
    state = replace(
        state,
        phase="running",
        count=state.count + 1,
        codecs_changed=False,
        snapshots=replace(snapshots.resume(), saving=False),
        interruptions=state.interruptions.recover(),
    )
    state = requested(state, following)
    return state, (m.Begin(state.attempt, step, following, state.statistics, state.history, state.faults),)


def _recall(state: LeadState) -> LeadState:
    """Add the faults of earlier leads that a majority of the other owners remember."""
    remembered = {peer: faults for stage, (peer, faults) in state.remembered.items() if stage > 0}
    before = tuple(fault for fault in majority(remembered) if fault.step >= state.step)
    return replace(state, faults=merged(state.faults, before))


def restore(state: LeadState) -> Result:
    checkpoint = state.snapshots.newest
    state = replace(
        state,
        here=replace(state.here, joined={}),
        count=state.count + 1,
        snapshots=state.snapshots.restore(),
        ledger=checkpoint.ledger,
        history=checkpoint.version.history,
        interruptions=replace(state.interruptions, broken=True),
    )
    return replace(state, restoring=state.attempt), (m.Restore(state.attempt, checkpoint),)


def lack(state: LeadState, stage: int, attempt: Attempt) -> Result:
    # A stage that has joined since has another owner.
    if state.phase != "gathering" or attempt != state.restoring or stage in state.here.joined:
        return state, ()
    lost = state.snapshots.newest
    state, actions = restore(replace(state, snapshots=state.snapshots.lack()))
    fell_back = state.snapshots.newest != lost
    return state, (e.FellBack(lost), *actions) if fell_back else actions


def requested(state: LeadState, following: m.After) -> LeadState:
    """The state with the snapshot that `following` requests, if any, recorded as requested."""
    if not following.snapshot:
        return state
    return replace(state, snapshots=state.snapshots.request(state.step))


# --- handing over


def hold(state: LeadState) -> Result:
    """While no step runs: release the stages that want to leave, once our own stage is linked to them."""
    here = state.here
    if state.phase != "gathering" or not here.leaving or 0 not in here.joined:
        return state, ()
    state = replace(state, here=here.part(), count=state.count + 1)
    return state, tuple(m.Hold(state.attempt, s, here.join_ids[s]) for s in sorted(here.leaving))
