"""Votes on who holds a stage: ours against others, and others' against us. Who the voters are, and how many have to agree, is the
rule of `fusion.swarm.claims.tenure`. Opens no streams: the callers send and receive the votes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusion.swarm.claims.claim_cache import ClaimCache
from fusion.swarm.claims.claim_publisher import ClaimPublisher
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.claims.votes import Vote, open_vote, seal_vote
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import ClaimRecord, JobId, Place
from fusion.swarm.errors import RecordError
from fusion.swarm.transport import PeerId


class Voting:
    """`cache` knows who holds each stage; `publisher` has the claims of this peer, `peer_id`."""

    def __init__(
        self, peer_id: PeerId, directory: Directory, publisher: ClaimPublisher, cache: ClaimCache
    ) -> None:
        self._peer_id = peer_id
        self._directory = directory
        self._publisher = publisher
        self._cache = cache
        self._against_us: dict[Place, dict[PeerId, Vote]] = {}  # by voter, on our own claim

    def voters(self, job: JobId, stage: int, suspect: PeerId) -> tuple[PeerId, ...]:
        """The peers whose vote counts on whether `suspect` still holds the stage, possibly us among them."""
        return self._cache.voters((job, stage), suspect)

    def vote(self, job: JobId, stage: int, holding: Holding, successor: PeerId) -> bytes:
        """Our signed vote against `holding`, in favour of `successor`."""
        vote = Vote(voter=self._peer_id, holding=holding, at=int(self._directory.now()))
        return seal_vote(vote, job, stage, successor, self._directory.sign)

    def is_vote(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, voter: PeerId, vote: bytes
    ) -> bool:
        """Whether that is `voter`'s vote against `holding`, in favour of `successor`."""
        return self._opened(job, stage, holding, successor, voter, vote) is not None

    def is_proof(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, votes: Iterable[bytes]
    ) -> bool:
        """Whether these votes together let `successor` follow `holding`."""
        return self._cache.proves(_with_votes(job, stage, successor, votes), holding)

    def is_proof_to_all(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, votes: Iterable[bytes]
    ) -> bool:
        """As `is_proof`, also to readers who know more owners of near stages than we do."""
        return self._cache.proves_to_all(_with_votes(job, stage, successor, votes), holding)

    def stages_without_vote(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, votes: Iterable[bytes]
    ) -> tuple[int, ...]:
        """The voting stages whose owners, as far as we know them, gave none of these votes; nearest first."""
        return self._cache.stages_without_vote(
            (job, stage), _with_votes(job, stage, successor, votes), holding
        )

    def stages_to_reread(self, job: JobId, stage: int, claimant: PeerId | None = None) -> tuple[int, ...]:
        """The voting stages whose owners may have changed unseen: there is a claim to follow this stage's holder (shown to us, or
        published by `claimant`) with votes that do not suffice here, and the owners that we know of these stages gave none."""
        return self._cache.stages_to_reread((job, stage), self._publisher.current((job, stage)), claimant)

    def refusal_vote(self, job: JobId, stage: int, holding: Holding) -> dict[str, object]:
        """Header fields with our vote against `holding`, for a refusal to the peer that claims to hold the stage so."""
        held = self._cache.tenure((job, stage), self._publisher.current((job, stage)))
        successor = self._peer_id if held is None or held.holding == holding else held.claim.peer
        return {"heir": successor, "word": self.vote(job, stage, holding, successor)}

    def is_outvoted(self, job: JobId, stage: int, voter: PeerId, refusal: Mapping[str, object]) -> bool:
        """Count the vote against our claim of the stage in the `refusal` that `voter` sent us. Whether a majority has voted against it
        by now, or we hold no claim of it any more."""
        place, held = (job, stage), self._publisher.owned.get((job, stage))
        if held is None:
            return True
        holding = Holding(self._peer_id, held.term)
        successor, data = refusal.get("heir"), refusal.get("word")
        if not isinstance(successor, str) or not isinstance(data, bytes):
            return False
        vote = self._opened(job, stage, holding, PeerId(successor), voter, data)
        if vote is None:
            return False
        votes = self._against_us.setdefault(place, {})
        votes[voter] = vote
        now = self._directory.now()
        voted = {peer for peer, each in votes.items() if each.holding == holding and each.is_valid(now)}
        return self._cache.is_majority(place, self._peer_id, voted)

    def forget(self, place: Place) -> None:
        """Drop the votes against our claim of the stage: it is a new one, or given up."""
        self._against_us.pop(place, None)

    def _opened(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, voter: PeerId, data: bytes
    ) -> Vote | None:
        try:
            vote = open_vote(data, job, stage, successor, self._directory.verify)
        except RecordError:
            return None
        return vote if vote.voter == voter and vote.holding == holding else None


def _with_votes(job: JobId, stage: int, successor: PeerId, votes: Iterable[bytes]) -> ClaimRecord:
    """A claim of the stage that only its proof matters of."""
    return ClaimRecord(
        job=job, stage=stage, peer=successor, role="owner", term=0, score=0.0, step=0, load=0.0, proof=tuple(votes)
    )  # fmt: skip
