"""Which word on a job is to be believed, in the eyes of one reader: along the author's chain and not by its number. Pure.

A job begins with its author, who signed its manifest; from then on whoever owns the first stage speaks for it, and all owners
together say how it ended. So a word counts by who signed it, and only among those that count alike by `job_order`:

* `stopped` is the author's to say, at any time and for good;
* any end is believed once most of those say so that have a voice: who owns a stage now, as the reader sees it, and who owned
  one last and has signed the end since. Of an owner that vanished without a word the stage has no voice; but fewer than half of
  the stages are no majority, whoever is silent: a vacant stage may have been anybody's;
* an owner goes by its lead's word that the job is done, if its own stages are and their shards are in the snapshot that the lead
  names, or failed, if the author proposed that peer: it must not wait for others who wait for it;
* who leads since an end that the others saw has no voice in whether it was one;
* a snapshot and a step are believed of whoever leads, or led under that term before the reader's eyes; where nobody leads, of
  the majority of the other owners;
* an end that nobody proves counts for nothing while a stage has an owner: those who own one would know;
* where nobody owns a stage, the words of those whom the author proposed, who followed one of these by its signed word, or
  whom the reader saw own a stage, go before the author's that it has launched the job, and these before those of strangers.
  This is judged anew at each look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.statements import CARRIED, Statement, joined, opened, stated
from fusion.swarm.directory.job_order import ENDED, job_order
from fusion.swarm.directory.records import Digest, JobRecord
from fusion.swarm.identity import Verify
from fusion.swarm.identity import verify as verify_signature
from fusion.swarm.transport import PeerId

# Terms of the job's first stage that are taken from words which nobody proved end here
PLAUSIBLE_TERM = 2**24


class Standing(IntEnum):
    """What a word has for it; the higher goes before the lower."""

    BARE = 0  # anybody may have said so
    LAUNCHED = 1  # the author has launched the job
    VOUCHED = 2  # somebody whom the author proposed, who followed by such a one's word, or who owned a stage, says so
    PROVEN = 3


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a reader has seen of who owns the stages of a job."""

    law: JobLaw | None = None  # None while the manifest is not here
    owners: Mapping[int, tuple[PeerId, int]] = field(default_factory=dict)  # by stage, now; with their terms
    # (stage, term, peer): who owned one, as far as seen
    held: frozenset[tuple[int, int, PeerId]] = frozenset()
    # Who followed, by the word of those proposed or of others of these
    successors: frozenset[PeerId] = frozenset()
    us: PeerId | None = None  # our own word is not a stranger's
    reached: int = 0  # the step of the stages that we own: of several the lowest
    # Of the last step, with the shards of stages that run here, as far as looked.
    snapshots: frozenset[Digest] = frozenset()

    @cached_property
    def owned_one(self) -> frozenset[PeerId]:
        """Who owns a stage, or owned one. Every word is held against it, and there may be thousands of both."""
        return frozenset(peer for peer, _ in self.owners.values()) | {peer for _, _, peer in self.held}

    @property
    def last(self) -> dict[int, PeerId]:
        """The last owner of each stage that was seen."""
        found: dict[int, tuple[int, PeerId]] = {}
        for stage, term, peer in self.held:
            found[stage] = max(found.get(stage, (-1, peer)), (term, peer))
        return {stage: peer for stage, (_, peer) in found.items()}


@dataclass(frozen=True, kw_only=True)
class Belief:
    record: JobRecord
    standing: Standing
    owned: bool  # whether a stage has an owner
    # An owner says that the job has ended, and others that own stages have not said so yet: they may be about to.
    doubted: bool = False

    @property
    def over(self) -> bool:
        """Whether the job has ended, as far as can be told."""
        return self.record.state in ENDED

    @property
    def settled(self) -> bool:
        """Whether it has ended for good: what may be kept in mind."""
        return self.over and self.standing is Standing.PROVEN

    @property
    def vouched(self) -> bool:
        """Whether anybody who owns, or owned, a part of the job says so."""
        return self.standing >= Standing.VOUCHED

    @property
    def term(self) -> int:
        """A term of the first stage that may be remembered."""
        return self.record.term if self.vouched or self.record.term < PLAUSIBLE_TERM else 0


@dataclass(frozen=True)
class _Word:
    said: Statement
    record: JobRecord  # that it came in
    own: bool  # the record's author says so itself
    data: bytes = b""  # what shows that the signer did, where another carries it


def believe(records: Sequence[JobRecord], sight: Sight, verify: Verify = verify_signature) -> Belief | None:
    """What to believe of all `records` on one job; None where there are none. The record has the manifest's name where
    that is known, and carries the statements that others may go by."""
    words = _words(records, sight, verify)
    if not words:
        return None
    ends = [word for word in words if word.said.state in ENDED and _plausible(word.said, sight)]
    running = [word for word in words if word.said.state not in ENDED]
    # Of whoever leads, how far the job came is believed, though not yet that it has ended.
    running += [_going_on(word) for word in ends if _led(word.said, sight)]
    standing = {id(word): _standing(word.said, sight) for word in (*words, *running)}
    proven = [word for word in ends if _final(word.said, sight)] or _majority(
        ends, sight, _stages(words, sight)
    )
    if proven:
        return _belief(max(proven, key=_order), Standing.PROVEN, words, sight, verify, known=True)
    owned, lead = bool(sight.owners), sight.owners.get(0)
    if not owned:  # what was proven of a job that went on proves nothing of one that nobody has any more
        standing = {key: min(value, Standing.VOUCHED) for key, value in standing.items()}
        running = [*running, *ends]
    elif lead is None:
        standing |= {id(word): Standing.PROVEN for word in _agreed(running, sight)}
    if not running:
        return _belief(max(words, key=_order), Standing.BARE, words, sight, verify, known=False)
    best = max(running, key=lambda word: (standing[id(word)], word.said.state in ENDED, _order(word)))
    # Of a stranger's word, where others own the stages, no more is true than that there is such a job.
    bare = owned and standing[id(best)] is Standing.BARE
    found = _belief(best, standing[id(best)], words, sight, verify, known=not bare)
    floor = 0 if lead is None else lead[1]
    said = [
        word for word in ends if owned and word.said.term >= floor and word.said.signer in sight.owned_one
    ]
    return replace(found, doubted=bool(said))


def _words(records: Iterable[JobRecord], sight: Sight, verify: Verify) -> list[_Word]:
    """What the authors say, and what they carry of those whose words count for more than a stranger's."""

    def matters(said: Statement) -> bool:
        return _final(said, sight) or _standing(said, sight) > Standing.BARE

    found = []
    for record in records:
        found.append(_Word(stated(record, record.author, 0), record, own=True))
        carried = opened(record.proof, record.job, verify, matters)
        found += [_Word(said, record, own=False, data=data) for said, data in carried]
    return found


def _plausible(said: Statement, sight: Sight) -> bool:
    """Training is done at the step that the manifest names."""
    steps = 0 if sight.law is None else sight.law.steps
    return said.state != "done" or steps == 0 or said.step >= steps


def _final(said: Statement, sight: Sight) -> bool:
    return said.state == "stopped" and sight.law is not None and said.signer == sight.law.author


def _stages(words: Iterable[_Word], sight: Sight) -> int:
    """Of the job. Without its manifest as many as anybody says: one owner of whom we know is not all of them."""
    if sight.law is not None:
        return sight.law.stages
    return max(len({*sight.last, *sight.owners}), *(word.record.stages for word in words))


def _majority(ends: Sequence[_Word], sight: Sight, stages: int) -> list[_Word]:
    """The words on an end that most of those who have a voice agree on."""
    lead = sight.owners.get(0)
    last = sight.last
    # No more words than that travel together, however many stages there are
    fewest = min(stages, CARRIED) / 2
    for state in ("done", "stopped", "failed"):
        # A job that failed may be taken up again: what was said under an earlier lead does not count against a later one.
        floor = lead[1] if lead is not None and state == "failed" else 0
        agreed = [word for word in ends if word.said.state == state and word.said.term >= floor]
        signers = {word.said.signer for word in agreed}
        voices = {stage: peer for stage, peer in last.items() if peer in signers}
        voices |= {stage: peer for stage, (peer, _) in sight.owners.items()}
        rest = {stage: peer for stage, peer in voices.items() if stage != 0}
        terms = [word.said.term for word in agreed if word.said.signer in rest.values()]
        if lead is not None and state == "done" and terms and 0 < min(terms) <= max(terms) < lead[1]:
            voices = rest
        votes = sum(peer in signers for peer in voices.values())
        if votes >= fewest and 2 * votes > len(voices):
            return _most_voted(agreed, voices, sight)
        ours = sight.us is not None and any(peer == sight.us for peer, _ in sight.owners.values())
        early = state == "done" and sight.law is not None and sight.reached < sight.law.steps
        if state != "stopped" and ours and not early:
            floor = 0 if lead is None else lead[1]
            led = [word for word in agreed if (0, word.said.term, word.said.signer) in sight.held]
            if sight.law is not None:
                led = [word for word in led if _lead_suffices(word.said, sight, sight.law)]
            by_lead = [word for word in led if word.said.term >= floor]
            if by_lead:
                return by_lead
    return []


def _lead_suffices(said: Statement, sight: Sight, law: JobLaw) -> bool:
    """Whether an owner goes by the word of its lead alone, who may have come to a vacant stage."""
    if said.state == "failed":
        return said.signer in law.chosen
    return law.steps == 0 or said.snapshot in sight.snapshots


def _most_voted(agreed: Sequence[_Word], voices: Mapping[int, PeerId], sight: Sight) -> list[_Word]:
    """Of the words of voices on an end those on what it came to that most voices say, and of several such the most of all who
    own a stage or owned one: any of them may lie about that. Of as many on each side what we say ourselves, and else what most
    of those say whom the author chose."""
    by_point: dict[Any, list[_Word]] = {}
    for word in agreed:
        by_point.setdefault((word.said.step, word.said.snapshot, word.said.snapshot_step), []).append(word)
    chosen = frozenset[PeerId]() if sight.law is None else sight.law.chosen

    def votes(words: Sequence[_Word]) -> tuple[int, int, bool, int]:
        signers = {word.said.signer for word in words}
        vouched = {s for s in signers if s == sight.us or s in sight.owned_one}
        saying = sum(peer in signers for peer in voices.values())
        return saying, len(vouched), sight.us in signers, len(signers & chosen)

    most = max(map(votes, by_point.values()), default=(0, 0, False, 0))
    return [
        word
        for words in by_point.values()
        if votes(words) == most
        for word in words
        if word.said.signer in voices.values()
    ]


def _agreed(running: Sequence[_Word], sight: Sight) -> list[_Word]:
    """Where nobody leads: the words on the newest snapshot that most of the other owners agree on."""
    owners = {peer for peer, _ in sight.owners.values()}
    voices = len(sight.owners)
    by_snapshot: dict[Any, list[_Word]] = {}
    for word in running:
        if word.own and word.said.signer in owners:
            by_snapshot.setdefault((word.said.snapshot, word.said.snapshot_step), []).append(word)
    for words in by_snapshot.values():
        signers = {word.said.signer for word in words}
        if 2 * sum(peer in signers for peer, _ in sight.owners.values()) > voices:
            return words
    return []


def _led(said: Statement, sight: Sight) -> bool:
    """Whether its signer led the job under its term, as far as was seen."""
    return (0, said.term, said.signer) in sight.held or sight.owners.get(0) == (said.signer, said.term)


def _going_on(word: _Word) -> _Word:
    return replace(word, said=replace(word.said, state="running"))


def _standing(said: Statement, sight: Sight) -> Standing:
    if _led(said, sight) and said.state not in ENDED:
        return Standing.PROVEN
    if said.signer == sight.us or said.signer in sight.owned_one:
        return Standing.VOUCHED
    if said.signer in sight.successors or (sight.law is not None and said.signer in sight.law.chosen):
        return Standing.VOUCHED
    if said.state == "launching" and sight.law is not None and said.signer == sight.law.author:
        return Standing.LAUNCHED
    return Standing.BARE


def _order(word: _Word) -> tuple[Any, ...]:
    """`job_order` of what is said, then whoever says it itself."""
    order = job_order(_stripped(word))
    return *order[:4], word.own, *order[4:]


def _stripped(word: _Word) -> JobRecord:
    said = word.said
    return replace(
        word.record, state=said.state, term=said.term, step=said.step, snapshot=said.snapshot,
        snapshot_step=said.snapshot_step,
    )  # fmt: skip


def _belief(
    word: _Word, standing: Standing, words: Sequence[_Word], sight: Sight, verify: Verify, *, known: bool
) -> Belief:
    """What a reader goes by. Not `known`: that there is such a job, and nothing of how it stands."""
    record = _stripped(word)
    final = _final(word.said, sight)
    if not known:
        blank = replace(record, state="running", term=0, step=0, snapshot=None, snapshot_step=-1)
        record = replace(blank, lead=None, message="")
    elif not word.own:  # whoever carried it says the rest, and may say anything
        lead = sight.owners.get(0)
        leads = word.said.state in ENDED or (lead is not None and lead[0] == word.said.signer)
        record = replace(record, lead=word.said.signer if leads and not final else None, message="")
    if not sight.owners and not word.own and record.state == "running":
        record = replace(record, step=max(record.snapshot_step, 0))  # what can be gone back to
    if final:
        record = _stopped_at(record, words, sight)
    if sight.law is not None:
        record = replace(record, stages=sight.law.stages, name=sight.law.name or record.name)
    carried = dict.fromkeys(each.data for each in words if not each.own)
    record = replace(record, proof=joined(carried, record.job, verify))
    return Belief(record=record, standing=standing, owned=bool(sight.owners))


def _stopped_at(record: JobRecord, words: Sequence[_Word], sight: Sight) -> JobRecord:
    """The author's word that ends a job names no step: with the newest snapshot that anybody of the job speaks of."""
    known = [word for word in words if _standing(word.said, sight) >= Standing.VOUCHED]
    if not known:
        return record
    point = max(known, key=lambda word: (word.said.term, word.said.snapshot_step, word.said.step)).said
    return replace(
        record, term=max(record.term, point.term), step=max(record.step, point.step), snapshot=point.snapshot,
        snapshot_step=point.snapshot_step,
    )  # fmt: skip
