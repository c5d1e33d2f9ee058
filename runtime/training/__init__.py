"""Training jobs: a room for each concern, and the shell that joins them. Knows nothing of how stages are claimed.

data/            which samples a microbatch holds; the ledger of those that were used
step/            the ready/commit/discard protocol, pure
compute/         remote autodiff, what may arrive, codecs
streams/         the streams to the stages that a stage works with
snapshots/       the state at a step, as blobs
lead/            what the owner of the first stage does beside
host             one stage on this peer: its parts, put together, and its life
stage_loop       its loop: message by message, to its part in the steps or to the lead
stage_messages   the way of its control messages: mailbox and outbox
stage_work       its part in the steps, carried out
stall_watch      its eye on a step that stands still
stage_handover   its way to the next owner
stage_source     what a stage is made of, from the swarm
stage_builder    from that and a state to a stage in memory
stage_loader     which stages are in memory, and which on their way
service          training jobs on this peer

Words: a step is one committed update; an attempt, one try at it; a microbatch, a part of its samples; a partner, a stage that a stage
exchanges frames with.
"""
