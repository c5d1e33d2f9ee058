from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.directory_records import (
    JOB,
    claim_record,
    digest,
    job_record,
    link_record,
    peer_record,
    provider_record,
    raw_seal,
)
from support.examples import examples

from fusion.swarm.directory import sealing
from fusion.swarm.directory.keys import SHARDS, key_of, shard, subkey_of
from fusion.swarm.directory.records import (
    KIND_OF,
    MAX_GRANTS,
    MAX_PAIRS,
    MAX_PROOF_BYTES,
    MAX_STATEMENTS,
    MAX_TERM,
    Pair,
    Record,
)
from fusion.swarm.directory.sealing import (
    CLOCK_TOLERANCE_SECONDS,
    MAX_CLAIM_SECONDS,
    MAX_RECORD_BYTES,
    MAX_TTL_SECONDS,
    OLDEST_RECORD_VERSION,
    RECORD_VERSION,
    open_record,
    seal,
    unseal,
)
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity
from fusion.swarm.printable import one_line

NOW = 1_700_000_000.0
ALICE, MALLORY = Identity.generate(), Identity.generate()
RECORDS = [
    peer_record(ALICE),
    job_record(ALICE),
    claim_record(ALICE),
    provider_record(ALICE),
    link_record(ALICE),
]


def opened(data: bytes, record: Record, now: float = NOW) -> Record:
    return open_record(data, key_of(record), subkey_of(record), now)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_sealed_record_opens_to_itself(record: Record) -> None:
    data = seal(record, ALICE, NOW + 6)
    assert opened(data, record) == record
    assert unseal(data, key_of(record), subkey_of(record), NOW).expires_at == NOW + 6
    assert len(data) < 1024


@given(
    stage=st.integers(0, 65_536),
    term=st.integers(0, MAX_TERM),
    score=st.floats(0, 1),
    step=st.integers(0, 2**53),
    load=st.floats(0, 1e9),
    ready=st.booleans(),
    role=st.sampled_from(["owner", "standby", "released"]),
)
@settings(max_examples=examples(40))
def test_any_claim_survives_the_wire(**fields: Any) -> None:
    record = claim_record(ALICE, **fields)
    assert opened(seal(record, ALICE, NOW + 6), record) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_the_same_bytes_are_looked_through_once(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    data, looked = seal(record, ALICE, NOW + 5.5), []
    decode = sealing.decode
    monkeypatch.setattr(sealing, "decode", lambda body: (looked.append(body), decode(body))[1])
    for _ in range(3):
        assert opened(data, record) == record
    assert len(looked) == 1
    with pytest.raises(RecordError, match="expired"):
        opened(data, record, NOW + 6)
    with pytest.raises(RecordError, match="place"):
        open_record(data, key_of(record), "elsewhere", NOW)
    assert len(looked) == 1


@given(st.binary(max_size=200))
@settings(max_examples=examples(200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        opened(data, RECORDS[0])


@given(st.data())
@settings(max_examples=examples(100))
def test_no_bit_can_be_changed(data: st.DataObject) -> None:
    record = RECORDS[1]
    sealed = bytearray(seal(record, ALICE, NOW + 6))
    at = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[at // 8] ^= 1 << (at % 8)
    with pytest.raises(RecordError):
        opened(bytes(sealed), record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_only_the_author_can_sign(record: Record) -> None:
    with pytest.raises(RecordError, match="cannot be signed"):
        seal(record, MALLORY, NOW + 6)
    with pytest.raises(RecordError, match="signature"):  # another's name, one's own key
        opened(raw_seal(record, MALLORY, NOW + 6), record)
    with pytest.raises(RecordError, match="another peer"):  # one's own name on another's record
        opened(raw_seal(record, MALLORY, NOW + 6, author=MALLORY.peer_id), record)


def test_a_signature_fixes_the_expiry() -> None:
    body, author, _, signature = msgpack.unpackb(seal(RECORDS[0], ALICE, NOW + 6))
    with pytest.raises(RecordError, match="signature"):
        opened(msgpack.packb([body, author, NOW + 60, signature]), RECORDS[0])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_belongs_in_one_place(record: Record) -> None:
    data = seal(record, ALICE, NOW + 6)
    other_shard = f"peers/{(shard(ALICE.peer_id) + 1) % SHARDS}"
    for key, subkey in [
        (other_shard, subkey_of(record)),
        (key_of(record) + "0", subkey_of(record)),
        (key_of(record), MALLORY.peer_id),
        (key_of(record), ""),
    ]:
        with pytest.raises(RecordError, match="place"):
            open_record(data, key, subkey, NOW)


def test_time_bounds_a_record() -> None:
    record = RECORDS[0]
    data = seal(record, ALICE, NOW + 6)
    assert opened(data, record, NOW + 5.99) == record
    for now in (NOW + 6, NOW + 7, NOW + 1e6):
        with pytest.raises(RecordError, match="expired"):
            opened(data, record, now)
    longest = MAX_TTL_SECONDS + CLOCK_TOLERANCE_SECONDS
    assert opened(seal(record, ALICE, NOW + longest), record) == record
    for expires_at in (NOW + longest + 1, math.inf, math.nan):
        with pytest.raises(RecordError, match="expired"):
            opened(seal(record, ALICE, expires_at), record)


@pytest.mark.parametrize("version", [0, OLDEST_RECORD_VERSION - 1, -1])
def test_a_lower_version_is_refused(version: int) -> None:
    with pytest.raises(RecordError, match="version"):
        opened(raw_seal(RECORDS[0], ALICE, NOW + 6, version=version), RECORDS[0])


@pytest.mark.parametrize("version", [RECORD_VERSION + 1, 255])
@pytest.mark.parametrize("record", RECORDS)
def test_newer_software_may_say_more_but_not_less(version: int, record: Record) -> None:
    more = raw_seal(
        record, ALICE, NOW + 6, version=version, values={"mood": "sunny", "more": [1, {"a": b"b"}]}
    )
    assert opened(more, record) == record
    values = {
        field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.compare
    }
    for name in values:
        body = msgpack.packb([version, KIND_OF[type(record)], {k: v for k, v in values.items() if k != name}])
        with pytest.raises(RecordError, match=f"without its {name}"):
            opened(raw_seal(record, ALICE, NOW + 6, body=body), record)


def test_the_next_release_reads_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a field more, which has a default."""
    ours = raw_seal(RECORDS[0], ALICE, NOW + 6)
    values = {f.name: getattr(RECORDS[0], f.name) for f in dataclasses.fields(RECORDS[0])}
    assert values.pop("up_mbps") == 0.0, "a field of the newest release, missing before"
    body = msgpack.packb([RECORD_VERSION, "peer", values])
    with pytest.raises(RecordError, match="without its up_mbps"):
        opened(raw_seal(RECORDS[0], ALICE, NOW + 6, body=body), RECORDS[0])
    monkeypatch.setattr(sealing, "RECORD_VERSION", RECORD_VERSION + 1)
    assert opened(ours, RECORDS[0]) == RECORDS[0]
    assert opened(raw_seal(RECORDS[0], ALICE, NOW + 6, body=body), RECORDS[0]) == RECORDS[0]
    del values["opset"]  # which has none
    body = msgpack.packb([RECORD_VERSION, "peer", values])
    with pytest.raises(RecordError, match="without its opset"):
        opened(raw_seal(RECORDS[0], ALICE, NOW + 6, body=body), RECORDS[0])


def test_a_claim_is_a_lease() -> None:
    claim = claim_record(ALICE)
    longest = MAX_CLAIM_SECONDS + CLOCK_TOLERANCE_SECONDS
    assert opened(seal(claim, ALICE, NOW + longest), claim) == claim
    with pytest.raises(RecordError, match="too far"):
        opened(seal(claim, ALICE, NOW + longest + 1), claim)


def test_of_a_peers_addresses_those_that_are_anothers_are_ignored() -> None:
    own = f"/ip4/192.0.2.1/tcp/1/p2p/{ALICE.peer_id}"
    relayed = f"/ip4/192.0.2.2/tcp/1/p2p/{MALLORY.peer_id}/p2p-circuit/p2p/{ALICE.peer_id}"
    others = (f"/ip4/192.0.2.3/tcp/1/p2p/{MALLORY.peer_id}", "/ip4/192.0.2.4/tcp/1", "")
    record = peer_record(ALICE, addresses=(others[0], own, *others[1:], relayed))
    data = seal(record, ALICE, NOW + 6)
    assert open_record(data, key_of(record), subkey_of(record), NOW) == dataclasses.replace(
        record, addresses=(own, relayed)
    )


def test_an_oversized_record_is_refused() -> None:
    addresses = tuple(f"/dns/{'x' * 240}{i}/tcp/1" for i in range(12))
    with pytest.raises(RecordError):
        seal(peer_record(ALICE, addresses=addresses + addresses), ALICE, NOW + 6)
    big = raw_seal(RECORDS[0], ALICE, NOW + 6, values={"name": "x" * MAX_RECORD_BYTES})
    with pytest.raises(RecordError, match="at most"):
        opened(big, RECORDS[0])


@pytest.mark.parametrize(
    ("record", "values"),
    [
        (claim_record(ALICE), {"term": -1}),
        (claim_record(ALICE), {"term": MAX_TERM + 1}),
        (claim_record(ALICE), {"term": 1.0}),
        (claim_record(ALICE), {"term": True}),
        (claim_record(ALICE), {"score": math.nan}),
        (claim_record(ALICE), {"score": 1.5}),
        (claim_record(ALICE), {"load": math.inf}),
        (claim_record(ALICE), {"role": "king"}),
        (claim_record(ALICE), {"ready": 1}),
        (claim_record(ALICE), {"stage": None}),
        (claim_record(ALICE), {"job": "../../etc"}),
        (peer_record(ALICE), {"addresses": "not a list"}),
        (peer_record(ALICE), {"addresses": [1]}),
        (peer_record(ALICE), {"name": "two\nlines"}),
        (job_record(ALICE), {"lead": "somebody"}),
        (job_record(ALICE), {"snapshot": "0" * 63}),
        (job_record(ALICE), {"state": ["running"]}),
        (job_record(ALICE), {"proof": (b"x" * (MAX_PROOF_BYTES + 1),)}),
        (job_record(ALICE), {"proof": (b"x",) * (MAX_STATEMENTS + 1)}),
        (claim_record(ALICE), {"grants": (b"x",) * (MAX_GRANTS + 1)}),
        (claim_record(ALICE), {"grants": ("text",)}),
        (claim_record(ALICE), {"proof": 5}),
        (provider_record(ALICE), {"size_bytes": 2**60}),
        (peer_record(ALICE), {"up_mbps": -1.0}),
        (peer_record(ALICE), {"coordinate": (0.0, 1.0)}),
        (peer_record(ALICE), {"coordinate": (0.0, math.nan, 1.0)}),
        (peer_record(ALICE), {"coordinate": (0.0, 0.0, -1.0)}),
        (peer_record(ALICE), {"coordinate_error": 99.0}),
        (peer_record(ALICE), {"plane": "x" * 33}),
        (peer_record(ALICE), {"plane": 1}),
        (peer_record(ALICE), {"lacks": "aten.add"}),
        (peer_record(ALICE), {"lacks": ("aten.add",) * 33}),
        (peer_record(ALICE), {"lacks": ("x" * 65,)}),
        (peer_record(ALICE), {"lacks": (1,)}),
        (peer_record(ALICE), {"speeds": 1e-9}),
        (peer_record(ALICE), {"speeds": (-1e-9,)}),
        (peer_record(ALICE), {"speeds": (math.nan,)}),
        (peer_record(ALICE), {"speeds": (1e-9,) * 33}),
        (peer_record(ALICE), {"speeds": ("fast",)}),
        (peer_record(ALICE), {"cores": -1.0}),
        (link_record(ALICE), {"pairs": ((ALICE.peer_id, 1.0, 1.0),)}),
        (link_record(ALICE), {"pairs": ((ALICE.peer_id, math.inf, 1.0, 1.0),)}),
        (link_record(ALICE), {"pairs": ((1, 1.0, 1.0, 1.0),)}),
        (link_record(ALICE), {"pairs": (5,)}),
        (link_record(ALICE), {"pairs": {"a": 1}}),
    ],
)
def test_a_bad_field_is_refused(record: Record, values: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        opened(raw_seal(record, ALICE, NOW + 6, values=values), record)
    if "addresses" not in values:
        with pytest.raises(RecordError, match="bad"):
            seal(dataclasses.replace(record, **values), ALICE, NOW + 6)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x91" * 2000,
        msgpack.packb([1]),
        msgpack.packb([RECORD_VERSION, "peer", []]),
        msgpack.packb([RECORD_VERSION, "king", {}]),
        msgpack.packb([RECORD_VERSION, "claim", {"job": JOB}]),
        msgpack.packb([RECORD_VERSION, "claim", {1: 2}]),
        msgpack.packb([RECORD_VERSION, ["claim"], {}]),
        msgpack.packb([RECORD_VERSION, "links", {"peer": ALICE.peer_id, "pairs": [{}]}]),
        msgpack.packb(msgpack.ExtType(5, b"x")),
    ],
    ids=lambda body: f"{len(body)} bytes",  # the same in every process: a peer id is new in each
)
def test_a_signed_body_of_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(RecordError):
        opened(raw_seal(RECORDS[2], ALICE, NOW + 6, body=body), RECORDS[2])


def test_a_record_of_links_has_room_for_what_is_allowed_and_no_more() -> None:
    pair = Pair(ALICE.peer_id, 12.345678, 93.456789, 1.23456789)
    full = link_record(ALICE, pairs=(pair,) * MAX_PAIRS)
    assert opened(seal(full, ALICE, NOW + 6), full) == full
    with pytest.raises(RecordError, match="bad pairs"):
        seal(link_record(ALICE, pairs=(pair,) * (MAX_PAIRS + 1)), ALICE, NOW + 6)


def test_keys_are_sharded() -> None:
    keys = {key_of(job_record(ALICE, job=digest(str(i)))) for i in range(300)}
    assert keys == {f"jobs/{i}" for i in range(SHARDS)}


def test_one_line_is_what_a_message_may_be() -> None:
    message = one_line("out of\nmemory\x00 " + "x" * 1000)
    assert message.startswith("out of memory ") and len(message) == 300
    seal(job_record(ALICE, message=message), ALICE, NOW + 6)
