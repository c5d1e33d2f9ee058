"""What peers publish about themselves in the directory: frozen values, signed by their author.

A sealed record is `msgpack([body, author, expires_at, signature])` where `body = msgpack([version, kind, fields])`
and the Ed25519 signature covers the version, the author, the expiry and the body. The place of a record in the
directory (key and subkey) follows from its content, so a signature also fixes where the record may be stored.

The expiry is the record's version too: publishers keep it rising, stores keep the record that expires last, so a
replayed older record never displaces a newer one, and is itself gone before the newer one is.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NewType, Protocol

import msgpack

from fusion.swarm.coordinates import DIMENSIONS, LARGEST_ERROR, LARGEST_MS
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import is_peer_id, verify
from fusion.swarm.transport import PeerId

Digest = NewType("Digest", str)  # lower-case hex SHA-256
JobId = NewType(
    "JobId", str
)  # the digest of the job's manifest blob: the manifest cannot change under its id

RECORD_VERSION = 2
SHARDS = 16  # keys over which the peers, and the jobs, of the whole swarm are spread
MAX_RECORD_BYTES = 4096
MAX_TTL_SECONDS = 120.0
CLOCK_TOLERANCE_SECONDS = 5.0  # how far apart two honest peers' clocks may be
MAX_TERM = 2**31  # a hostile claim must not be able to use the terms up
MAX_STAGES = 65_536
MAX_PAIRS = 32  # of one peer's measured links
MAX_MBPS = 1e7
MAX_RTT_MS = 1e5


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """Key `peers/<shard>`, one subkey per peer."""

    peer: PeerId
    name: str  # friendly, derived from the peer id ("quiet-otter-3f"): no configuration
    addresses: tuple[str, ...]
    role: Literal["peer", "client"]
    device: str  # "cpu" or "cuda", and what it is
    flops_per_second: float  # lambda * peak, measured at start
    memory_bytes: int  # what the volunteer lends, in all
    free_memory_bytes: int
    software: str  # version of fusion-peer
    opset: int
    started_at: float  # unix seconds, for show only
    up_mbps: float = 0.0  # the most that went out over all links together; 0: not known yet
    down_mbps: float = 0.0
    coordinate: tuple[float, ...] = ()  # of `fusion.swarm.coordinates`, height last; empty: not known yet
    coordinate_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Key `jobs/<shard>`, published by the launcher, then by the lead. Readers keep the highest (step, term)."""

    job: JobId
    name: str
    kind: Literal["train", "serve"]
    state: Literal["launching", "running", "done", "stopped", "failed"]
    term: int  # the lead's term; 0 from the launcher
    step: int  # committed step
    lead: PeerId | None
    stages: int
    snapshot: Digest | None  # blob naming the newest snapshot that all stages hold (runtime.snapshot)
    snapshot_step: int
    message: str = ""  # one line: what it waits for, or why it failed
    author: PeerId


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """Key `claims/<job>/<stage>`, one subkey per peer."""

    job: JobId
    stage: int
    peer: PeerId
    role: Literal["owner", "replica", "standby", "released"]
    term: int
    score: float  # proposed by the placement: 1.0, else a peer's own fitness below 1
    step: int  # replicated or committed step
    load: float  # sessions that run there, for routes; of a standby 0 if it owns no stage, else 1
    ready: bool = False  # the stage is loaded and takes frames


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
    mbps: float  # of what we send, as the peer sees it arrive; 0: not measured
    age_seconds: float  # since the rate was last borne out, or the round trip where there is no rate


@dataclass(frozen=True, kw_only=True)
class LinkRecord:
    """Key `links/<shard>`, one subkey per peer: what it has measured of its links."""

    peer: PeerId
    pairs: tuple[Pair, ...]  # at most MAX_PAIRS


Record = PeerRecord | JobRecord | ClaimRecord | ProviderRecord | LinkRecord


class Signer(Protocol):
    """The part of `fusion.swarm.identity.Identity` that sealing needs."""

    peer_id: PeerId

    def sign(self, data: bytes) -> bytes: ...


@dataclass(frozen=True)
class Sealed:
    """An opened record and the unix time at which it ends."""

    record: Record
    expires_at: float


def seal(record: Record, identity: Signer, expires_at: float) -> bytes:
    """The signed bytes of our own record, good until `expires_at` (unix seconds).

    Raises RecordError if the record is somebody else's, a field is not what its type allows, or it is too long.
    """
    if author_of(record) != identity.peer_id:
        raise RecordError(
            f"a {_KIND[type(record)]} record of {author_of(record)} cannot be signed by {identity.peer_id}"
        )
    check_fields(record)
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    body = msgpack.packb([RECORD_VERSION, _KIND[type(record)], values])
    expires_at = float(expires_at)
    signature = identity.sign(_signed(body, identity.peer_id, expires_at))
    data: bytes = msgpack.packb([body, identity.peer_id, expires_at, signature])
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"a {_KIND[type(record)]} record of {len(data)} bytes; at most {MAX_RECORD_BYTES}")
    return data


def open_record(data: bytes, key: str, subkey: str, now: float) -> Record:
    """The record in `data`, found at (`key`, `subkey`) at unix time `now`. Raises RecordError unless every check
    passes: size, form, version, field values, place, author, expiry, signature."""
    return unseal(data, key, subkey, now).record


def unseal(data: bytes, key: str, subkey: str, now: float) -> Sealed:
    """`open_record`, with the expiry that the author signed."""
    sealed = unseal_anywhere(data, now)
    if key != key_of(sealed.record) or subkey != subkey_of(sealed.record):
        raise RecordError("the record is stored in a place that is not its own")
    return sealed


def unseal_anywhere(data: bytes, now: float) -> Sealed:
    """`unseal` for a storing node, which checks the place itself: it knows only the hash of the key."""
    body, author, expires_at, signature = _envelope(data)
    record = _decode_body(body)
    if author != author_of(record):
        raise RecordError("the record speaks for another peer than its author")
    if not now < expires_at <= now + MAX_TTL_SECONDS + CLOCK_TOLERANCE_SECONDS:
        raise RecordError("the record has expired or ends too far in the future")
    if not _verified(author, signature, _signed(body, author, expires_at)):
        raise RecordError("the record's signature is not its author's")
    return Sealed(record, expires_at)


def author_of(record: Record) -> PeerId:
    return record.author if isinstance(record, JobRecord) else record.peer


def key_of(record: Record) -> str:
    """Where the directory keeps the record. Jobs and peers are spread over SHARDS keys by hash."""
    match record:
        case PeerRecord():
            return peers_key(shard(record.peer))
        case JobRecord():
            return jobs_key(shard(record.job))
        case ClaimRecord():
            return claims_key(record.job, record.stage)
        case ProviderRecord():
            return providers_key(record.digest)
        case LinkRecord():
            return links_key(shard(record.peer))


def subkey_of(record: Record) -> str:
    """One slot per author under a key; a job's records share their key with other jobs', hence the longer form."""
    return f"{record.author}/{record.job}" if isinstance(record, JobRecord) else record.peer


def one_line(text: str, limit: int = 300) -> str:
    """`text` as a record may carry it in `message`: printable, on one line, cut at `limit` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shard(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0] % SHARDS


def peers_key(shard: int) -> str:
    return f"peers/{shard}"


def jobs_key(shard: int) -> str:
    return f"jobs/{shard}"


def claims_key(job: JobId, stage: int) -> str:
    return f"claims/{job}/{stage}"


def links_key(shard: int) -> str:
    return f"links/{shard}"


def providers_key(digest: Digest) -> str:
    return f"providers/{digest}"


def _signed(body: bytes, author: str, expires_at: float) -> bytes:
    signed: bytes = msgpack.packb(["fusion-record", RECORD_VERSION, author, expires_at, body])
    return signed


# Readers poll: the same bytes come back every heartbeat, and a signature check costs about 0.1 ms.
@lru_cache(maxsize=4096)
def _verified(author: str, signature: bytes, signed: bytes) -> bool:
    return verify(author, signature, signed)


def _unpack(data: bytes, what: str) -> Any:
    try:
        return msgpack.unpackb(
            data,
            strict_map_key=True,
            max_str_len=1024,
            max_bin_len=MAX_RECORD_BYTES,
            max_array_len=32,
            max_map_len=32,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RecordError(f"{what} is not msgpack: {type(error).__name__}") from None


def _envelope(data: bytes) -> tuple[bytes, str, float, bytes]:
    if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"a record is at most {MAX_RECORD_BYTES} bytes")
    match _unpack(data, "the record"):
        case [bytes() as body, str() as author, float() as expires_at, bytes() as signature]:
            return body, author, expires_at, signature
        case _:
            raise RecordError("the record has not the form of one")


def _decode_body(body: bytes) -> Record:
    match _unpack(body, "the record's body"):
        case [int() as version, *_] if version != RECORD_VERSION:
            raise RecordError(f"record version {version}; this software knows {RECORD_VERSION}")
        case [_, str() as kind, dict() as values] if kind in _CLASS:
            pass
        case _:
            raise RecordError("the record's body has not the form of one")
    made = _CLASS[kind]
    if set(values) != {field.name for field in fields(made)}:
        raise RecordError(f"a {kind} record with fields missing or unknown")
    for name, item in _ITEMS.get(made, {}).items():
        if isinstance(values[name], list):
            try:
                values[name] = tuple(map(item, values[name]))
            except TypeError:
                raise RecordError(f"a {kind} record with a bad {name}") from None
    record: Record = made(**values)
    check_fields(record)
    return record


def check_fields(record: Record) -> None:
    """Raises RecordError naming the first field whose value no record may carry."""
    for name, check in _CHECKS[type(record)].items():
        if not check(getattr(record, name)):
            raise RecordError(f"a {_KIND[type(record)]} record with a bad {name}")


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


def _addresses(value: object) -> bool:
    one = _text(256)
    return isinstance(value, tuple) and len(value) <= 12 and all(one(item) for item in value)


def _coordinate(value: object) -> bool:
    if value == ():
        return True
    if not isinstance(value, tuple) or len(value) != DIMENSIONS + 1:
        return False
    return all(type(part) in (int, float) and abs(part) <= LARGEST_MS for part in value) and value[-1] >= 0


def _pairs(value: object) -> bool:
    numbers = (_number(MAX_RTT_MS), _number(MAX_MBPS), _number(1e9))
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_PAIRS
        and all(
            isinstance(pair, Pair)
            and is_peer_id(pair.peer)
            and all(check(part) for check, part in zip(numbers, pair[1:], strict=True))
            for pair in value
        )
    )


# Fields that are lists on the wire, and what their items become.
_ITEMS: dict[type, dict[str, Callable[[Any], Any]]] = {
    PeerRecord: {"addresses": lambda item: item, "coordinate": lambda item: item},
    LinkRecord: {"pairs": lambda item: Pair(*item)},
}
_KIND: dict[type, str] = {
    PeerRecord: "peer",
    JobRecord: "job",
    ClaimRecord: "claim",
    ProviderRecord: "provider",
    LinkRecord: "links",
}
_CLASS: dict[str, Any] = {kind: made for made, kind in _KIND.items()}
_CHECKS: dict[type, dict[str, Check]] = {
    PeerRecord: {
        "peer": is_peer_id,
        "name": _text(64),
        "addresses": _addresses,
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
    },
    JobRecord: {
        "job": is_digest,
        "name": _text(128),
        "kind": _one_of("train", "serve"),
        "state": _one_of("launching", "running", "done", "stopped", "failed"),
        "term": _whole(MAX_TERM),
        "step": _whole(2**53),
        "lead": _optional(is_peer_id),
        "stages": _whole(MAX_STAGES),
        "snapshot": _optional(is_digest),
        "snapshot_step": _whole(2**53, least=-1),  # -1 while there is none
        "message": _text(512),
        "author": is_peer_id,
    },
    ClaimRecord: {
        "job": is_digest,
        "stage": _whole(MAX_STAGES),
        "peer": is_peer_id,
        "role": _one_of("owner", "replica", "standby", "released"),
        "term": _whole(MAX_TERM),
        "score": _number(1.0),
        "step": _whole(2**53),
        "load": _number(1e9),
        "ready": _flag,
    },
    ProviderRecord: {"digest": is_digest, "peer": is_peer_id, "size_bytes": _whole(2**53)},
    LinkRecord: {"peer": is_peer_id, "pairs": _pairs},
}
