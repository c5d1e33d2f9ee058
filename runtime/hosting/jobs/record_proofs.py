"""What a job record that we publish carries as proof: our own signed statement of it, those of others, lists of revoked grants,
and the chain from the owners that the author proposed to us. A record has a limit, so some give way to others.
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

STATED_JOBS = 1024  # whose last statement of ours is remembered
REVOCATIONS = 2  # lists that a record carries
# How many statements give way to a list, and to a link of the chain.
STATEMENTS_FOR_LIST, STATEMENTS_FOR_SUCCESSION = 3, 2


class RecordProofs:
    def __init__(self, context: Context, board: JobBoard) -> None:
        self._context = context
        self._board = board
        self._stated: FIFOCache[JobId, tuple[Statement, bytes]] = FIFOCache(STATED_JOBS)  # the last of each

    def signed(self, record: JobRecord) -> JobRecord:
        """The record with its proof. Where we lead the job or know of its end, that includes our own statement, which others
        may carry when we are gone; of a job that others lead, their statements."""
        if record.state not in ENDED and not self._board.leads(record.job):
            return self.republished(record)
        us, directory = self._context.peer_id, self._context.directory
        own = self._statement(record)
        revoked = self._lists(record.job)
        statements = latest_statements((own, *record.proof), record.job, directory.verify)
        chain = self._context.seen.chain(record.job, us)
        room = CARRIED - STATEMENTS_FOR_LIST * len(revoked) - STATEMENTS_FOR_SUCCESSION * len(chain)
        room -= record.state not in ENDED  # for the author's launch
        proof = (*statements[: max(room, 1)], *revoked, *chain)
        return self._context.accounts.carried(replace(record, proof=proof))

    def republished(self, record: JobRecord) -> JobRecord:
        """With the proof of another peer's record, or of one for our disk."""
        return self._context.accounts.carried(self._with_lists(record))

    def _with_lists(self, record: JobRecord) -> JobRecord:
        """With the lists of revoked grants that we know of: when the lead is gone, or all peers were, there is no other copy."""
        revoked = self._lists(record.job)
        if set(revoked) <= set(record.proof):
            return record
        statements = latest_statements(record.proof, record.job, self._context.directory.verify)
        room = CARRIED - STATEMENTS_FOR_LIST * len(revoked) - 1  # for the author's launch
        return replace(record, proof=(*statements[:room], *revoked))

    def _lists(self, job: JobId) -> tuple[bytes, ...]:
        return self._context.access.revocations(job)[:REVOCATIONS]

    def _statement(self, record: JobRecord) -> bytes:
        """The record's fields, signed by us; the same bytes as before where they have not changed."""
        now = statement_of(record, self._context.peer_id, self._context.directory.now())
        known = self._stated.get(record.job)
        if known is None or replace(now, at=known[0].at) != known[0]:
            known = self._stated[record.job] = now, seal_statement(now, self._context.directory.sign)
        return known[1]
