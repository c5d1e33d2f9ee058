"""How hivemind writes the values of a key that has subkeys, read with caps: it comes from strangers.

A value is msgpack extension 0x50 around `[maxsize, latest_expiration, [[subkey, bytes, expiration], ...]]`. Only
subkeys and bytes are taken: what a record is worth stands in the signed bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack

from fusion.swarm.directory.sealing import MAX_RECORD_BYTES
from fusion.swarm.errors import RecordError

MAX_SUBKEYS = 1024  # under one key; more would not fit into one answer
MAX_SUBKEY_CHARACTERS = 160  # a peer id, a slash and a job id
_MAX_VALUE_BYTES = 4 << 20
_DICTIONARY = 0x50


def key_id(key: str) -> int:
    """Where in the 160-bit space a key lies: hivemind's `DHTID.generate(source=key)`."""
    return int.from_bytes(hashlib.sha1(msgpack.packb(key), usedforsecurity=False).digest(), "big")


def parse_values(data: bytes) -> dict[str, bytes]:
    """The sealed records by subkey. Entries of another form are left out; ValueError where the whole is not one."""
    if len(data) > _MAX_VALUE_BYTES:
        raise ValueError(f"a value of {len(data)} bytes; at most {_MAX_VALUE_BYTES}")
    outer = _unpack(data)
    if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY:
        raise ValueError("not a value with subkeys")
    match _unpack(outer.data):
        case [_, _, list() as items] if len(items) <= 2 * MAX_SUBKEYS:
            return {
                item[0]: item[1]
                for item in items
                if isinstance(item, list)
                and len(item) == 3
                and isinstance(item[0], str)
                and isinstance(item[1], bytes)
                and len(item[1]) <= MAX_RECORD_BYTES
            }
        case _:
            raise ValueError("not a value with subkeys")


def parse_subkey(data: bytes) -> str:
    """The subkey under which a record is to be stored. Raises RecordError for anything but a short text."""
    try:
        subkey = msgpack.unpackb(data, max_str_len=MAX_SUBKEY_CHARACTERS, max_bin_len=0, max_ext_len=0)
    except (ValueError, RecursionError) as error:
        raise RecordError("the subkey is not msgpack") from error
    if not isinstance(subkey, str):
        raise RecordError("a record without a subkey")
    return subkey


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(
        data,
        strict_map_key=True,
        max_str_len=MAX_SUBKEY_CHARACTERS,
        max_bin_len=_MAX_VALUE_BYTES,
        max_array_len=4 * MAX_SUBKEYS,
        max_map_len=0,
        max_ext_len=_MAX_VALUE_BYTES,
    )
