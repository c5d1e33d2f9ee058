"""Which record of a job to believe, in the eyes of one reader: along the author's chain, and not by its term. Pure.

A job begins with its author, who signed its manifest. From then on the owner of the first stage (the lead) reports how far it came,
and all owners together decide how it ended. So a statement counts by who signed it; `job_order` decides only among statements that
count alike:

* `stopped` is for the author to declare, at any time and for good;
* any other end needs a majority of the voters: the owners of the stages, as the reader sees them, and of a stage without an owner
  the last one if it has signed the end since. A vacant stage has no voter otherwise; but the voters for an end must be at least half
  of all stages, since a vacant stage may have been anybody's;
* an owner accepts its lead's statement that the job is done, if its own stages are and their shards are in the snapshot that the
  lead names, or failed, if the author proposed that lead: owners that wait for each other's votes would never end;
* a lead that took over after the end does not vote on it;
* a snapshot and a step are believed of the current lead, or of one whom the reader saw lead under that term; where nobody leads, of
  a majority of the other owners;
* an unproven end counts for nothing while a stage has an owner: the owners would know;
* where no stage has an owner, statements of peers whom the author proposed, of those who followed one of these by its signed vote,
  and of past owners go before the author's that it has launched the job, and this before those of strangers. This is judged anew at
  each look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.statements import (
    CARRIED,
    State,
    Statement,
    latest_statements,
    open_statements,
    statement_of,
)
from fusion.swarm.directory.job_order import ENDED, job_order
from fusion.swarm.directory.records import Digest, JobRecord
from fusion.swarm.identity import Verify
from fusion.swarm.identity import verify as verify_signature
from fusion.swarm.transport import PeerId

# Only lower terms of the first stage are taken from a record that nobody vouches for
PLAUSIBLE_TERM = 2**24


class Standing(IntEnum):
    """How well a statement is supported; the higher goes before the lower."""

    BARE = 0  # anybody may have made it
    LAUNCHED = 1  # the author has launched the job
    VOUCHED = 2  # by a peer whom the author proposed, one that followed by the vote of such a peer, or one that owned a stage
    PROVEN = 3


@dataclass(frozen=True, kw_only=True)
class OwnershipView:
    """Who owns the stages of a job, and who owned them, as far as one reader has seen."""

    law: JobLaw | None = None  # None while the manifest is not here
    owners: Mapping[int, tuple[PeerId, int]] = field(default_factory=dict)  # by stage, now; with their terms
    # (stage, term, peer) of every owner that was seen, past and present
    held: frozenset[tuple[int, int, PeerId]] = frozenset()
    # Who followed an owner by the vote of a peer that the author proposed, or of another one of these
    successors: frozenset[PeerId] = frozenset()
    us: PeerId | None = None  # the reader: its own statement is not a stranger's
    own_step: int = 0  # the lowest step of the stages that we own
    # Of the job's last step, with the shards of the stages that run here.
    snapshots: frozenset[Digest] = frozenset()

    @cached_property
    def owned_one(self) -> frozenset[PeerId]:
        """Who owns a stage, or owned one. Cached: every statement is compared with it, and there may be thousands of both."""
        return frozenset(peer for peer, _ in self.owners.values()) | {peer for _, _, peer in self.held}

    @property
    def last_owners(self) -> dict[int, PeerId]:
        """The last known owner of each stage."""
        found: dict[int, tuple[int, PeerId]] = {}
        for stage, term, peer in self.held:
            found[stage] = max(found.get(stage, (-1, peer)), (term, peer))
        return {stage: peer for stage, (_, peer) in found.items()}


@dataclass(frozen=True, kw_only=True)
class Belief:
    record: JobRecord
    standing: Standing
    owned: bool  # whether a stage has an owner
    # An owner states that the job has ended, and the other owners do not yet: they may be about to.
    doubted: bool = False

    @property
    def over(self) -> bool:
        """Whether the job has ended, as far as is known."""
        return self.record.state in ENDED

    @property
    def settled(self) -> bool:
        """Whether it has ended for good: safe to remember."""
        return self.over and self.standing is Standing.PROVEN

    @property
    def vouched(self) -> bool:
        """Whether a peer that owns, or owned, a part of the job supports it."""
        return self.standing >= Standing.VOUCHED

    @property
    def term(self) -> int:
        """A term of the first stage that may be remembered."""
        return self.record.term if self.vouched or self.record.term < PLAUSIBLE_TERM else 0


@dataclass(frozen=True)
class _Report:
    """A statement and the record that it arrived in."""

    statement: Statement
    record: JobRecord
    own: bool  # the record's author made the statement; otherwise the record carries it
    data: bytes = b""  # the signed statement, where it is carried

    @property
    def state(self) -> State:
        return self.statement.state

    @property
    def term(self) -> int:
        return self.statement.term

    @property
    def signer(self) -> PeerId:
        return self.statement.signer


def believe(
    records: Sequence[JobRecord], view: OwnershipView, verify: Verify = verify_signature
) -> Belief | None:
    """What to believe of all `records` of one job; None where there are none. The believed record has the manifest's name
    where that is known, and carries the statements that prove it to others."""
    reports = _reports(records, view, verify)
    if not reports:
        return None
    ends = [report for report in reports if report.state in ENDED and _plausible(report.statement, view)]
    running = [report for report in reports if report.state not in ENDED]
    # A lead's end is also its report of how far the job came, which is believed before the end is.
    running += [_as_running(report) for report in ends if _led(report.statement, view)]
    standing = {id(report): _standing(report.statement, view) for report in (*reports, *running)}
    proven = [report for report in ends if _final(report.statement, view)] or _majority(
        ends, view, _stages(reports, view)
    )
    if proven:
        return _belief(max(proven, key=_order), Standing.PROVEN, reports, view, verify, known=True)
    owned, lead = bool(view.owners), view.owners.get(0)
    if not owned:  # that a lead reported so proves nothing once all owners are gone
        standing = {key: min(value, Standing.VOUCHED) for key, value in standing.items()}
        running = [*running, *ends]
    elif lead is None:
        standing |= {id(report): Standing.PROVEN for report in _agreed(running, view)}
    if not running:
        return _belief(max(reports, key=_order), Standing.BARE, reports, view, verify, known=False)
    best = max(running, key=lambda report: (standing[id(report)], report.state in ENDED, _order(report)))
    # Where stages have owners, a stranger's statement shows no more than that there is such a job.
    bare = owned and standing[id(best)] is Standing.BARE
    found = _belief(best, standing[id(best)], reports, view, verify, known=not bare)
    floor = 0 if lead is None else lead[1]
    doubted = owned and any(report.term >= floor and report.signer in view.owned_one for report in ends)
    return replace(found, doubted=doubted)


def _reports(records: Iterable[JobRecord], view: OwnershipView, verify: Verify) -> list[_Report]:
    """The authors' own statements, and those that they carry of signers who count for more than a stranger."""

    def matters(statement: Statement) -> bool:
        return _final(statement, view) or _standing(statement, view) > Standing.BARE

    found = []
    for record in records:
        found.append(_Report(statement_of(record, record.author, 0), record, own=True))
        carried = open_statements(record.proof, record.job, verify, matters)
        found += [_Report(statement, record, own=False, data=data) for statement, data in carried]
    return found


def _plausible(statement: Statement, view: OwnershipView) -> bool:
    """Whether the statement fits the manifest: training is done at the step that it names."""
    steps = 0 if view.law is None else view.law.steps
    return statement.state != "done" or steps == 0 or statement.step >= steps


def _final(statement: Statement, view: OwnershipView) -> bool:
    return statement.state == "stopped" and view.law is not None and statement.signer == view.law.author


def _stages(reports: Iterable[_Report], view: OwnershipView) -> int:
    """How many the job has. Without its manifest the most that any record names: the owners that we know may not be all."""
    if view.law is not None:
        return view.law.stages
    return max(len({*view.last_owners, *view.owners}), *(report.record.stages for report in reports))


def _majority(ends: Sequence[_Report], view: OwnershipView, stages: int) -> list[_Report]:
    """The reports of an end that a majority of the voters agree on, or that our lead makes and suffices for us."""
    lead = view.owners.get(0)
    last = view.last_owners
    # A record carries no more statements than CARRIED, however many stages there are
    fewest = min(stages, CARRIED) / 2
    for state in ("done", "stopped", "failed"):
        # A failed job may be taken up again: an end under an earlier lead does not count against a later one.
        floor = lead[1] if lead is not None and state == "failed" else 0
        agreed = [report for report in ends if report.state == state and report.term >= floor]
        signers = {report.signer for report in agreed}
        voters = {stage: peer for stage, peer in last.items() if peer in signers}
        voters |= {stage: peer for stage, (peer, _) in view.owners.items()}
        rest = {stage: peer for stage, peer in voters.items() if stage != 0}
        terms = [report.term for report in agreed if report.signer in rest.values()]
        if lead is not None and state == "done" and terms and 0 < min(terms) <= max(terms) < lead[1]:
            voters = rest
        votes = sum(peer in signers for peer in voters.values())
        if votes >= fewest and 2 * votes > len(voters):
            return _most_voted(agreed, voters, view)
        owns_one = view.us is not None and any(peer == view.us for peer, _ in view.owners.values())
        early = state == "done" and view.law is not None and view.own_step < view.law.steps
        if state != "stopped" and owns_one and not early:
            floor = 0 if lead is None else lead[1]
            led = [report for report in agreed if (0, report.term, report.signer) in view.held]
            if view.law is not None:
                led = [report for report in led if _lead_suffices(report.statement, view, view.law)]
            by_lead = [report for report in led if report.term >= floor]
            if by_lead:
                return by_lead
    return []


def _lead_suffices(statement: Statement, view: OwnershipView, law: JobLaw) -> bool:
    """Whether an owner accepts the end from its lead alone, which may have claimed a vacant stage."""
    if statement.state == "failed":
        return statement.signer in law.chosen
    return law.steps == 0 or statement.snapshot in view.snapshots


def _most_voted(
    agreed: Sequence[_Report], voters: Mapping[int, PeerId], view: OwnershipView
) -> list[_Report]:
    """Of the voters' reports of an end those on the checkpoint (step and snapshot) with the most votes: any voter may lie about that.
    Ties go to the checkpoint that more past and present owners report, then to the reader's own, then to the one that more peers
    report whom the author proposed."""
    by_checkpoint: dict[Any, list[_Report]] = {}
    for report in agreed:
        at = report.statement
        by_checkpoint.setdefault((at.step, at.snapshot, at.snapshot_step), []).append(report)
    chosen = frozenset[PeerId]() if view.law is None else view.law.chosen

    def votes(reports: Sequence[_Report]) -> tuple[int, int, bool, int]:
        signers = {report.signer for report in reports}
        vouched = {s for s in signers if s == view.us or s in view.owned_one}
        count = sum(peer in signers for peer in voters.values())
        return count, len(vouched), view.us in signers, len(signers & chosen)

    most = max(map(votes, by_checkpoint.values()), default=(0, 0, False, 0))
    return [
        report
        for reports in by_checkpoint.values()
        if votes(reports) == most
        for report in reports
        if report.signer in voters.values()
    ]


def _agreed(running: Sequence[_Report], view: OwnershipView) -> list[_Report]:
    """Where nobody leads: the reports that name one snapshot and come from a majority of the other owners."""
    owners = {peer for peer, _ in view.owners.values()}
    by_snapshot: dict[Any, list[_Report]] = {}
    for report in running:
        if report.own and report.signer in owners:
            by_snapshot.setdefault((report.statement.snapshot, report.statement.snapshot_step), []).append(
                report
            )
    for reports in by_snapshot.values():
        signers = {report.signer for report in reports}
        if 2 * sum(peer in signers for peer, _ in view.owners.values()) > len(view.owners):
            return reports
    return []


def _led(statement: Statement, view: OwnershipView) -> bool:
    """Whether the reader saw the signer lead the job under the statement's term."""
    lead = view.owners.get(0)
    return (0, statement.term, statement.signer) in view.held or lead == (statement.signer, statement.term)


def _as_running(report: _Report) -> _Report:
    return replace(report, statement=replace(report.statement, state="running"))


def _standing(statement: Statement, view: OwnershipView) -> Standing:
    if _led(statement, view) and statement.state not in ENDED:
        return Standing.PROVEN
    if statement.signer == view.us or statement.signer in view.owned_one:
        return Standing.VOUCHED
    if statement.signer in view.successors or (view.law is not None and statement.signer in view.law.chosen):
        return Standing.VOUCHED
    if statement.state == "launching" and view.law is not None and statement.signer == view.law.author:
        return Standing.LAUNCHED
    return Standing.BARE


def _order(report: _Report) -> tuple[Any, ...]:
    """`job_order` of the statement; of equal ones the signer's own record goes first."""
    order = job_order(_with_statement(report))
    return *order[:4], report.own, *order[4:]


def _with_statement(report: _Report) -> JobRecord:
    """The record in which it arrived, with the figures of the statement."""
    statement = report.statement
    return replace(
        report.record, state=statement.state, term=statement.term, step=statement.step, snapshot=statement.snapshot,
        snapshot_step=statement.snapshot_step,
    )  # fmt: skip


def _belief(
    report: _Report,
    standing: Standing,
    reports: Sequence[_Report],
    view: OwnershipView,
    verify: Verify,
    *,
    known: bool,
) -> Belief:
    """The belief in that report. Not `known`: only that there is such a job, and nothing of how far it came."""
    record = _with_statement(report)
    final = _final(report.statement, view)
    if not known:
        blank = replace(record, state="running", term=0, step=0, snapshot=None, snapshot_step=-1)
        record = replace(blank, lead=None, message="")
    elif not report.own:  # nobody has signed the rest of the record for the statement's signer
        lead = view.owners.get(0)
        leads = report.state in ENDED or (lead is not None and lead[0] == report.signer)
        record = replace(record, lead=report.signer if leads and not final else None, message="")
    if not view.owners and not report.own and record.state == "running":
        record = replace(record, step=max(record.snapshot_step, 0))  # the step that the job can resume from
    if final:
        record = _stopped_at(record, reports, view)
    if view.law is not None:
        record = replace(record, stages=view.law.stages, name=view.law.name or record.name)
    carried = dict.fromkeys(each.data for each in reports if not each.own)
    record = replace(record, proof=latest_statements(carried, record.job, verify))
    return Belief(record=record, standing=standing, owned=bool(view.owners))


def _stopped_at(record: JobRecord, reports: Sequence[_Report], view: OwnershipView) -> JobRecord:
    """The author's statement that stops a job names no step: take the newest checkpoint that a vouched report names."""
    known = [report for report in reports if _standing(report.statement, view) >= Standing.VOUCHED]
    if not known:
        return record
    newest = max(
        known,
        key=lambda report: (report.term, report.statement.snapshot_step, report.statement.step),
    ).statement
    return replace(
        record, term=max(record.term, newest.term), step=max(record.step, newest.step), snapshot=newest.snapshot,
        snapshot_step=newest.snapshot_step,
    )  # fmt: skip
