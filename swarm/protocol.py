"""The declaration of a protocol, and the swarm's own protocols; `fusion.runtime.job.protocol` has the others, and the list of all.

Both sides open and serve a protocol by its declaration here. docs/protocols.md describes its frames, and a test compares its table
with these lists. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion.swarm.transport import UNASKED_BYTES

MAX_TRAIN_BYTES = 2 << 20
MAX_INDEX_BYTES = 8 << 20  # of a blob of 256 GiB
# To and from a command: the largest are a model's input and output arrays.
MAX_PASSED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class WireProtocol:
    name: str  # as libp2p negotiates it; the last part is the version
    about: str  # one line
    # The largest payload of one frame that the serving side accepts; None: as in the job's plan.
    payload_bytes: int | None = UNASKED_BYTES
    # And the largest that the opening side accepts: the dialled peer may be a stranger.
    answer_bytes: int = UNASKED_BYTES
    # How long a stream may be without a frame of either side, in seconds: then the serving side hangs up. (For the first frame, see
    # `fusion.swarm.streams.handlers.FIRST_FRAME_SECONDS`.)
    idle_seconds: float
    stripes: int = 1  # the libp2p streams that one of these uses (`fusion.swarm.streams.striping`)


BLOB = WireProtocol(
    name="/fusion/blob/1",
    about="chunks of a blob, from its holders",
    answer_bytes=MAX_INDEX_BYTES,
    idle_seconds=120.0,
)
PROBE = WireProtocol(
    name="/fusion/probe/1",
    about="measurements of the link between two peers: pings, trains of bytes, reports",
    payload_bytes=MAX_TRAIN_BYTES,
    idle_seconds=120.0,  # idle neighbours are pinged every few seconds
)
DIRECTORY = WireProtocol(
    name="/fusion/directory/1",
    about="the records of the directory, for clients that take no part in the DHT",
    answer_bytes=2 << 20,  # the records under a key, and what msgpack adds
    idle_seconds=60.0,
)
CONTROL = WireProtocol(
    name="/fusion/control/1",
    about="commands of this user to the running peer of this machine, over a Unix socket: its streams, its directory",
    idle_seconds=6 * 3600.0,  # a command may watch a job that waits for a peer
    payload_bytes=MAX_PASSED_BYTES,
    answer_bytes=MAX_PASSED_BYTES,
)

SWARM_PROTOCOLS = (BLOB, PROBE, DIRECTORY, CONTROL)
