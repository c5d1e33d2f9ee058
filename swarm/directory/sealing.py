"""Records as signed bytes: sealed by their author, opened and checked by readers and storing nodes.

A sealed record is `msgpack([body, author, expires_at, signature])` where `body = msgpack([version, kind, fields])`
and the Ed25519 signature covers the author, the expiry and the bytes of the body. Newer software may add fields and raise the
version: our fields must all be present and valid (a record of an older release may lack those with a default), others are
ignored, and a node that stores or passes on a record keeps its bytes. The place of a record in the directory (key and
subkey) follows from its content, so the signature also fixes where the record may be stored.

The expiry is also the record's version number: publishers keep it rising and stores keep the record that expires last, so a
replayed older record never displaces a newer one, and expires before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any

import msgpack

from fusion.swarm.directory.api import RECORD_TTL_SECONDS
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import (
    KIND_OF,
    ClaimRecord,
    JobRecord,
    LinkRecord,
    Pair,
    PeerRecord,
    Record,
    author_of,
    check_fields,
)
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Signer, verify
from fusion.swarm.recent import recent

RECORD_VERSION = 5  # 5 added the speeds of operators
# The oldest that is read, so that peers of two releases work together; 2 had no authority fields.
OLDEST_RECORD_VERSION = 3
MAX_RECORD_BYTES = 4096
MAX_TTL_SECONDS = 120.0
MAX_CLAIM_SECONDS = RECORD_TTL_SECONDS  # a claim is a lease: a dead peer must not hold a stage for longer
_REMEMBERED = 4096  # opened records in the cache
CLOCK_TOLERANCE_SECONDS = 5.0  # how far apart two honest peers' clocks may be


@dataclass(frozen=True)
class Sealed:
    """An opened record, the unix time at which it expires, and its sealed bytes."""

    record: Record
    expires_at: float
    data: bytes = b""

    def is_valid(self, now: float) -> bool:
        """Whether its expiry is acceptable at unix time `now`: the clock may have been set back since it was opened."""
        return now < self.expires_at <= latest_expiry(self.record, now)


def seal(record: Record, identity: Signer, expires_at: float) -> bytes:
    """The signed bytes of our own record, valid until `expires_at` (unix seconds).

    Raises RecordError if another peer is the record's author, a field is invalid, or it is too long.
    """
    if author_of(record) != identity.peer_id:
        raise RecordError(
            f"a {KIND_OF[type(record)]} record of {author_of(record)} cannot be signed by {identity.peer_id}"
        )
    body = encode(record)
    expires_at = float(expires_at)
    signature = identity.sign(_signed(body, identity.peer_id, expires_at))
    data: bytes = msgpack.packb([body, identity.peer_id, expires_at, signature])
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(
            f"a {KIND_OF[type(record)]} record of {len(data)} bytes; at most {MAX_RECORD_BYTES}"
        )
    return data


def encode(record: Record) -> bytes:
    """The unsigned body of the record, for readers that need no signature. Raises RecordError as `seal`."""
    check_fields(record)
    values = {field.name: getattr(record, field.name) for field in _SIGNED[type(record)]}
    body: bytes = msgpack.packb([RECORD_VERSION, KIND_OF[type(record)], values])
    return body


def open_record(data: bytes, key: str, subkey: str, now: float) -> Record:
    """The record in `data`, found at (`key`, `subkey`) at unix time `now`. Raises RecordError unless every check
    passes: size, form, version, field values, place, author, expiry, signature."""
    return unseal(data, key, subkey, now).record


def unseal(data: bytes, key: str, subkey: str, now: float) -> Sealed:
    """As `open_record`, with the expiry that the author signed."""
    sealed = unseal_anywhere(data, now)
    if key != key_of(sealed.record) or subkey != subkey_of(sealed.record):
        raise RecordError("the record is stored in a place that is not its own")
    return sealed


def unseal_anywhere(data: bytes, now: float, *, grace_seconds: float = 0.0) -> Sealed:
    """`unseal` for a storing node, which checks the place itself: it knows only the hash of the key. A record that expired
    no longer than `grace_seconds` ago still passes."""
    if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"a record is at most {MAX_RECORD_BYTES} bytes")
    opened = _opened(data)
    if not now - grace_seconds < opened.expires_at <= latest_expiry(opened.record, now):
        raise RecordError("the record has expired or ends too far in the future")
    if not opened.is_signed:
        raise RecordError("the record's signature is not its author's")
    return Sealed(opened.record, opened.expires_at, data)


def longest_ttl(record: Record) -> float:
    """How many seconds ahead a record may expire."""
    return MAX_CLAIM_SECONDS if isinstance(record, ClaimRecord) else MAX_TTL_SECONDS


def latest_expiry(record: Record, now: float) -> float:
    """The latest acceptable expiry of a record at unix time `now`."""
    return now + longest_ttl(record) + CLOCK_TOLERANCE_SECONDS


@dataclass(frozen=True)
class _Opened:
    """The content of a record's bytes; its signature is checked on first use of `is_signed`."""

    record: Record
    body: bytes
    expires_at: float
    signature: bytes

    @cached_property
    def is_signed(self) -> bool:
        author = author_of(self.record)
        return verify(author, self.signature, _signed(self.body, author, self.expires_at))


def _signed(body: bytes, author: str, expires_at: float) -> bytes:
    signed: bytes = msgpack.packb(["fusion-record", author, expires_at, body])
    return signed


# Readers poll: the same bytes arrive again every heartbeat, and decoding them takes as long as checking the signature, 0.1 ms.
@recent(_REMEMBERED)
def _opened(data: bytes) -> _Opened:
    body, author, expires_at, signature = _envelope(data)
    record = decode(body)
    if author != author_of(record):
        raise RecordError("the record speaks for another peer than its author")
    if isinstance(record, ClaimRecord):
        record = replace(record, expires_at=expires_at)
    if isinstance(record, PeerRecord):  # a peer may list only addresses of its own
        own = tuple(each for each in record.addresses if each.endswith(f"/p2p/{record.peer}"))
        record = replace(record, addresses=own)
    return _Opened(record, body, expires_at, signature)


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
    match _unpack(data, "the record"):
        case [bytes() as body, str() as author, float() as expires_at, bytes() as signature]:
            return body, author, expires_at, signature
        case _:
            raise RecordError("the record has not the form of one")


def decode(body: bytes) -> Record:
    """The record that `encode` made into `body`; its author is not verified. Raises RecordError for bytes that are no record."""
    match _unpack(body, "the record's body"):
        case [int() as version, *_] if version < OLDEST_RECORD_VERSION:
            raise RecordError(
                f"record version {version}; this software knows {OLDEST_RECORD_VERSION} and newer"
            )
        case [int() as version, str() as kind, dict() as found, *_] if kind in _CLASS:
            pass
        case _:
            raise RecordError("the record's body has not the form of one")
    made = _CLASS[kind]
    values: dict[str, Any] = {}
    for field in _SIGNED[made]:
        if field.name in found:
            values[field.name] = found[field.name]
        elif version >= RECORD_VERSION or field.default is MISSING:
            raise RecordError(f"a {kind} record without its {field.name}")
    for name, item in _ITEMS.get(made, {}).items():
        if isinstance(values.get(name), list):
            try:
                values[name] = tuple(map(item, values[name]))
            except TypeError:
                raise RecordError(f"a {kind} record with a bad {name}") from None
    record: Record = made(**values)
    check_fields(record)
    return record


# Fields that are lists on the wire, and what their items become.
_ITEMS: dict[type, dict[str, Callable[[Any], Any]]] = {
    PeerRecord: {name: lambda item: item for name in ("addresses", "coordinate", "lacks", "speeds")},
    LinkRecord: {"pairs": lambda item: Pair(*item[: len(Pair._fields)]) if isinstance(item, list) else item},
    JobRecord: {"proof": lambda item: item},
    ClaimRecord: {"grants": lambda item: item, "proof": lambda item: item},
}


_SIGNED = {made: [field for field in fields(made) if field.compare] for made in KIND_OF}
_CLASS: dict[str, Any] = {kind: made for made, kind in KIND_OF.items()}
