"""The records that peers publish in the directory: frozen values, and the checks of their fields."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NewType

from fusion.swarm.coordinates import DIMENSIONS, LARGEST_ERROR, LARGEST_MS
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import is_peer_id
from fusion.swarm.transport import PeerId

Digest = NewType("Digest", str)  # lower-case hex SHA-256
# The digest of the job's manifest blob: the manifest cannot change under its id
JobId = NewType("JobId", str)
Place = tuple[JobId, int]  # a stage of a job

MAX_TERM = 2**31  # a hostile claim must not be able to use the terms up
MAX_STAGES = 65_536
MAX_STEP = 2**53
MAX_PAIRS = 32  # of one peer's measured links
MAX_MBPS = 1e7
MAX_RTT_MS = 1e5
MAX_GRANTS = 2  # links of one chain
MAX_GRANT_BYTES = 288
MAX_PROOFS = 8  # that a claim carries
MAX_STATEMENTS = 32  # that a job record carries
MAX_SPEEDS, MAX_SPEED = 32, 1e6  # how many, and seconds for one unit of any
MAX_LACKS = 32  # operators that a peer lists
MAX_NAME = 64
MAX_ADDRESSES, MAX_ADDRESS = 12, 256  # of a peer, and characters of each
MAX_PROOF_BYTES = 512  # of one of either


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """Key `peers/<shard>`, one subkey per peer."""

    peer: PeerId
    name: str  # friendly, derived from the peer id ("quiet-otter-3f"): no configuration
    addresses: tuple[str, ...]
    role: Literal["peer", "client"]
    device: str  # "cpu" or "cuda", and what it is
    flops_per_second: float  # lambda * peak, as measured
    memory_bytes: int  # lent in all
    free_memory_bytes: int
    software: str  # version of fusion-peer
    opset: int
    started_at: float  # unix seconds, for show only
    up_mbps: float = 0.0  # the highest rate seen over all links together; 0: not known yet
    down_mbps: float = 0.0
    coordinate: tuple[float, ...] = ()  # of `fusion.swarm.coordinates`, height last; empty: not known yet
    coordinate_error: float = 0.0
    plane: str = ""  # the compute plane; empty: not known
    lacks: tuple[str, ...] = ()  # operators of its op-set that it does not run
    speeds: tuple[float, ...] = ()  # as in `fusion.dag.placement.speeds.Speeds`; empty: not known
    cores: float = 0.0  # of its machine, for each that its stages compute with; 0: not known

    @property
    def idle(self) -> bool:
        """Whether none of its lent memory is in use."""
        return self.free_memory_bytes == self.memory_bytes


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Key `jobs/<shard>`, published by the launcher, then by the lead. Readers keep the newest (`job_order`)."""

    job: JobId
    name: str
    kind: Literal["train", "serve"]
    state: Literal["launching", "running", "done", "stopped", "failed"]
    term: int  # the lead's term; 0 from the launcher
    step: int  # committed step
    lead: PeerId | None  # of a job that has ended: a peer that has its last progress
    stages: int
    snapshot: Digest | None  # blob naming the newest snapshot that all stages hold (runtime.snapshot)
    snapshot_step: int
    message: str = ""  # one line: what it waits for, or why it failed
    author: PeerId
    # Statements of others about the job, which support the record (`fusion.swarm.authority.statements`).
    proof: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """Key `claims/<job>/<stage>`, one subkey per peer."""

    job: JobId
    stage: int
    peer: PeerId
    role: Literal["owner", "replica", "standby", "released"]
    term: int
    score: float  # 1.0 for the peer that the placement proposed, else the peer's own fitness, below 1
    step: int  # replicated or committed step
    load: float  # sessions running there, for routing; of a standby 0 if it owns no stage, else 1
    ready: bool = False  # the stage is loaded and accepts frames
    # The chain that admits the peer to the job (`fusion.swarm.authority.grants`)
    grants: tuple[bytes, ...] = ()
    proof: tuple[
        bytes, ...
    ] = ()  # votes that justify a claim above a live owner's (`fusion.swarm.claims.votes`)
    # Unix seconds, of a claim that was read. Signed as part of the seal, not of the record.
    expires_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, kw_only=True)
class ProviderRecord:
    """Key `providers/<digest>`: this peer holds the whole blob."""

    digest: Digest
    peer: PeerId
    size_bytes: int


class Pair(NamedTuple):
    """The link from a record's author to `peer`."""

    peer: PeerId
    rtt_ms: float  # 0: not measured
    mbps: float  # from us to the peer, as measured there; 0: not measured
    age_seconds: float  # since the rate was last confirmed, or the round trip where there is no rate
    into_mbps: float = 0.0  # from the peer to us, as measured here; 0: not measured


@dataclass(frozen=True, kw_only=True)
class LinkRecord:
    """Key `links/<shard>`, one subkey per peer: its measured links."""

    peer: PeerId
    pairs: tuple[Pair, ...]  # at most MAX_PAIRS


Record = PeerRecord | JobRecord | ClaimRecord | ProviderRecord | LinkRecord


def author_of(record: Record) -> PeerId:
    return record.author if isinstance(record, JobRecord) else record.peer


def check_fields(record: Record) -> None:
    """Raises RecordError naming the first field with an invalid value."""
    for name, check in _CHECKS[type(record)].items():
        if not check(getattr(record, name)):
            raise RecordError(f"a {KIND_OF[type(record)]} record with a bad {name}")


Check = Callable[[object], bool]


def _text(limit: int) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= limit and value.isprintable()


def _whole(limit: int, least: int = 0) -> Check:
    return lambda value: type(value) is int and least <= value <= limit


def _number(limit: float) -> Check:
    return lambda value: type(value) in (int, float) and math.isfinite(value) and 0 <= value <= limit  # type: ignore[arg-type, operator]


def _one_of(*choices: str) -> Check:
    return lambda value: isinstance(value, str) and value in choices


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def is_digest(value: object) -> bool:
    """Whether `value` is the text of a Digest or a JobId."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _bytes(size: int) -> Check:
    return lambda value: isinstance(value, bytes) and len(value) <= size


def _tuple_of(check: Check, most: int) -> Check:
    return lambda value: isinstance(value, tuple) and len(value) <= most and all(map(check, value))


def _coordinate(value: object) -> bool:
    if value == ():
        return True
    if not isinstance(value, tuple) or len(value) != DIMENSIONS + 1:
        return False
    return all(type(part) in (int, float) and abs(part) <= LARGEST_MS for part in value) and value[-1] >= 0


def _pair(value: object) -> bool:
    return (
        isinstance(value, Pair)
        and is_peer_id(value.peer)
        and all(check(part) for check, part in zip(_PAIR_NUMBERS, value[1:], strict=True))
    )


KIND_OF: dict[type, str] = {
    PeerRecord: "peer",
    JobRecord: "job",
    ClaimRecord: "claim",
    ProviderRecord: "provider",
    LinkRecord: "links",
}
_PAIR_NUMBERS = (_number(MAX_RTT_MS), _number(MAX_MBPS), _number(1e9), _number(MAX_MBPS))
_CHECKS: dict[type, dict[str, Check]] = {
    PeerRecord: {
        "peer": is_peer_id,
        "name": _text(64),
        "addresses": _tuple_of(_text(MAX_ADDRESS), MAX_ADDRESSES),
        "role": _one_of("peer", "client"),
        "device": _text(128),
        "flops_per_second": _number(1e21),
        "memory_bytes": _whole(2**53),
        "free_memory_bytes": _whole(2**53),
        "software": _text(64),
        "opset": _whole(2**31),
        "started_at": _number(1e12),
        "up_mbps": _number(MAX_MBPS),
        "down_mbps": _number(MAX_MBPS),
        "coordinate": _coordinate,
        "coordinate_error": _number(LARGEST_ERROR),
        "plane": _text(32),
        "lacks": _tuple_of(_text(MAX_NAME), MAX_LACKS),
        "speeds": _tuple_of(_number(MAX_SPEED), MAX_SPEEDS),  # newer releases may append more
        "cores": _number(1e6),
    },
    JobRecord: {
        "job": is_digest,
        "name": _text(128),
        "kind": _one_of("train", "serve"),
        "state": _one_of("launching", "running", "done", "stopped", "failed"),
        "term": _whole(MAX_TERM),
        "step": _whole(MAX_STEP),
        "lead": _optional(is_peer_id),
        "stages": _whole(MAX_STAGES),
        "snapshot": _optional(is_digest),
        "snapshot_step": _whole(MAX_STEP, least=-1),  # -1 while there is none
        "message": _text(512),
        "author": is_peer_id,
        "proof": _tuple_of(_bytes(MAX_PROOF_BYTES), MAX_STATEMENTS),
    },
    ClaimRecord: {
        "job": is_digest,
        "stage": _whole(MAX_STAGES),
        "peer": is_peer_id,
        "role": _one_of("owner", "replica", "standby", "released"),
        "term": _whole(MAX_TERM),
        "score": _number(1.0),
        "step": _whole(MAX_STEP),
        "load": _number(1e9),
        "ready": _flag,
        "grants": _tuple_of(_bytes(MAX_GRANT_BYTES), MAX_GRANTS),
        "proof": _tuple_of(_bytes(MAX_PROOF_BYTES), MAX_PROOFS),
    },
    ProviderRecord: {"digest": is_digest, "peer": is_peer_id, "size_bytes": _whole(2**53)},
    LinkRecord: {"peer": is_peer_id, "pairs": _tuple_of(_pair, MAX_PAIRS)},
}
