"""Signed words on who holds a stage: a peer says that another, or itself, does not hold it any more, and who is to follow.

A testimony is `msgpack([voter, peer, term, at, signature])`, about 190 bytes. It rides in the `proof` of a claim: job,
stage and successor are the claim's own, so that nobody else can use it. A holder's word on itself is its release.

A succession is a testimony with its stage and successor, `msgpack([stage, heir, voter, peer, term, at, signature])`, about 250
bytes, that outlives the claim: it rides in the `proof` of job records, where it shows those who come later that `heir` did
not come to the job by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from fusion.swarm.authority.signed import SignedForm
from fusion.swarm.claims.tenure import WORD_SECONDS, Holding
from fusion.swarm.directory.records import MAX_PROOF_BYTES, ClaimRecord, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Verify
from fusion.swarm.recent import recent
from fusion.swarm.transport import PeerId

CLOCKS_SECONDS = 5  # how far ahead of ours the voter's clock may be
FORM = SignedForm(name="testimony", signer="voter", max_bytes=MAX_PROOF_BYTES, max_items=5, max_text=128)
SUCCESSION = replace(FORM, max_items=7)


@dataclass(frozen=True, kw_only=True)
class Testimony:
    voter: PeerId
    holding: Holding  # who does not hold the stage, under which term
    at: int  # unix seconds

    def is_good(self, now: float) -> bool:
        return self.at - CLOCKS_SECONDS <= now <= self.at + WORD_SECONDS + CLOCKS_SECONDS


def seal_testimony(
    testimony: Testimony, job: JobId, stage: int, heir: PeerId, sign: Callable[[bytes], bytes]
) -> bytes:
    """`sign` signs with the voter's key."""
    fields = [testimony.voter, *testimony.holding, testimony.at]
    return FORM.seal(fields, sign, _signed(testimony, job, stage, heir))


def open_testimony(data: bytes, job: JobId, stage: int, heir: PeerId, verify: Verify) -> Testimony:
    """Raises RecordError for bytes that are no testimony, Forged where its voter did not give it in favour of `heir`."""
    testimony, signature = _read(data)
    FORM.check(testimony.voter, signature, _signed(testimony, job, stage, heir), verify)
    return testimony


def told(data: bytes) -> Testimony:
    """What it is said to be, whoever may have signed it. Raises RecordError."""
    return _read(data)[0]


@recent(4096)  # claims come back every heartbeat with the same proof
def _read(data: bytes) -> tuple[Testimony, bytes]:
    match FORM.unpack(data):
        case [str(voter), str(peer), int(term), int(at), bytes(signature)]:
            return Testimony(voter=PeerId(voter), holding=Holding(PeerId(peer), term), at=at), signature
        case _:
            raise FORM.malformed()


@dataclass(frozen=True, kw_only=True)
class Succession:
    """`testimony` says that `heir` is to follow in the stage of a job; `data` is what shows it."""

    stage: int
    heir: PeerId
    testimony: Testimony
    data: bytes

    @property
    def voter(self) -> PeerId:
        return self.testimony.voter


def successions(claim: ClaimRecord) -> list[bytes]:
    """One for each testimony in the claim's proof."""
    found = []
    for data in claim.proof:
        with suppress(RecordError):
            said, signature = _read(data)
            fields = [claim.stage, claim.peer, said.voter, *said.holding, said.at, signature]
            found.append(msgpack.packb(fields))
    return found


def told_succession(data: bytes) -> Succession:
    """What it is said to be, whoever may have signed it. Raises RecordError."""
    return _read_succession(data)[0]


def check_succession(data: bytes, job: JobId, verify: Verify) -> None:
    """Raises RecordError for bytes that are no succession, Forged where its voter did not sign it for that job."""
    said, signature = _read_succession(data)
    signed = _signed(said.testimony, job, said.stage, said.heir)
    SUCCESSION.check(said.voter, signature, signed, verify)


@recent(4096)  # job records come back every heartbeat with the same ones
def _read_succession(data: bytes) -> tuple[Succession, bytes]:
    match SUCCESSION.unpack(data):
        case [int(stage), str(heir), str(voter), str(peer), int(term), int(at), bytes(signature)]:
            testimony = Testimony(voter=PeerId(voter), holding=Holding(PeerId(peer), term), at=at)
            return Succession(stage=stage, heir=PeerId(heir), testimony=testimony, data=data), signature
        case _:
            raise SUCCESSION.malformed()


def _signed(testimony: Testimony, job: JobId, stage: int, heir: PeerId) -> list[Any]:
    return [job, stage, *testimony.holding, heir, testimony.voter, testimony.at]
