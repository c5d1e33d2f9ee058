"""The ready/commit/discard protocol of one training step, as two pure state machines.

    lead (`lead`)                                every stage (`stage`), the lead's own too
    ------------------                           ----------------------------------------------
    has `join` of every stage at one step   <-   join      linked to its neighbours, state of step s
    begin (attempt, s)                      ->   runs its microbatches of step s
                                            <-   ready     gradients of step s are complete, squared norm
    commit (s, rate, clip), all ready       ->   applies them: step s + 1, which begins at once
    discard, when a stage or a link is lost ->   drops gradients; state is still that of step s
    restore (point)                         ->   joined at unlike steps: everybody back to the newest snapshot
    finish                                  ->   the last snapshot is held; the job has ended

A stage whose owner leaves is handed over at a boundary, and no step is lost:

                                            <-   leaving   hand my stage over
    commit (.., hold), or hold when idle    ->   applies, begins nothing; the leaving owner stores its state and goes
    has `join` of the new owner at s + 1    <-   join      the new owner, and whoever had to link to it
    begin (attempt, s + 1)                  ->

Nothing is applied before commit, so a failed step costs one step. An attempt is (term of the lead, counter): a
higher one always wins, and what belongs to a lower one is dropped wherever it arrives. An entry is (term of a stage's
owner, its host, counter), and orders its joins. So a message that arrives twice, or late, changes nothing.

Each machine is `step(state, event) -> (state, actions)` over the values of `step_events`. The shells are
`fusion.runtime.training.lead.lead` and `fusion.runtime.training.host`.
"""

from __future__ import annotations

from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.step.events import (
    NO_ENTRY,
    After,
    Apply,
    Begin,
    ChangeCodecs,
    Commit,
    Committed,
    Completed,
    Discard,
    Drop,
    Entry,
    Fail,
    Failed,
    FellBack,
    HandOver,
    Hold,
    Join,
    Joined,
    Lack,
    Lacking,
    LeadAction,
    LeadEvent,
    Leave,
    Leaving,
    Linked,
    Links,
    Load,
    LoadFailed,
    Lost,
    Ready,
    Restore,
    Restored,
    Run,
    Saved,
    SendLeaving,
    SendReady,
    SnapshotDue,
    SnapshotLost,
    StageAction,
    StageEvent,
    StageReport,
    Stay,
    Stop,
    Suspect,
    Unlinked,
    after,
)
from fusion.runtime.training.step.lead import LeadState, lead
from fusion.runtime.training.step.run_statistics import NO_ATTEMPT, Attempt, Interruptions, RunStatistics
from fusion.runtime.training.step.snapshot_books import LACKS, SnapshotBooks
from fusion.runtime.training.step.stage import StageState, stage

__all__ = [
    "LACKS",
    "NO_ATTEMPT",
    "NO_ENTRY",
    "After",
    "Apply",
    "Attempt",
    "Begin",
    "ChangeCodecs",
    "Commit",
    "Committed",
    "Completed",
    "Discard",
    "Drop",
    "Entry",
    "Fail",
    "Failed",
    "FellBack",
    "HandOver",
    "Hold",
    "Interruptions",
    "Join",
    "Joined",
    "Lack",
    "Lacking",
    "LeadAction",
    "LeadEvent",
    "LeadState",
    "Leave",
    "Leaving",
    "Ledger",
    "Linked",
    "Links",
    "Load",
    "LoadFailed",
    "Lost",
    "Ready",
    "Restore",
    "Restored",
    "Run",
    "RunStatistics",
    "Saved",
    "SendLeaving",
    "SendReady",
    "SnapshotBooks",
    "SnapshotDue",
    "SnapshotLost",
    "StageAction",
    "StageEvent",
    "StageReport",
    "StageState",
    "Stay",
    "Stop",
    "Suspect",
    "Unlinked",
    "after",
    "lead",
    "stage",
]
