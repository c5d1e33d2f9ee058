"""The protocol of a step, as two pure state machines: no I/O, no clock, no tensors.

messages         inputs and outputs of the machines that go over the wire
events           those that stay within one peer
stage            every stage's side
attendance       which stages have joined, and which owners each is linked to
snapshot_state   which snapshots can be restored, and whether one is due
lead             the lead's side, and commits
lead_state       its state
gathering        joins and losses: when a step begins, or a snapshot is restored
dismissal        what it does about a stage that fails or stalls
faults           what failed at which owner, and whether the job fails for it
stalls           whether a step has stalled, and at which owner
history          the version of a state: a hash chain over what was applied
checkpoint       a snapshot that all stages can restore
handover_state   what a leaving owner hands to the next
run_statistics   losses, recoveries, steps discarded and replayed

Terms: an attempt is (term of the lead, counter); ready, commit, discard, restore; a checkpoint names a snapshot.

The protocol: who sends what when, and why it is exact.

    lead (`lead`)                                every stage (`stage`), the lead's own too
    ------------------                           ----------------------------------------------
    has `join` of every stage, in one state <-   join      linked to its partners, state of step s
    begin (attempt, s)                      ->   runs its microbatches of step s
                                            <-   ready     gradients of step s are complete, squared norm
    commit (s, rate, clip), all ready       ->   applies them: step s + 1, which begins at once
    discard, when a stage or a link is lost ->   drops gradients; state is still that of step s
    restore (checkpoint)                    ->   joined in unlike states: all load the newest snapshot
    finish                                  ->   the last snapshot is held; the job has ended

A stage whose owner leaves is handed over at a boundary, and no step is lost:

                                            <-   leaving   hand my stage over
    commit (.., hold), or hold when idle    ->   applies, begins nothing; the leaving owner stores its state and leaves
    has `join` of the new owner at s + 1    <-   join      the new owner, and the stages that had to link to it
    begin (attempt, s + 1)                  ->

Nothing is applied before commit, so a failed step costs one step. An attempt is (term of the lead, counter): a
higher one always wins, and what belongs to a lower one is dropped wherever it arrives. A join id is (term of a stage's
owner, its incarnation, counter), and orders its joins. So a message that arrives twice, or late, changes nothing.

Each machine is `step(state, event) -> (state, actions)`; events and actions are messages where they go over the wire. The
shells are `fusion.runtime.training.lead.lead` and
`fusion.runtime.training.stage_work`.
"""
