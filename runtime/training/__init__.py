"""Training jobs: a room for each concern, and the shell that joins them. Knows nothing of how stages are claimed.

data/            which samples a microbatch holds; the ledger of those that were used
step/            the ready/commit/discard protocol, pure
compute/         remote autodiff, tensors in, codecs
streams/         the streams to the partner stages
snapshots/       the state at a step, as blobs
lead/            what the owner of the first stage does for the whole job
host             one stage on this peer: assembled and run
stage_loop       its event loop
stage_messages   its control messages: mailbox and outbox
stage_work       its part in the steps, carried out
stall_watch      detects a stalled step
stage_handover   hands it to the next owner
stage_source     the parts of a stage, from the swarm
stage_builder    builds a stage in memory from its parts and a state
stage_loader     loads stages, and those of standbys ahead of time
service          training jobs on this peer

Terms: a step is one committed update; an attempt, one try at it; a microbatch, a part of its samples; a partner, a stage that a stage
exchanges frames with.
"""
