"""The lead's side of the commit protocol (`fusion.runtime.training.step`), pure."""

from __future__ import annotations

import math
from dataclasses import replace

from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.planes.learning_rate import MAX_SKIPPED, SKIPPED, clip_factor, learning_rate
from fusion.runtime.training.data.ledger import fed_digest
from fusion.runtime.training.data.samples import sample_indices
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.dismissal import dismiss, fail, fault, not_finite, refuse, stand_still
from fusion.runtime.training.step.faults import is_finite, overcome, overflowed
from fusion.runtime.training.step.gathering import after, hold, join, lack, lose, requested
from fusion.runtime.training.step.history import contents, extend
from fusion.runtime.training.step.lead_state import LeadState, Result, initial_state

__all__ = ["LeadState", "after", "expected", "initial_state", "lead"]


def lead(state: LeadState, event: e.LeadEvent, stage: int = 0) -> Result:
    """`stage`: the sender of a message."""
    if state.phase == "ended":
        return state, ()
    match event:
        case m.Join():
            return join(state, stage, event)
        case m.Suspect(join_id):
            if join_id != state.here.join_ids.get(stage):  # it has joined again since
                return state, ()
            return lose(state, stage)
        case m.Ready(attempt, step):
            if state.phase != "running" or (attempt, step) != (state.attempt, state.step):
                return state, ()
            state = replace(state, ready={**state.ready, stage: event})
            return _commit(state) if len(state.ready) == state.stages else (state, ())
        case m.Failed(attempt, text):
            if state.phase != "running" or attempt != state.attempt:
                return state, ()
            state, verdict = fault(state, stage, text)
            return fail(state, stage) if verdict == "fail" else dismiss(state, stage)
        case m.Leaving(join_id):
            # It is sent again with every join.
            if stage in state.here.held or join_id != state.here.join_ids.get(stage):
                return state, ()
            return hold(replace(state, here=state.here.leave(stage)))
        case m.Lack(attempt):
            return lack(state, stage, attempt)
        case m.Saved(checkpoint):
            return replace(state, snapshots=state.snapshots.saved(checkpoint)), ()
        case e.SnapshotLost():
            return replace(state, snapshots=replace(state.snapshots, saving=False)), ()
        case e.SnapshotDue():
            return replace(state, snapshots=replace(state.snapshots, due=True)), ()
        case e.ChangeCodecs(codecs):
            return replace(state, codecs=codecs, codecs_changed=True), ()
        case e.StandsStill():
            return stand_still(state, event)
        case e.Stop():
            return replace(state, stopping=True), ()


# --- steps


def _commit(state: LeadState) -> Result:
    step, config = state.step, state.config
    reports = state.ready
    ordered = [reports[s] for s in range(state.stages)]
    # Summed in stage order, so that every lead finds the same float.
    squared_norm = sum(report.squared_norm for report in ordered)
    overflow = False
    if not (is_finite(ordered) and math.isfinite(squared_norm)):
        # By then the loss scale is 1: an overflow that is still reported has another cause.
        overflow = config.precision == "fp16" and overflowed(ordered) and state.skipped < MAX_SKIPPED
        if not overflow:
            return not_finite(state, ordered)
    fed, wrong = _fed(state)
    if wrong:
        return refuse(state, wrong[0])
    ledger = state.ledger.commit(step, fed, config.microbatches * config.microbatch_size)
    rate = learning_rate(config.optimizer, step, config.steps)
    clip = SKIPPED if overflow else clip_factor(config.optimizer, squared_norm)
    losses = [report.loss for report in ordered if report.loss is not None]
    made_of = contents(fed, [report.squared_norm for report in ordered], losses)
    loss = next((loss for loss in losses if math.isfinite(loss)), None)
    state = replace(
        state,
        ledger=ledger,
        history=extend(state.history, step, rate, clip, made_of),
        faults=overcome(state.faults, step),
        remembered={s: (peer, overcome(known, step)) for s, (peer, known) in state.remembered.items()},
        ready={},
        skipped=state.skipped + 1 if overflow else 0,
    )
    joined = dict.fromkeys(range(state.stages), state.version)
    state = replace(state, here=replace(state.here, joined=joined))
    state = state.with_statistics(state.statistics.commit(step, loss))
    state, following = _following(state)
    state = requested(state, following)
    commit = m.Commit(state.attempt, step, rate, clip, following, made_of)
    if overflow:
        finite = {s: replace(r, loss=loss) for s, r in reports.items() if r.loss is not None}
        reports = {**reports, **finite}
    return state, (commit, e.Committed(step, reports))


def _following(state: LeadState) -> tuple[LeadState, m.After]:
    """What stages do between the commit and the next step, and the state once that is sent."""
    following = after(state.config, state.step, stopping=state.stopping, due=state.snapshots.due)
    if following.snapshot and state.snapshots.saving and not following.finish:
        # One at a time: a job whose steps are faster than its disks would never complete one.
        following = replace(following, snapshot=False)
        state = replace(state, snapshots=replace(state.snapshots, due=True))
    if state.here.leaving and not following.finish:
        # Whatever is due now is due when the next attempt begins.
        following = m.After(hold=tuple(sorted(state.here.leaving)))
        return replace(state, here=state.here.part(), phase="gathering"), following
    following = replace(following, look=state.checks(state.step) and not following.finish)
    if state.codecs_changed:
        following = replace(following, codecs=state.codecs)
        state = replace(state, codecs_changed=False)
    return state, following


def _fed(state: LeadState) -> tuple[str, tuple[int, ...]]:
    """The digest of the step's samples, and the stages that read others."""
    reported = {s: state.ready[s].fed for s in range(state.stages)}
    if state.samples is None:
        right = next((fed for fed in reported.values() if fed is not None), "")
    else:
        right = expected(state.config, state.step, state.samples)
    return right, tuple(s for s, fed in reported.items() if fed is not None and fed != right)


def expected(config: TrainConfig, step: int, samples: int) -> str:
    """The digest of the samples that the plan has for a step, out of `samples`."""
    return fed_digest(
        sample_indices(config.seed, step, m, config, samples) for m in range(config.microbatches)
    )
