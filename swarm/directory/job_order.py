"""Which of two records of one job is newer: one order for reading, repeating and storing them. Pure.

Job records come from the job's lead, or from a peer that repeats one. The greatest wins, by

1. the higher term: a later lead knows what came before;
2. the later state: a job does not go on after its end, so running at step 100 never beats done at step 99;
3. the newer snapshot, which no later lead may lose, then the higher step;
4. the lead's own record before one that repeats it; the rest only makes the order total.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import JobId, JobRecord

# Longer than a claim: a job's record must outlive the claim of the lead that vanished, or there would be a moment in
# which no record of the job exists.
JOB_TTL_SECONDS = 6 * HEARTBEAT_SECONDS

ENDED = frozenset({"done", "stopped", "failed"})
_STATES = ("launching", "running", "failed", "stopped", "done")  # from the earliest to the last


def job_order(record: JobRecord) -> tuple[Any, ...]:
    """The key to sort the records of one job by; two that differ never have the same."""
    progressed = (record.snapshot_step, record.step)
    author = (record.author == record.lead, record.author, record.lead or "", record.snapshot or "")
    rest = (record.message, record.name, record.kind, record.stages)
    return record.term, _STATES.index(record.state), *progressed, *author, *rest


def newest_jobs(records: Iterable[JobRecord]) -> tuple[JobRecord, ...]:
    """The greatest record of each job by `job_order`, in the order of job ids."""
    best: dict[JobId, JobRecord] = {}
    for record in records:
        if record.job not in best or job_order(record) > job_order(best[record.job]):
            best[record.job] = record
    return tuple(best[job] for job in sorted(best))
