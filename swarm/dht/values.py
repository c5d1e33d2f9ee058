"""hivemind's encoding of the values of a key with subkeys, decoded with caps since it comes from strangers.

A value is msgpack extension 0x50 around `[maxsize, latest_expiration, [[subkey, bytes, expiration], ...]]`. Only subkeys
and bytes are used: the signed bytes have all else. Items are decoded one by one, without nested containers, so that memory
is bounded by the bytes received; hivemind's own decoder would follow nested extensions until the stack overflows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import msgpack

from fusion.swarm.directory.sealing import MAX_RECORD_BYTES
from fusion.swarm.errors import RecordError
from fusion.swarm.transport import PeerId

MAX_SUBKEYS = 1024  # under one key
MAX_SUBKEY_CHARACTERS = 160  # a peer id, a slash and a job id
ID_BYTES = 20
_MAX_VALUE_BYTES = 2 << 20
_DICTIONARY = 0x50


def key_id(key: str) -> int:
    """The 160-bit id of a key: hivemind's `DHTID.generate(source=key)`."""
    return int.from_bytes(hashlib.sha1(msgpack.packb(key), usedforsecurity=False).digest(), "big")


@lru_cache(maxsize=4096)
def node_id(peer: PeerId) -> int:
    """The id of a peer's node, derived from the peer id, so that nobody can choose it freely (S/Kademlia, Baumgart and Mies 2007,
    section 4.1)."""
    return key_id(peer)


def pack_values(items: Iterable[tuple[str, bytes, float]]) -> bytes:
    """Encode (subkey, sealed record, expiry in unix seconds) as the value of their key."""
    listed = list(items)
    latest = max((until for *_, until in listed), default=float("-inf"))
    value: bytes = msgpack.packb(msgpack.ExtType(_DICTIONARY, msgpack.packb([float("inf"), latest, listed])))
    return value


def parse_values(data: bytes) -> dict[str, bytes]:
    """The sealed records by subkey. Entries of another form are skipped; decoding stops at the first malformed entry and after
    MAX_SUBKEYS. Raises ValueError where `data` is no value."""
    if len(data) > _MAX_VALUE_BYTES:
        raise ValueError(f"a value of {len(data)} bytes; at most {_MAX_VALUE_BYTES}")
    caps = {"max_array_len": 0, "max_map_len": 0, "max_str_len": MAX_SUBKEY_CHARACTERS}
    outer = msgpack.unpackb(data, max_bin_len=0, max_ext_len=_MAX_VALUE_BYTES, **caps)
    if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY:
        raise ValueError("not a value with subkeys")
    items = msgpack.Unpacker(max_bin_len=len(data), max_ext_len=0, max_buffer_size=len(data), **caps)
    items.feed(outer.data)
    found: dict[str, bytes] = {}
    try:
        if items.read_array_header() != 3:
            raise ValueError("not a value with subkeys")
        items.skip(), items.skip()
        count = items.read_array_header()
    except msgpack.OutOfData as error:
        raise ValueError("half a value") from error
    try:
        for _ in range(min(count, MAX_SUBKEYS)):
            if items.read_array_header() != 3:
                break
            subkey, record, _ = items.unpack(), items.unpack(), items.unpack()
            if isinstance(subkey, str) and isinstance(record, bytes) and len(record) <= MAX_RECORD_BYTES:
                found[subkey] = record
    except (ValueError, msgpack.UnpackException, RecursionError):
        pass  # the entries before it are valid
    return found


def parse_subkey(data: bytes) -> str:
    """The decoded subkey of an offer. Raises RecordError for anything but a short text."""
    if len(data) > MAX_SUBKEY_CHARACTERS + 5:
        raise RecordError("a subkey that is too long")
    try:
        subkey = msgpack.unpackb(
            data,
            max_str_len=MAX_SUBKEY_CHARACTERS,
            max_bin_len=0,
            max_array_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RecordError("the subkey is not msgpack") from error
    if not isinstance(subkey, str):
        raise RecordError("a record without a subkey")
    return subkey
