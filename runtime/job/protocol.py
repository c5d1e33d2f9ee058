"""Every protocol that peers speak, by name and cap: servers and callers take them from here. Pure.

Their frames: docs/protocols.md.
"""

from __future__ import annotations

from fusion.swarm.protocol import SWARM_PROTOCOLS, WireProtocol

MAX_PROMPT_BYTES = 8 << 20  # a million token ids, or that many characters and more
MAX_SOURCE_BYTES = MAX_PROMPT_BYTES // 2  # of an encoder-decoder's source, which is sent with a prompt

MAX_RUN_BYTES = 64 << 20  # of arrays: the inputs of a model, what a stage sends on, and the outputs
MAX_LOGITS_BYTES = 64 << 20  # of the largest vocabulary that a manifest may have, in float32

STAGE = WireProtocol(
    name="/fusion/stage/3",
    about="training: tensors, and the messages of the step protocol, between the stages of a job",
    payload_bytes=None,
    idle_seconds=6 * 3600.0,  # a step may take long, and a job may wait for a peer; only owners get as far
    stripes=4,  # activations one way, gradients the other, at once
)
RING = WireProtocol(
    name="/fusion/ring/1",
    about="serving: sessions between a gateway and the stages, activations and tokens between the stages",
    payload_bytes=None,
    answer_bytes=MAX_LOGITS_BYTES,
    idle_seconds=3600.0,  # of a gateway or a stage with nothing to send; sessions have their own shares
)
GENERATE = WireProtocol(
    name="/fusion/generate/1",
    about="one prompt to a gateway, and the tokens of the answer",
    payload_bytes=MAX_PROMPT_BYTES,
    answer_bytes=MAX_LOGITS_BYTES,
    idle_seconds=600.0,  # a token may wait for a stage to be taken over
)
# The frames of /1, for requests with settings that the release before would ignore; a peer that does not serve it is passed over
# for another.
GENERATE_MORE = WireProtocol(
    name="/fusion/generate/2",
    about="the same, with settings that peers of the previous release do not support",
    payload_bytes=GENERATE.payload_bytes,
    answer_bytes=GENERATE.answer_bytes,
    idle_seconds=GENERATE.idle_seconds,
)
RUN = WireProtocol(
    name="/fusion/run/1",
    about="serving: named arrays to and from a model that answers in one run",
    payload_bytes=MAX_RUN_BYTES,
    answer_bytes=MAX_RUN_BYTES,
    idle_seconds=600.0,  # a stage may have to be taken over
)
JOB = WireProtocol(
    name="/fusion/job/1",
    about="launches, watches and stops a job, revokes grants, announces a snapshot",
    idle_seconds=3600.0,  # between two steps that a watcher sees
)
SAVE_SECONDS = 600.0  # for the last snapshot of a job that is to stop
HOLD = WireProtocol(
    name="/fusion/hold/2",
    about="who holds a stage: takeover from an owner that is gone, handover from one that leaves",
    idle_seconds=60.0,
)
STATUS = WireProtocol(
    name="/fusion/status/1", about="the status of a peer, beyond its record", idle_seconds=60.0
)

PROTOCOLS = (STAGE, RING, GENERATE, GENERATE_MORE, RUN, JOB, HOLD, STATUS, *SWARM_PROTOCOLS)

# For how long a stream of each may be idle where it is served, by name.
IDLE_SECONDS = {protocol.name: protocol.idle_seconds for protocol in PROTOCOLS}
# The largest payload that the opener of a stream of each accepts, by name.
ANSWER_BYTES = {protocol.name: protocol.answer_bytes for protocol in PROTOCOLS}
