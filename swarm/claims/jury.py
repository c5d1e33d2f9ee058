"""What the jurors of a stage say of who holds it: our words on others, and theirs on us. Who the jurors are, and how many of
them have to say the same, is the rule of `fusion.swarm.claims.tenure`. Opens no streams: whoever has one carries the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusion.swarm.claims.claim_cache import ClaimCache
from fusion.swarm.claims.claim_publisher import ClaimPublisher
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.claims.testimony import Testimony, open_testimony, seal_testimony
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import ClaimRecord, JobId, Place
from fusion.swarm.errors import RecordError
from fusion.swarm.transport import PeerId


class Jury:
    """Of every stage, as `cache` knows who holds them; `ours` are the claims of this peer, `peer_id`."""

    def __init__(
        self, peer_id: PeerId, directory: Directory, ours: ClaimPublisher, cache: ClaimCache
    ) -> None:
        self._peer_id = peer_id
        self._directory = directory
        self._ours = ours
        self._cache = cache
        self._against_us: dict[Place, dict[PeerId, Testimony]] = {}  # what jurors said of our own claim

    def jurors(self, job: JobId, stage: int, suspect: PeerId) -> tuple[PeerId, ...]:
        """Whose word counts on whether `suspect` still holds the stage, we among them where ours does."""
        return self._cache.jurors((job, stage), suspect)

    def testify(self, job: JobId, stage: int, holding: Holding, heir: PeerId) -> bytes:
        """Our signed word that `holding` is over, and `heir` to follow."""
        testimony = Testimony(voter=self._peer_id, holding=holding, at=int(self._directory.now()))
        return seal_testimony(testimony, job, stage, heir, self._directory.sign)

    def is_word(
        self, job: JobId, stage: int, holding: Holding, heir: PeerId, voter: PeerId, word: bytes
    ) -> bool:
        """Whether that is `voter`'s testimony against the holder, in favour of `heir`."""
        return self._opened(job, stage, holding, heir, voter, word) is not None

    def is_proof(
        self, job: JobId, stage: int, holding: Holding, heir: PeerId, words: Iterable[bytes]
    ) -> bool:
        """Whether these testimonies, together, let `heir` follow."""
        return self._cache.proves(_with_words(job, stage, heir, words), holding)

    def unheard(
        self, job: JobId, stage: int, holding: Holding, heir: PeerId, words: Iterable[bytes]
    ) -> tuple[int, ...]:
        """The stages whose owners' words are not among these, as far as we know who they are; nearest first."""
        return self._cache.unheard((job, stage), _with_words(job, stage, heir, words), holding)

    def silent(self, job: JobId, stage: int) -> tuple[int, ...]:
        """The stages near this one whose owners, as far as we know who they are, have no word in a claim to follow its holder that
        was shown to us with words and counts for nothing here: a juror may have followed another a moment ago."""
        return self._cache.silent((job, stage), self._ours.of((job, stage)))

    def disowning(self, job: JobId, stage: int, holding: Holding) -> dict[str, object]:
        """Our word that whoever says that it holds the stage so does not, for the one that we refuse."""
        held = self._cache.tenure((job, stage), self._ours.of((job, stage)))
        heir = self._peer_id if held is None or held.holding == holding else held.claim.peer
        return {"heir": heir, "word": self.testify(job, stage, holding, heir)}

    def disowned(self, job: JobId, stage: int, juror: PeerId, refusal: Mapping[str, object]) -> bool:
        """`juror` refuses us with its word: whether by now so many have said that our claim of the stage is over that it
        is."""
        place, held = (job, stage), self._ours.owned.get((job, stage))
        if held is None:
            return True
        holding = Holding(self._peer_id, held.term)
        heir, word = refusal.get("heir"), refusal.get("word")
        if not isinstance(heir, str) or not isinstance(word, bytes):
            return False
        testimony = self._opened(job, stage, holding, PeerId(heir), juror, word)
        if testimony is None:
            return False
        said = self._against_us.setdefault(place, {})
        said[juror] = testimony
        now = self._directory.now()
        voters = {peer for peer, each in said.items() if each.holding == holding and each.is_good(now)}
        return self._cache.is_majority(place, self._peer_id, voters)

    def forget(self, place: Place) -> None:
        """What was said of our claim of the stage: it is a new one, or no more."""
        self._against_us.pop(place, None)

    def _opened(
        self, job: JobId, stage: int, holding: Holding, heir: PeerId, voter: PeerId, word: bytes
    ) -> Testimony | None:
        try:
            testimony = open_testimony(word, job, stage, heir, self._directory.verify)
        except RecordError:
            return None
        return testimony if testimony.voter == voter and testimony.holding == holding else None


def _with_words(job: JobId, stage: int, heir: PeerId, words: Iterable[bytes]) -> ClaimRecord:
    """A claim of the stage as far as its proof is concerned."""
    return ClaimRecord(
        job=job, stage=stage, peer=heir, role="owner", term=0, score=0.0, step=0, load=0.0, proof=tuple(words)
    )  # fmt: skip
