"""Records to publish in tests, and hostile variants of them."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from fusion.swarm.directory import records, sealing
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import (
    ClaimRecord,
    Digest,
    JobId,
    JobRecord,
    LinkRecord,
    Pair,
    PeerRecord,
    ProviderRecord,
    Record,
    author_of,
)
from fusion.swarm.directory.sealing import MAX_RECORD_BYTES, OLDEST_RECORD_VERSION, RECORD_VERSION, seal
from fusion.swarm.identity import Identity, friendly_name


def digest(text: str) -> Digest:
    return Digest(hashlib.sha256(text.encode()).hexdigest())


JOB = JobId(digest("job"))


def peer_record(identity: Identity, **changes: Any) -> PeerRecord:
    record = PeerRecord(
        peer=identity.peer_id,
        name=friendly_name(identity.peer_id),
        addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{identity.peer_id}",),
        role="peer",
        device="cpu",
        flops_per_second=5e10,
        memory_bytes=4 << 30,
        free_memory_bytes=3 << 30,
        software="0.1.0",
        opset=1,
        started_at=1_000_000.5,
    )
    return dataclasses.replace(record, **changes)


def job_record(identity: Identity, **changes: Any) -> JobRecord:
    record = JobRecord(
        job=JOB,
        name="tiny",
        kind="train",
        state="running",
        term=1,
        step=10,
        lead=identity.peer_id,
        stages=3,
        snapshot=None,
        snapshot_step=0,
        author=identity.peer_id,
    )
    return dataclasses.replace(record, **changes)


def claim_record(identity: Identity, **changes: Any) -> ClaimRecord:
    record = ClaimRecord(
        job=JOB, stage=0, peer=identity.peer_id, role="owner", term=1, score=1.0, step=0, load=0.0
    )
    return dataclasses.replace(record, **changes)


def provider_record(identity: Identity, **changes: Any) -> ProviderRecord:
    record = ProviderRecord(digest=digest("blob"), peer=identity.peer_id, size_bytes=123)
    return dataclasses.replace(record, **changes)


def link_record(identity: Identity, **changes: Any) -> LinkRecord:
    record = LinkRecord(
        peer=identity.peer_id,
        pairs=(Pair(identity.peer_id, 12.5, 93.0, 2.0), Pair(identity.peer_id, 0.4, 0.0, 1.0)),
    )
    return dataclasses.replace(record, **changes)


def raw_seal(record: Record, identity: Identity, expires_at: float, **changes: Any) -> bytes:
    """A sealed record without the publisher's own checks, as a hostile peer can sign it."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    values |= changes.pop("values", {})
    kind = changes.pop("kind", records.KIND_OF[type(record)])
    version = changes.pop("version", RECORD_VERSION)
    author = changes.pop("author", author_of(record))
    body = changes.pop("body", msgpack.packb([version, kind, values]))
    assert not changes
    signature = identity.sign(sealing._signed(body, author, expires_at))
    data: bytes = msgpack.packb([body, author, expires_at, signature])
    return data


ALICE, BOB, MALLORY = Identity.generate(), Identity.generate(), Identity.generate()


@dataclass
class Offer:
    """A record that is offered to a storing node; `what` says what is wrong with it."""

    what: str
    key: str
    subkey: str
    data: bytes
    expires_at: float


def hostile_offers(now: float) -> list[Offer]:
    """Offers that a node must drop, all about ALICE or by MALLORY, who has a key of her own."""
    alices, mallorys = claim_record(ALICE, score=0.5), claim_record(MALLORY)
    key, soon = key_of(alices), now + 6

    def offer(what: str, data: bytes, subkey: str = MALLORY.peer_id, **changes: object) -> Offer:
        return replace(Offer(what, key, subkey, data, soon), **changes)  # type: ignore[arg-type]

    valid = seal(mallorys, MALLORY, soon)
    return [
        offer("forged", raw_seal(alices, MALLORY, soon), ALICE.peer_id),
        offer("author not the speaker", raw_seal(alices, MALLORY, soon, author=MALLORY.peer_id)),
        offer("another's subkey", valid, ALICE.peer_id),
        offer("another stage", valid, key=key_of(replace(mallorys, stage=1))),
        offer("another kind of key", valid, key=key_of(peer_record(MALLORY))),
        offer("expired", seal(mallorys, MALLORY, now - 30), expires_at=now - 30),
        offer("too far in the future", seal(mallorys, MALLORY, now + 9999), expires_at=now + 9999),
        offer("oversized", raw_seal(mallorys, MALLORY, soon, values={"role": "x" * MAX_RECORD_BYTES})),
        offer("lower version", raw_seal(mallorys, MALLORY, soon, version=OLDEST_RECORD_VERSION - 1)),
        offer("unknown kind", raw_seal(mallorys, MALLORY, soon, kind="king")),
        offer("bad field", raw_seal(mallorys, MALLORY, soon, values={"score": 7.0})),
        offer("unsigned", msgpack.packb([*msgpack.unpackb(valid)[:3], b""])),
        offer("garbage", b"\xc1garbage"),
        offer("empty", b""),
        offer("deep", b"\x91" * 4000),
    ]


def good_offer(record: Record, author: Identity, now: float) -> Offer:
    return Offer("good", key_of(record), subkey_of(record), seal(record, author, now + 6), now + 6)
