"""What a peer remembers of others' claims: the terms it ever saw, what it read last, and what was shown to it directly.

The directory forgets a claim when it expires, and learns of a new one a little late; a peer should do neither.
"""

from __future__ import annotations

from collections.abc import Callable

from cachetools import FIFOCache

from fusion.swarm.authority.grants import Role, Verify, refusal
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.claims.election import latest, rank
from fusion.swarm.directory.records import MAX_TERM, ClaimRecord, JobId, Record
from fusion.swarm.errors import RecordError

Slot = tuple[JobId, int]
# What its peer must be admitted for: whoever stands by may be the next owner only where it may own.
_ROLES: dict[str, Role] = {"owner": "own", "replica": "stand-by", "standby": "stand-by"}


class ClaimCache:
    """`unsealed` checks a record that somebody showed us, `now` gives unix seconds and `verify` checks signatures (all as
    in `Directory`); `limit`: stages remembered. Claims of jobs whose `laws` are known count only of those whom these
    admit."""

    def __init__(
        self,
        unsealed: Callable[[bytes], Record],
        limit: int,
        now: Callable[[], float],
        verify: Verify,
    ) -> None:
        self.laws: FIFOCache[JobId, JobLaw] = FIFOCache(limit)
        self._unsealed = unsealed
        self._now = now
        self._verify = verify
        self._terms: FIFOCache[Slot, int] = FIFOCache(limit)
        self._read: FIFOCache[Slot, tuple[ClaimRecord, ...]] = FIFOCache(limit)
        self._credited: FIFOCache[Slot, bytes] = FIFOCache(limit)  # sealed, the highest of each stage

    def observe(self, slot: Slot, term: int) -> None:
        # Nothing can be claimed above the last term: who names it would keep everybody from the stage for ever.
        if self.term(slot) < term < MAX_TERM:
            self._terms[slot] = term

    def term(self, slot: Slot) -> int:
        """The highest term of the stage that was ever seen; 0 for none."""
        return self._terms.get(slot, 0)

    def read(self, slot: Slot, claims: tuple[ClaimRecord, ...]) -> tuple[ClaimRecord, ...]:
        """The directory has just said `claims`: what is true of the stage, with what was shown to us."""
        self._read[slot] = claims
        return self.recent(slot)

    def recent(self, slot: Slot) -> tuple[ClaimRecord, ...]:
        """The claims of the stage as last read, with what was shown to us since; nothing is asked."""
        found = {claim.peer: claim for claim in self._read.get(slot, ())}
        shown = self._shown(slot)
        if shown is not None:
            found[shown.peer] = latest(found.get(shown.peer), shown)
        admitted = tuple(claim for claim in found.values() if self.refusal(claim) is None)
        for claim in admitted:
            self.observe(slot, claim.term)
        return admitted

    def credit(self, data: bytes) -> ClaimRecord:
        """Believe the sealed claim of an owner until it expires or a higher one is shown. Raises RecordError for
        anything else."""
        claim = self._unsealed(data)
        if not isinstance(claim, ClaimRecord) or claim.role != "owner":
            raise RecordError("what was shown is not the claim of an owner")
        refused = self.refusal(claim)
        if refused is not None:
            raise RecordError(
                f"{claim.peer} may not own stage {claim.stage} of job {claim.job[:12]}: {refused}"
            )
        slot = (claim.job, claim.stage)
        shown = self._shown(slot)
        if shown is None or rank(claim) >= rank(shown):
            self._credited[slot] = data
        self.observe(slot, claim.term)
        return claim

    def refusal(self, claim: ClaimRecord) -> str | None:
        """Why the claim counts for nothing; None where it counts, or nobody knows the job's law yet."""
        law = self.laws.get(claim.job)
        role = None if law is None else _ROLES.get(claim.role)
        if law is None or role is None:
            return None
        if claim.stage >= law.stages:
            return f"the job has {law.stages} stages"
        return refusal(law, claim.grants, claim.peer, role, claim.stage, self._now(), self._verify)

    def _shown(self, slot: Slot) -> ClaimRecord | None:
        data = self._credited.get(slot)
        if data is None:
            return None
        try:
            claim = self._unsealed(data)
        except RecordError:
            del self._credited[slot]
            return None
        assert isinstance(claim, ClaimRecord), "only claims are credited"
        return claim
