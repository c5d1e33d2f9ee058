"""Who owns and owned the stages of jobs, as far as this process has read, and which snapshots hold the shards of its own stages: the
evidence by which job records are judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cachetools import FIFOCache

from fusion.swarm.authority.belief import OwnershipView
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.signed import verified_items
from fusion.swarm.claims.election import winner
from fusion.swarm.claims.votes import Succession, check_succession, parse_succession, successions
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, Place
from fusion.swarm.identity import Verify
from fusion.swarm.identity import verify as verify_signature
from fusion.swarm.transport import PeerId

REMEMBERED_STAGES = 16_384  # whose owners are remembered
REMEMBERED_OWNERS = 4  # of each
REMEMBERED_JOBS, REMEMBERED_SUCCESSORS = 1024, 16  # jobs, and successors of each
CHAIN = 4  # successions that are shown for one peer

Claims = Mapping[int, Sequence[ClaimRecord]]  # the live ones, by stage


class OwnersSeen:
    """The owners of each stage, with their terms, as far as this process has read claims."""

    def __init__(self) -> None:
        self._seen: FIFOCache[Place, dict[tuple[int, PeerId], None]] = FIFOCache(REMEMBERED_STAGES)
        self._successors: FIFOCache[JobId, dict[PeerId, Succession]] = FIFOCache(REMEMBERED_JOBS)
        self._snapshots: FIFOCache[Place, tuple[Digest, int]] = FIFOCache(REMEMBERED_STAGES)

    def take_part(self, job: JobId, stage: int, snapshot: Digest, step: int) -> None:
        """Remember that the shard of a stage that runs here, or is about to, is in `snapshot`, which is of `step`."""
        self._snapshots[job, stage] = snapshot, step

    def takes_part(self, job: JobId, stage: int, snapshot: Digest | None, step: int) -> bool:
        """Whether that is the last snapshot and step that `take_part` was given for the stage."""
        return snapshot is not None and self._snapshots.get((job, stage)) == (snapshot, step)

    def see(self, job: JobId, stage: int, claims: Iterable[ClaimRecord]) -> ClaimRecord | None:
        """The owner by these live claims; it is remembered."""
        owner = winner(claims)
        if owner is not None:
            seen = self._seen.setdefault((job, stage), {})
            seen.pop((owner.term, owner.peer), None)
            seen[owner.term, owner.peer] = None
            while len(seen) > REMEMBERED_OWNERS:
                del seen[next(iter(seen))]
        return owner

    def ownership_view(
        self,
        job: JobId,
        law: JobLaw | None,
        stages: int,
        claims: Claims,
        us: PeerId,
        *,
        shown: Iterable[Sequence[bytes]] = (),
        verify: Verify = verify_signature,
    ) -> OwnershipView:
        """What is known of the owners of the first `stages` of a job, whose live `claims` were just read; `shown`: the proof of each
        of its records."""
        found = {stage: self.see(job, stage, live) for stage, live in claims.items() if stage < stages}
        owners = {stage: (claim.peer, claim.term) for stage, claim in found.items() if claim is not None}
        held = frozenset(
            (stage, term, peer) for stage in range(stages) for term, peer in self._seen.get((job, stage), ())
        )
        own_steps = [claim.step for claim in found.values() if claim is not None and claim.peer == us]
        successors: Mapping[PeerId, Succession] = {}
        if law is not None:
            proofs = [successions(claim) for claim in found.values() if claim is not None]
            successors = self._follow(law, [*proofs, *shown], verify)
        return OwnershipView(
            law=law,
            owners=owners,
            held=held,
            us=us,
            own_step=min(own_steps, default=0),
            snapshots=frozenset(self._last_snapshots(job, law, stages)),
            successors=frozenset(successors),
        )

    def _last_snapshots(self, job: JobId, law: JobLaw | None, stages: int) -> Iterator[Digest]:
        """Those of the job's last step that hold shards of stages here: an older one does not show that the job is done."""
        for stage in range(stages):
            snapshot, step = self._snapshots.get((job, stage), (None, -1))
            if snapshot is not None and law is not None and step >= law.steps:
                yield snapshot

    def _follow(
        self, law: JobLaw, proofs: Sequence[Sequence[bytes]], verify: Verify
    ) -> Mapping[PeerId, Succession]:
        """The peers that followed an owner of the job by the vote of a peer that its author proposed, or of another such successor, as
        far as the `proofs` show, one of each record or claim."""
        successors, before = self._successors.get(law.job, {}), -1

        def matters(one: Succession) -> bool:
            entitled = one.voter in law.chosen or one.voter in successors
            fresh = one.successor not in law.chosen and one.successor not in successors
            return entitled and fresh and len(successors) < REMEMBERED_SUCCESSORS

        def check(data: bytes) -> None:
            check_succession(data, law.job, verify)

        while before < len(successors):  # one that was skipped may follow a successor found since
            before = len(successors)
            for proof in proofs:
                for one, _ in verified_items(proof, parse_succession, matters, check):
                    successors[one.successor] = one
        if successors:
            self._successors[law.job] = successors
        return successors

    def chain(self, job: JobId, peer: PeerId) -> tuple[bytes, ...]:
        """The successions that prove to others how the peer came to the job: its own, its voter's, and so on; none where the
        author proposed it."""
        successors, found = self._successors.get(job, {}), list[bytes]()
        while peer in successors and len(found) < CHAIN:
            found.append(successors[peer].data)
            peer = successors[peer].voter
        return tuple(found)
