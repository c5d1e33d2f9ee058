"""What goes with a job record that we publish, so that others believe it: our own statement of it, those of others, lists of grants
taken back, and what shows that we followed those whom the author proposed. A record has a limit, so some give way to others.
"""

from __future__ import annotations

from dataclasses import replace

from cachetools import FIFOCache

from fusion.runtime.hosting.jobs.board import JobBoard
from fusion.runtime.job.context import Context
from fusion.swarm.authority.statements import (
    CARRIED,
    Statement,
    latest_statements,
    seal_statement,
    statement_of,
)
from fusion.swarm.directory.job_order import ENDED
from fusion.swarm.directory.records import JobId, JobRecord

STATED_JOBS = 1024  # of which we remember our last statement
REVOCATIONS = 2  # lists that a record carries
# How many statements give way to a list, and to a succession.
STATEMENTS_FOR_LIST, STATEMENTS_FOR_SUCCESSION = 3, 2


class RecordProofs:
    def __init__(self, context: Context, board: JobBoard) -> None:
        self._context = context
        self._board = board
        self._stated: FIFOCache[JobId, tuple[Statement, bytes]] = FIFOCache(STATED_JOBS)  # the last of each

    def signed(self, record: JobRecord) -> JobRecord:
        """With our own statement, where we lead the job or know of its end: others may repeat it when we are gone. Of a
        job that goes on and that we do not lead we carry what those said who did."""
        if record.state not in ENDED and not self._board.leads(record.job):
            return self.repeated(record)
        us, directory = self._context.peer_id, self._context.directory
        ours = self._statement(record)
        revoked = self._lists(record.job)
        statements = latest_statements((ours, *record.proof), record.job, directory.verify)
        chain = self._context.seen.chain(record.job, us)
        room = CARRIED - STATEMENTS_FOR_LIST * len(revoked) - STATEMENTS_FOR_SUCCESSION * len(chain)
        room -= record.state not in ENDED  # for what is carried
        proof = (*statements[: max(room, 1)], *revoked, *chain)
        return self._context.accounts.carried(replace(record, proof=proof))

    def repeated(self, record: JobRecord) -> JobRecord:
        """Somebody else's word, or one for our disk."""
        return self._context.accounts.carried(self._with_lists(record))

    def _with_lists(self, record: JobRecord) -> JobRecord:
        """With the lists of grants taken back that we know of: when the lead is gone, or everybody, nothing else tells of them."""
        revoked = self._lists(record.job)
        if set(revoked) <= set(record.proof):
            return record
        statements = latest_statements(record.proof, record.job, self._context.directory.verify)
        room = CARRIED - STATEMENTS_FOR_LIST * len(revoked) - 1  # for what is carried
        return replace(record, proof=(*statements[:room], *revoked))

    def _lists(self, job: JobId) -> tuple[bytes, ...]:
        return self._context.access.revocations(job)[:REVOCATIONS]

    def _statement(self, record: JobRecord) -> bytes:
        """What the record says, signed by us: as it was signed before where it says the same."""
        now = statement_of(record, self._context.peer_id, self._context.directory.now())
        known = self._stated.get(record.job)
        if known is None or replace(now, at=known[0].at) != known[0]:
            known = self._stated[record.job] = now, seal_statement(now, self._context.directory.sign)
        return known[1]
