"""Revoked grants: an issuer signs the list of peers whose grants in a job are void. Pure.

Of each issuer the newest list counts, for the grants that it issued and those delegated from them. All peers that know a list carry
it in their job records, so that it outlives the command that made it.

`msgpack([1, job, issuer, at, [mark, ...], signature])`; the mark of a peer is the beginning of its id's SHA-256, so that a
list has room beside the statements of a record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fusion.swarm.authority.signed import MAX_TIME, VERSION, SignedForm
from fusion.swarm.directory.records import MAX_PROOF_BYTES, JobId, is_digest
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Signer, Verify
from fusion.swarm.identity import verify as verify_signature
from fusion.swarm.recent import recent
from fusion.swarm.transport import PeerId

MARK_BYTES = 12
MAX_REVOKED = 20  # peers on one list
FORM = SignedForm(name="revocation", signer="issuer", max_bytes=MAX_PROOF_BYTES, max_items=MAX_REVOKED)


@dataclass(frozen=True, kw_only=True)
class Revocation:
    job: JobId
    issuer: PeerId
    at: int  # unix seconds
    marks: frozenset[bytes]
    data: bytes  # as it was signed

    def covers(self, peer: PeerId) -> bool:
        return mark(peer) in self.marks


def mark(peer: PeerId) -> bytes:
    return hashlib.sha256(peer.encode()).digest()[:MARK_BYTES]


def seal_revocation(job: JobId, marks: Iterable[bytes], at: float, issuer: Signer) -> bytes:
    """The list, signed by `issuer` at unix time `at`. RecordError for more than MAX_REVOKED marks."""
    listed = sorted(set(marks))
    if len(listed) > MAX_REVOKED:
        raise RecordError(
            f"at most {MAX_REVOKED} peers can be revoked in one job: let its grants expire sooner"
        )
    return FORM.seal([VERSION, bytes.fromhex(job), issuer.peer_id, int(at), listed], issuer.sign)


def open_revocation(data: bytes, verify: Verify = verify_signature) -> Revocation:
    """Raises RecordError for bytes that are none, Forged for those that their issuer did not sign."""
    revocation, fields, signature = _read(data)
    FORM.check(revocation.issuer, signature, fields, verify)
    return revocation


def parse_unverified(data: bytes) -> Revocation:
    """The list, its signature not verified. Raises RecordError."""
    return _read(data)[0]


def lists_in(proof: Iterable[bytes]) -> frozenset[bytes]:
    """The items that have the form of a list, their signatures not verified."""
    found = set()
    for data in proof:
        with suppress(RecordError):
            found.add(parse_unverified(data).data)
    return frozenset(found)


@recent(1024)  # records come back every heartbeat with the same ones
def _read(data: bytes) -> tuple[Revocation, list[Any], bytes]:
    match value := FORM.unpack(data):
        case [int(version), bytes(job), str(issuer), int(at), list(marks), bytes(signature)] if (
            version == VERSION
        ):
            pass
        case _:
            raise FORM.malformed()
    sound = all(isinstance(item, bytes) and len(item) == MARK_BYTES for item in marks)
    if not sound or not is_digest(job.hex()) or not 0 <= at <= MAX_TIME:
        raise FORM.malformed()
    revocation = Revocation(
        job=JobId(job.hex()), issuer=PeerId(issuer), at=at, marks=frozenset(marks), data=data
    )
    return revocation, value[:-1], signature


def newer(one: Revocation, other: Revocation | None) -> bool:
    """Whether `one` replaces `other` of the same issuer; both may have been signed in one second."""
    return other is None or (one.at, len(one.marks), one.data) > (other.at, len(other.marks), other.data)
