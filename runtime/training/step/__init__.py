"""The protocol of a step, as two pure state machines: no I/O, no clock, no tensors.

messages         what goes over the wire: what the machines take in and give out
events           what happens at one peer alone, and what the machines decide for it
stage            every stage's side
attendance       who is here: which stages have joined, and whom each is linked to
snapshot_books   which snapshots there are to go back to, and whether one is due
lead             the lead's side: what it is told, and commits
lead_state       what it knows
gathering        who is here, and when a step begins or everybody goes back
dismissal        what it does about a stage that fails
faults           what failed at which owner, and whether it is the job's own fault
stalls           whether a step stands still, and with whom
history          which state a stage has: a digest of what it applied
checkpoint       what everybody can go back to
handover_state   what a leaving owner gives to the next
run_statistics   losses, recoveries, steps discarded and replayed

Words: an attempt is (term of the lead, counter); ready, commit, discard, restore; a checkpoint names a snapshot.

The table: who says what when, and why it is exact.

    lead (`lead`)                                every stage (`stage`), the lead's own too
    ------------------                           ----------------------------------------------
    has `join` of every stage, in one state <-   join      linked to its partners, state of step s
    begin (attempt, s)                      ->   runs its microbatches of step s
                                            <-   ready     gradients of step s are complete, squared norm
    commit (s, rate, clip), all ready       ->   applies them: step s + 1, which begins at once
    discard, when a stage or a link is lost ->   drops gradients; state is still that of step s
    restore (checkpoint)                    ->   joined in unlike states: everybody back to the newest snapshot
    finish                                  ->   the last snapshot is held; the job has ended

A stage whose owner leaves is handed over at a boundary, and no step is lost:

                                            <-   leaving   hand my stage over
    commit (.., hold), or hold when idle    ->   applies, begins nothing; the leaving owner stores its state and goes
    has `join` of the new owner at s + 1    <-   join      the new owner, and whoever had to link to it
    begin (attempt, s + 1)                  ->

Nothing is applied before commit, so a failed step costs one step. An attempt is (term of the lead, counter): a
higher one always wins, and what belongs to a lower one is dropped wherever it arrives. A join id is (term of a stage's
owner, its incarnation, counter), and orders its joins. So a message that arrives twice, or late, changes nothing.

Each machine is `step(state, event) -> (state, actions)`. What it takes in or gives out is a message where it goes over
the wire, packed as it is, and an event where it does not. The shells are `fusion.runtime.training.lead.lead` and
`fusion.runtime.training.stage_work`.
"""
