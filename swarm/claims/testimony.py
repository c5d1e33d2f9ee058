"""Signed words on who holds a stage: a peer says that another, or itself, does not hold it any more, and who is to follow.

A testimony is `msgpack([voter, peer, term, at, signature])`, about 190 bytes. It rides in the `proof` of a claim: job,
stage and successor are the claim's own, so that nobody else can use it. A holder's word on itself is its release.

A succession is a testimony with its stage and successor, `msgpack([stage, heir, voter, peer, term, at, signature])`, about 250
bytes, that outlives the claim: it rides in the `proof` of job records, where it shows those who come later that `heir` did
not come to the job by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgpack

from fusion.swarm.authority.signed import SignedForm
from fusion.swarm.claims.tenure import WORD_SECONDS, Holding
from fusion.swarm.directory.records import MAX_PROOF_BYTES, ClaimRecord, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Verify
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


@lru_cache(maxsize=4096)  # claims come back every heartbeat with the same proof
def open_testimony(data: bytes, job: JobId, stage: int, heir: PeerId, verify: Verify) -> Testimony:
    """Raises RecordError for bytes that are no testimony in favour of `heir`, or not its voter's."""
    match FORM.unpack(data):
        case [str(voter), str(peer), int(term), int(at), bytes(signature)]:
            testimony = Testimony(voter=PeerId(voter), holding=Holding(PeerId(peer), term), at=at)
        case _:
            raise FORM.malformed()
    FORM.check(testimony.voter, signature, _signed(testimony, job, stage, heir), verify)
    return testimony


@dataclass(frozen=True, kw_only=True)
class Succession:
    """`voter` has said that `heir` is to follow in a stage of a job; `data` is what shows it."""

    voter: PeerId
    heir: PeerId
    data: bytes


def successions(claim: ClaimRecord) -> list[bytes]:
    """One for each testimony in the claim's proof."""
    found = []
    for data in claim.proof:
        with suppress(RecordError):
            match FORM.unpack(data):
                case [str(), str(), int(), int(), bytes()] as fields:
                    found.append(msgpack.packb([claim.stage, claim.peer, *fields]))
    return found


@lru_cache(maxsize=4096)  # job records come back every heartbeat with the same ones
def open_succession(data: bytes, job: JobId, verify: Verify) -> Succession:
    """Raises RecordError for bytes that are no succession in a stage of the job, or not its voter's."""
    match SUCCESSION.unpack(data):
        case [int(stage), str(heir), str(voter), str(peer), int(term), int(at), bytes(signature)]:
            testimony = Testimony(voter=PeerId(voter), holding=Holding(PeerId(peer), term), at=at)
        case _:
            raise SUCCESSION.malformed()
    SUCCESSION.check(testimony.voter, signature, _signed(testimony, job, stage, PeerId(heir)), verify)
    return Succession(voter=testimony.voter, heir=PeerId(heir), data=data)


def opened_successions(proof: Iterable[bytes], job: JobId, verify: Verify) -> list[Succession]:
    """The sound ones in `proof`; what is none is left out."""
    found = []
    for data in proof:
        with suppress(RecordError):
            found.append(open_succession(data, job, verify))
    return found


def _signed(testimony: Testimony, job: JobId, stage: int, heir: PeerId) -> list[Any]:
    return [job, stage, *testimony.holding, heir, testimony.voter, testimony.at]
