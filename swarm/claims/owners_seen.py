"""Who owned the stages of jobs, as far as this process has looked: what is said of a job is judged by that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cachetools import FIFOCache

from fusion.swarm.authority.belief import Sight
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.transport import PeerId

REMEMBERED_STAGES = 16_384  # whose owners are kept in mind
REMEMBERED_OWNERS = 4  # of each

Claims = Mapping[int, Sequence[ClaimRecord]]  # the live ones, by stage


class OwnersSeen:
    """Who owned which stage, and under which term, as far as anybody here has looked."""

    def __init__(self) -> None:
        self._seen: FIFOCache[tuple[JobId, int], dict[tuple[int, PeerId], None]] = FIFOCache(
            REMEMBERED_STAGES
        )

    def see(self, job: JobId, stage: int, claims: Iterable[ClaimRecord]) -> ClaimRecord | None:
        """The owner by these live claims, who is remembered."""
        owner = winner(claims)
        if owner is not None:
            seen = self._seen.setdefault((job, stage), {})
            seen.pop((owner.term, owner.peer), None)
            seen[owner.term, owner.peer] = None
            while len(seen) > REMEMBERED_OWNERS:
                del seen[next(iter(seen))]
        return owner

    def sight(self, job: JobId, law: JobLaw | None, stages: int, claims: Claims, us: PeerId) -> Sight:
        """What is known of the owners of the first `stages` of a job, whose live `claims` were just read."""
        found = {stage: self.see(job, stage, said) for stage, said in claims.items() if stage < stages}
        owners = {stage: (claim.peer, claim.term) for stage, claim in found.items() if claim is not None}
        held = frozenset(
            (stage, term, peer) for stage in range(stages) for term, peer in self._seen.get((job, stage), ())
        )
        ours = [claim.step for claim in found.values() if claim is not None and claim.peer == us]
        return Sight(law=law, owners=owners, held=held, us=us, reached=min(ours, default=0))
