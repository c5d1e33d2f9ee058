"""hivemind's values, read from strangers."""

from __future__ import annotations

import time

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st
from support.directory_records import ALICE, JOB
from support.examples import examples

from fusion.swarm.dht.values import (
    MAX_SUBKEY_CHARACTERS,
    MAX_SUBKEYS,
    key_id,
    node_id,
    pack_values,
    parse_subkey,
    parse_values,
)
from fusion.swarm.directory.sealing import MAX_RECORD_BYTES
from fusion.swarm.errors import RecordError


def test_keys_and_nodes_lie_where_hivemind_puts_them() -> None:
    for key in ("peers/0", f"claims/{JOB}/65536", "ключ"):
        assert key_id(key) == int(DHTID.generate(source=key))
    assert node_id(ALICE.peer_id) == int(DHTID.generate(source=ALICE.peer_id))


def test_hivemind_s_values_are_read() -> None:
    value = DictionaryDHTValue()
    for subkey, data in [("a", b"1"), (b"bytes", b"2"), ("long", b"x" * (MAX_RECORD_BYTES + 1)), ("b", b"3")]:
        value.store(subkey, data, time.time() + 60)
    value.store("number", 7, time.time() + 60)
    assert parse_values(MSGPackSerializer.dumps(value)) == {"a": b"1", "b": b"3"}


@given(st.dictionaries(st.text("abc/1", max_size=160), st.binary(max_size=50), max_size=20))
def test_ours_are_read_by_hivemind_and_by_us(values: dict[str, bytes]) -> None:
    packed = pack_values((subkey, data, 1e12) for subkey, data in values.items())
    assert parse_values(packed) == values
    theirs = MSGPackSerializer.loads(packed)
    assert {subkey: item.value for subkey, item in theirs.items()} == values


def dictionary(items: object) -> bytes:
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([None, 0.0, items])))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "bad",
    [
        7,
        [],
        ["x"],
        {"a": 1},
        ["c", [[]] * 5, 1],
        ["c", {}, 1],
        ["c", msgpack.ExtType(0x40, b"\x90"), 1],
        ["x" * 200, b"", 1],
    ],
)
def test_a_bad_item_hides_none_before_it(bad: object) -> None:
    assert parse_values(dictionary([["a", b"1", 0.0], bad, ["b", b"2", 0.0]])) in (
        {"a": b"1"},
        {"a": b"1", "b": b"2"},
    )


def test_too_many_items_are_as_many_as_there_may_be() -> None:
    assert len(parse_values(dictionary([[str(n), b"", 0.0] for n in range(3 * MAX_SUBKEYS)]))) == MAX_SUBKEYS


def test_containers_in_containers_are_not_built() -> None:
    """Four million empty lists would take a hundred times the room that they came in."""
    rows = b"\xdc\x10\x00" + b"\x90" * 4096
    data = b"\x93\xc0\x00\xdc\x01\x00" + rows * 256
    assert parse_values(msgpack.packb(msgpack.ExtType(0x50, data))) == {}


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=examples(100))
def test_garbage_for_a_value_is_refused(data: bytes, wrapped: bool) -> None:
    with pytest.raises(ValueError):
        parse_values(msgpack.packb(msgpack.ExtType(0x50, data)) if wrapped else data)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        msgpack.packb(None),
        msgpack.packb(b"bytes"),
        msgpack.packb(["a"]),
        msgpack.packb(msgpack.ExtType(0x40, b"\x90")),
        msgpack.packb("x" * (MAX_SUBKEY_CHARACTERS + 1)),
        b"\x91" * 100_000,
    ],
)
def test_a_subkey_is_a_short_text(bad: bytes) -> None:
    with pytest.raises(RecordError):
        parse_subkey(bad)
    assert parse_subkey(msgpack.packb("peer/job")) == "peer/job"
