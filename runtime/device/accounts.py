"""Whom what a job costs this peer is charged to. Pure.

Seats, looks and time of the device are shared out among the authors of jobs, and a manifest names any author that its writer likes.
So a job is its author's only once something on it was seen that the author signed: its launch. All other jobs are one account
together, however many authors they name.

Whoever speaks of a job carries that signature on (`carried`), long after the launcher has left, in a form in which it is no word on
how the job stands: that it was launched once must not count beside what became of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from cachetools import LRUCache

from fusion.runtime.device.share import Whose
from fusion.swarm.authority.statements import Statement, open_statements
from fusion.swarm.directory.job_order import ENDED
from fusion.swarm.directory.records import MAX_STATEMENTS, JobId, JobRecord
from fusion.swarm.identity import Verify
from fusion.swarm.transport import PeerId

UNSIGNED = PeerId("unsigned")  # the account of jobs whose authors have not signed
REMEMBERED = 4096  # jobs
MARK = b"author:"  # before a statement that only shows who signed it


class Accounts:
    """Of all jobs that this process hears of; those that it asked for last are remembered."""

    def __init__(self) -> None:
        # The author that has signed, and what; nothing where it said so itself.
        self._signed: LRUCache[JobId, tuple[PeerId, tuple[bytes, ...]]] = LRUCache(REMEMBERED)

    def record_launch(self, job: JobId, author: PeerId, records: Iterable[JobRecord], verify: Verify) -> None:
        """From records of the job, signed by their own authors; its manifest names `author`."""
        known = self._signed.get(job, (None, ()))
        if known[0] == author and known[1]:
            return
        for record in records:
            signed = [data for said, data in launches_of(record, verify) if said.signer == author]
            if signed:
                self._signed[job] = author, (MARK + signed[0],)
                return
            if record.author == author and record.state == "launching":
                self._signed[job] = author, ()

    def of(self, job: JobId, author: PeerId) -> PeerId:
        """The account of a job whose manifest names `author`."""
        return author if self._signed.get(job, ("", ()))[0] == author else UNSIGNED

    def carried(self, record: JobRecord) -> JobRecord:
        """The word with what its job's author signed, if that was heard and the job goes on."""
        _, shown = self._signed.get(record.job, ("", ()))
        if record.state in ENDED or set(shown) <= set(record.proof):
            return record
        return replace(record, proof=(*record.proof[: MAX_STATEMENTS - 1], *shown))

    def whose(self, job: JobId, author: PeerId, *, serves: bool = False) -> Whose:
        """For what the job computes on the device."""
        return Whose(self.of(job, author), job, serves)


def payer(record: JobRecord, verify: Verify) -> PeerId:
    """Who answers for a word on a job whose manifest is not here: whoever signed that it was launched, if anybody did."""
    launches = launches_of(record, verify)
    return launches[0][0].signer if launches else record.author


def launches_of(
    record: JobRecord, verify: Verify, matters: Callable[[PeerId], bool] = lambda signer: True
) -> list[tuple[Statement, bytes]]:
    """That the job was launched, as the record carries it; signatures are checked only of who `matters`. Nothing else counts: a
    manifest may name a peer that runs the job, and signs words on it for that reason."""
    plain = [data.removeprefix(MARK) for data in record.proof]
    return open_statements(
        plain, record.job, verify, lambda said: said.state == "launching" and matters(said.signer)
    )
