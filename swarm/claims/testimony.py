"""Signed words on who holds a stage: a peer says that another, or itself, does not hold it any more, and who is to follow.

A testimony is `msgpack([voter, peer, term, at, signature])`, about 190 bytes. It rides in the `proof` of a claim: job,
stage and successor are the claim's own, so that nobody else can use it. A holder's word on itself is its release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import msgpack

from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import MAX_PROOF_BYTES, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Verify
from fusion.swarm.transport import PeerId

GOOD_SECONDS = 12  # two leases: a word that nobody made use of must not be kept for later
CLOCKS_SECONDS = 5  # how far ahead of ours the voter's clock may be


@dataclass(frozen=True, kw_only=True)
class Testimony:
    voter: PeerId
    holding: Holding  # who does not hold the stage, under which term
    at: int  # unix seconds

    def is_good(self, now: float) -> bool:
        return self.at - CLOCKS_SECONDS <= now <= self.at + GOOD_SECONDS + CLOCKS_SECONDS


def seal_testimony(
    testimony: Testimony, job: JobId, stage: int, heir: PeerId, sign: Callable[[bytes], bytes]
) -> bytes:
    """`sign` signs with the voter's key."""
    holding = testimony.holding
    data: bytes = msgpack.packb(
        [testimony.voter, *holding, testimony.at, sign(_signed(testimony, job, stage, heir))]
    )
    return data


@lru_cache(maxsize=4096)  # claims come back every heartbeat with the same proof
def open_testimony(data: bytes, job: JobId, stage: int, heir: PeerId, verify: Verify) -> Testimony:
    """Raises RecordError for bytes that are no testimony in favour of `heir`, or not its voter's."""
    if not isinstance(data, bytes) or len(data) > MAX_PROOF_BYTES:
        raise RecordError(f"a testimony has at most {MAX_PROOF_BYTES} bytes")
    try:
        value = msgpack.unpackb(
            data, max_str_len=128, max_bin_len=64, max_array_len=5, max_map_len=0, max_ext_len=0
        )
    except (ValueError, msgpack.UnpackException, RecursionError):
        raise RecordError("a testimony is not msgpack") from None
    match value:
        case [str(voter), str(peer), int(term), int(at), bytes(signature)]:
            testimony = Testimony(voter=PeerId(voter), holding=Holding(PeerId(peer), term), at=at)
        case _:
            raise RecordError("the testimony has not the form of one")
    if not verify(voter, signature, _signed(testimony, job, stage, heir)):
        raise RecordError("the testimony's signature is not its voter's")
    return testimony


def _signed(testimony: Testimony, job: JobId, stage: int, heir: PeerId) -> bytes:
    fields = ["fusion-testimony", job, stage, *testimony.holding, heir, testimony.voter, testimony.at]
    signed: bytes = msgpack.packb(fields)
    return signed
