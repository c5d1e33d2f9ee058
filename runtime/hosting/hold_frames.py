"""The frames of `/fusion/hold/2`, about who holds a stage.

suspect {job, stage, peer, term, yours, word} -> owner {claim} | alive {term} | frozen {} | no {message}
holds   {job, stage}             -> holds {term}, 0 where the stage is not held
gone    {job, stage, peer, term} -> gone {word}, the vote, empty where the voter sees the holder; from the successor
take    {job, stage, term, handover, word} -> taking {claim} | no {message}; from the stage's owner, who leaves
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fusion.swarm.claims.leases import Leases
from fusion.swarm.directory.records import ClaimRecord, JobId, Place
from fusion.swarm.errors import RecordError
from fusion.swarm.transport import PeerId


@dataclass(frozen=True)
class SuspectReply:
    """To a report. `claim` and `sealed` where there is a new owner."""

    kind: Literal["owner", "alive", "frozen", "no"]
    term: int = 0
    claim: ClaimRecord | None = None
    sealed: bytes = b""
    message: str = ""

    @property
    def settles(self) -> bool:
        """Whether the report need not go to other standbys."""
        return self.kind != "no"

    def header(self) -> dict[str, Any]:
        if self.kind == "owner":
            return {"claim": self.sealed}
        if self.kind == "alive":
            return {"term": self.term}
        return {"message": self.message} if self.message else {}


def refused(message: str) -> SuspectReply:
    return SuspectReply("no", message=message)


def place_of(header: Mapping[str, Any]) -> Place:
    return JobId(str(header.get("job", ""))[:64]), whole(header.get("stage"))


def peer_of(header: Mapping[str, Any]) -> PeerId:
    return PeerId(str(header.get("peer", ""))[:128])


def whole(value: object) -> int:
    """Raises ValueError for anything but a stage or a term."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"a stage or a term is a number below 2**31, not {value!r:.20}")
    return value


def credited(leases: Leases, place: Place, data: bytes) -> ClaimRecord:
    """The claim of the stage's owner, as another peer sent it sealed. Raises RecordError for any other claim, of another stage,
    too."""
    claim = leases.accept_claim(data)
    if (claim.job, claim.stage) != place:
        raise RecordError(f"a claim of stage {claim.stage} of job {claim.job[:12]} in place of another")
    return claim


def claim_bytes(value: object) -> bytes:
    """A sealed claim or vote. Raises ValueError for anything but bytes."""
    if not isinstance(value, bytes):
        raise ValueError("a claim is bytes")
    return value
