"""The accounts that the cost of jobs is charged to. Pure.

Stages, directory reads and device time are shared among the authors of jobs, and a manifest may name any author. So a job is
charged to its author only once this peer has seen the author's signature on its launch. All other jobs share one account, however
many authors they name.

Records of a job carry that signature (`carried`), long after the launcher has left, with a mark that keeps it from counting as a
statement of the job's state, which may have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from cachetools import LRUCache

from fusion.runtime.device.share import Caller
from fusion.swarm.authority.statements import Statement, open_statements
from fusion.swarm.directory.job_order import ENDED
from fusion.swarm.directory.records import MAX_STATEMENTS, JobId, JobRecord
from fusion.swarm.identity import Verify
from fusion.swarm.transport import PeerId

UNSIGNED = PeerId("unsigned")  # the account of jobs whose authors have not signed
REMEMBERED = 4096  # jobs
MARK = b"author:"  # before a statement that only shows who signed it


class Accounts:
    """The accounts of all jobs that this process sees records of; the most recently used ones are cached."""

    def __init__(self) -> None:
        # The author that has signed, and the signed launch; none where the author's own record was seen.
        self._signed: LRUCache[JobId, tuple[PeerId, tuple[bytes, ...]]] = LRUCache(REMEMBERED)

    def record_launch(self, job: JobId, author: PeerId, records: Iterable[JobRecord], verify: Verify) -> None:
        """Look for the author's launch in records of the job, which are signed by their own authors; the manifest names `author`."""
        known = self._signed.get(job, (None, ()))
        if known[0] == author and known[1]:
            return
        for record in records:
            signed = [data for launch, data in launches_of(record, verify) if launch.signer == author]
            if signed:
                self._signed[job] = author, (MARK + signed[0],)
                return
            if record.author == author and record.state == "launching":
                self._signed[job] = author, ()

    def of(self, job: JobId, author: PeerId) -> PeerId:
        """The account of a job whose manifest names `author`."""
        return author if self._signed.get(job, ("", ()))[0] == author else UNSIGNED

    def carried(self, record: JobRecord) -> JobRecord:
        """The record with its author's signed launch as proof, if that was seen and the job goes on."""
        _, launch = self._signed.get(record.job, ("", ()))
        if record.state in ENDED or set(launch) <= set(record.proof):
            return record
        return replace(record, proof=(*record.proof[: MAX_STATEMENTS - 1], *launch))

    def caller(self, job: JobId, author: PeerId, *, serves: bool = False) -> Caller:
        """The caller of a job's device calls."""
        return Caller(self.of(job, author), job, serves)


def payer(record: JobRecord, verify: Verify) -> PeerId:
    """The account for fetching the manifest of a record's job: the signer of its launch, or else the record's author."""
    launches = launches_of(record, verify)
    return launches[0][0].signer if launches else record.author


def launches_of(
    record: JobRecord, verify: Verify, matters: Callable[[PeerId], bool] = lambda signer: True
) -> list[tuple[Statement, bytes]]:
    """The signed launches that the record carries, of signers that `matters`; only their signatures are verified. Other statements
    do not count: a manifest may name as its author a peer that runs the job, and signs statements for that reason."""
    plain = [data.removeprefix(MARK) for data in record.proof]
    return open_statements(
        plain, record.job, verify, lambda each: each.state == "launching" and matters(each.signer)
    )
