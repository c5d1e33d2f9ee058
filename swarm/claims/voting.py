"""Votes on who holds a stage: ours on others, and theirs on us. Who the voters are, and how many of them have to vote
the same, is the rule of `fusion.swarm.claims.tenure`. Opens no streams: whoever has one carries the votes.
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
    """Of every stage, as `cache` knows who holds them; `ours` are the claims of this peer, `peer_id`."""

    def __init__(
        self, peer_id: PeerId, directory: Directory, ours: ClaimPublisher, cache: ClaimCache
    ) -> None:
        self._peer_id = peer_id
        self._directory = directory
        self._ours = ours
        self._cache = cache
        self._against_us: dict[Place, dict[PeerId, Vote]] = {}  # what voters said of our own claim

    def voters(self, job: JobId, stage: int, suspect: PeerId) -> tuple[PeerId, ...]:
        """Whose vote counts on whether `suspect` still holds the stage, we among them where ours does."""
        return self._cache.voters((job, stage), suspect)

    def vote(self, job: JobId, stage: int, holding: Holding, successor: PeerId) -> bytes:
        """Our signed vote that `holding` is over, and `successor` to follow."""
        vote = Vote(voter=self._peer_id, holding=holding, at=int(self._directory.now()))
        return seal_vote(vote, job, stage, successor, self._directory.sign)

    def is_vote(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, voter: PeerId, vote: bytes
    ) -> bool:
        """Whether that is `voter`'s vote against the holder, in favour of `successor`."""
        return self._opened(job, stage, holding, successor, voter, vote) is not None

    def is_proof(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, votes: Iterable[bytes]
    ) -> bool:
        """Whether these votes, together, let `successor` follow."""
        return self._cache.proves(_with_votes(job, stage, successor, votes), holding)

    def is_proof_to_all(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, votes: Iterable[bytes]
    ) -> bool:
        """As `is_proof`, also for those who know more of the near stages than we do."""
        return self._cache.proves_to_all(_with_votes(job, stage, successor, votes), holding)

    def without_vote(
        self, job: JobId, stage: int, holding: Holding, successor: PeerId, votes: Iterable[bytes]
    ) -> tuple[int, ...]:
        """The stages whose owners' votes are not among these, as far as we know who they are; nearest first."""
        return self._cache.without_vote((job, stage), _with_votes(job, stage, successor, votes), holding)

    def in_doubt(self, job: JobId, stage: int, claimant: PeerId | None = None) -> tuple[int, ...]:
        """The stages near this one whose owners, as far as we know who they are, have no vote in a claim to follow its holder that
        shows votes and counts for nothing here, one that was shown to us or that `claimant` published: a voter may have followed
        another a moment ago."""
        return self._cache.in_doubt((job, stage), self._ours.of((job, stage)), claimant)

    def disowning(self, job: JobId, stage: int, holding: Holding) -> dict[str, object]:
        """Our vote that whoever says that it holds the stage so does not, for the one that we refuse."""
        held = self._cache.tenure((job, stage), self._ours.of((job, stage)))
        successor = self._peer_id if held is None or held.holding == holding else held.claim.peer
        return {"heir": successor, "word": self.vote(job, stage, holding, successor)}

    def disowned(self, job: JobId, stage: int, voter: PeerId, refusal: Mapping[str, object]) -> bool:
        """`voter` refuses us with its vote: whether by now so many have voted that our claim of the stage is over that it
        is."""
        place, held = (job, stage), self._ours.owned.get((job, stage))
        if held is None:
            return True
        holding = Holding(self._peer_id, held.term)
        successor, data = refusal.get("heir"), refusal.get("word")
        if not isinstance(successor, str) or not isinstance(data, bytes):
            return False
        vote = self._opened(job, stage, holding, PeerId(successor), voter, data)
        if vote is None:
            return False
        said = self._against_us.setdefault(place, {})
        said[voter] = vote
        now = self._directory.now()
        voted = {peer for peer, each in said.items() if each.holding == holding and each.is_good(now)}
        return self._cache.is_majority(place, self._peer_id, voted)

    def forget(self, place: Place) -> None:
        """What was said of our claim of the stage: it is a new one, or no more."""
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
    """A claim of the stage as far as its proof is concerned."""
    return ClaimRecord(
        job=job, stage=stage, peer=successor, role="owner", term=0, score=0.0, step=0, load=0.0, proof=tuple(votes)
    )  # fmt: skip
