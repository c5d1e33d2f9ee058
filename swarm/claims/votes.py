"""Signed votes on who holds a stage: the voter states that a peer (or the voter itself) no longer holds it, and who is to follow.

A vote is `msgpack([voter, peer, term, at, signature])`, about 190 bytes. A claim carries it in its `proof`; the signature also
covers the claim's job, stage and peer (the successor), so that no other claim can use it. A holder's vote against itself is its
release.

A succession is a vote with its stage and successor, `msgpack([stage, successor, voter, peer, term, at, signature])`, about 250
bytes. It outlives the claim: job records carry it in their `proof`, to show later readers who voted `successor` into the job.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from fusion.swarm.authority.signed import SignedForm
from fusion.swarm.claims.tenure import VOTE_SECONDS, Holding
from fusion.swarm.directory.records import MAX_PROOF_BYTES, ClaimRecord, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Verify
from fusion.swarm.recent import recent
from fusion.swarm.transport import PeerId

CLOCKS_SECONDS = 5  # by which the voter's clock may differ from ours
FORM = SignedForm(name="testimony", signer="voter", max_bytes=MAX_PROOF_BYTES, max_items=5, max_text=128)
SUCCESSION = replace(FORM, max_items=7)


@dataclass(frozen=True, kw_only=True)
class Vote:
    voter: PeerId
    holding: Holding  # the holder, and its term, that the vote is against
    at: int  # unix seconds

    def is_valid(self, now: float) -> bool:
        return self.at - CLOCKS_SECONDS <= now <= self.at + VOTE_SECONDS + CLOCKS_SECONDS


def seal_vote(vote: Vote, job: JobId, stage: int, successor: PeerId, sign: Callable[[bytes], bytes]) -> bytes:
    """The signed vote, in favour of `successor`; `sign` signs with the voter's key."""
    fields = [vote.voter, *vote.holding, vote.at]
    return FORM.seal(fields, sign, _signed(vote, job, stage, successor))


def open_vote(data: bytes, job: JobId, stage: int, successor: PeerId, verify: Verify) -> Vote:
    """Raises RecordError for bytes that are no vote, Forged where its voter did not sign it for that stage and `successor`."""
    vote, signature = _read(data)
    FORM.check(vote.voter, signature, _signed(vote, job, stage, successor), verify)
    return vote


def parse_vote(data: bytes) -> Vote:
    """The vote, its signature not verified. Raises RecordError."""
    return _read(data)[0]


@recent(4096)  # claims arrive again every heartbeat with the same proof
def _read(data: bytes) -> tuple[Vote, bytes]:
    match FORM.unpack(data):
        case [str(voter), str(peer), int(term), int(at), bytes(signature)]:
            return Vote(voter=PeerId(voter), holding=Holding(PeerId(peer), term), at=at), signature
        case _:
            raise FORM.malformed()


@dataclass(frozen=True, kw_only=True)
class Succession:
    """`vote` makes `successor` follow in the stage of a job; `data` is the signed form."""

    stage: int
    successor: PeerId
    vote: Vote
    data: bytes

    @property
    def voter(self) -> PeerId:
        return self.vote.voter


def successions(claim: ClaimRecord) -> list[bytes]:
    """The succession that each vote in the claim's proof amounts to."""
    found = []
    for data in claim.proof:
        with suppress(RecordError):
            vote, signature = _read(data)
            fields = [claim.stage, claim.peer, vote.voter, *vote.holding, vote.at, signature]
            found.append(msgpack.packb(fields))
    return found


def parse_succession(data: bytes) -> Succession:
    """The succession, its signature not verified. Raises RecordError."""
    return _read_succession(data)[0]


def check_succession(data: bytes, job: JobId, verify: Verify) -> None:
    """Raises RecordError for bytes that are no succession, Forged where its voter did not sign it for that job."""
    succession, signature = _read_succession(data)
    signed = _signed(succession.vote, job, succession.stage, succession.successor)
    SUCCESSION.check(succession.voter, signature, signed, verify)


@recent(4096)  # job records arrive again every heartbeat with the same ones
def _read_succession(data: bytes) -> tuple[Succession, bytes]:
    match SUCCESSION.unpack(data):
        case [int(stage), str(successor), str(voter), str(peer), int(term), int(at), bytes(signature)]:
            vote = Vote(voter=PeerId(voter), holding=Holding(PeerId(peer), term), at=at)
            return Succession(stage=stage, successor=PeerId(successor), vote=vote, data=data), signature
        case _:
            raise SUCCESSION.malformed()


def _signed(vote: Vote, job: JobId, stage: int, successor: PeerId) -> list[Any]:
    return [job, stage, *vote.holding, successor, vote.voter, vote.at]
