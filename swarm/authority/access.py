"""Who may do what in the jobs that this process knows: their laws, the revocations in them, and the grants that this process
itself shows to others."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from cachetools import FIFOCache

from fusion.swarm.authority import grants
from fusion.swarm.authority.grants import Role
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.revocation import Revocation, newer, open_revocation, parse_unverified
from fusion.swarm.authority.signed import verified_items
from fusion.swarm.authority.wallet import Chain, Wallet
from fusion.swarm.directory.records import MAX_GRANT_BYTES, MAX_GRANTS, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Signer, Verify
from fusion.swarm.identity import verify as verify_signature
from fusion.swarm.transport import PeerId

REMEMBERED_JOBS = 65_536
UNKNOWN = "this peer does not know the job, and so not who may take part in it"


class Access:
    """`wallet` None: this process has no grants. `now`: unix seconds; `verify` checks signatures."""

    def __init__(
        self,
        wallet: Wallet | None = None,
        now: Callable[[], float] = time.time,
        verify: Verify = verify_signature,
    ) -> None:
        self.wallet = wallet
        # Reads the law of a job from its manifest on disk; None where that is not here.
        self.look_up: Callable[[JobId], Awaitable[JobLaw | None]] | None = None
        self._now = now
        self._verify = verify
        self._laws: FIFOCache[JobId, JobLaw] = FIFOCache(REMEMBERED_JOBS)
        self._revoked: FIFOCache[JobId, dict[PeerId, Revocation]] = FIFOCache(REMEMBERED_JOBS)

    def know(self, law: JobLaw) -> None:
        self._laws[law.job] = law

    def law(self, job: JobId) -> JobLaw | None:
        """None while nobody has read the job's manifest."""
        return self._laws.get(job)

    def refusal(
        self, job: JobId, peer: PeerId, role: Role, stage: int | None = None, chain: Sequence[bytes] = ()
    ) -> str | None:
        """Why `peer`, which shows `chain`, may not take that role; None where it may, or the job's law is not known here yet."""
        law = self._laws.get(job)
        if law is None:
            return None
        revoked = self._revoked.get(job, {}).values()
        return grants.refusal(law, chain, peer, role, stage, self._now(), self._verify, revoked)

    async def strict_refusal(
        self, job: JobId, peer: PeerId, role: Role, chain: Sequence[bytes] = ()
    ) -> str | None:
        """As `refusal`, but refuses everything in a job whose law cannot be read here."""
        if job not in self._laws and self.look_up is not None:
            law = await self.look_up(job)
            if law is not None:
                self.know(law)
        return UNKNOWN if job not in self._laws else self.refusal(job, peer, role, None, chain)

    def hold(self, key: Signer) -> None:
        """The user holds that key, too."""
        if self.wallet is not None:
            self.wallet.hold(key)

    def chain(self, job: JobId) -> Chain:
        """The grants that we show in the job."""
        law = self._laws.get(job)
        if law is None or self.wallet is None:
            return ()
        return self.wallet.chain(law, self._revoked.get(job, {}).values())

    # --- revocations

    def revoke(self, job: JobId, data: bytes) -> bool:
        """Apply a revocation that a peer passed on; whether it was new to us. Anything else, and one by a peer that gives no
        grants in the job, is ignored."""
        return self.revoke_all(job, (data,))

    def revoke_all(self, job: JobId, proof: Iterable[bytes]) -> bool:
        """As `revoke`, of all that one peer carries, up to the first forgery."""
        law, known = self._laws.get(job), dict(self._revoked.get(job, {}))
        if law is None:
            return False

        def matters(found: Revocation) -> bool:
            return found.job == job and found.issuer in law.issuers and newer(found, known.get(found.issuer))

        new = False
        for revocation, _ in verified_items(
            proof, parse_unverified, matters, lambda data: open_revocation(data, self._verify)
        ):
            known[revocation.issuer] = revocation
            self._revoked[job], new = known, True
        if new and self.wallet is not None:
            self.wallet.forget(job)
        return new

    def revocations(self, job: JobId) -> tuple[bytes, ...]:
        """Those that we know of, to be passed on to others."""
        return tuple(each.data for each in self._revoked.get(job, {}).values())

    def revoked_by(self, job: JobId, issuer: PeerId) -> Revocation | None:
        return self._revoked.get(job, {}).get(issuer)


def chain_of(value: object) -> Chain:
    """The grants in a field of a frame. RecordError where it holds none."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_GRANTS:
        raise RecordError(f"grants: a list of at most {MAX_GRANTS}")
    if not all(isinstance(item, bytes) and len(item) <= MAX_GRANT_BYTES for item in value):
        raise RecordError(f"grants: bytes, each at most {MAX_GRANT_BYTES}")
    return tuple(value)
