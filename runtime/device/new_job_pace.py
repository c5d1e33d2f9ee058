"""Rate limit for jobs that are new to a peer: a token bucket of processor seconds, so that offers of jobs cost a busy peer a
bounded share of its time, however many there are. Pure.

To take up a job is to read its manifest. What follows (claiming a stage, loading it, standing by for it) is charged but not delayed: a
stage that needs another owner gets one at once. All of it together takes SHARE of the time, from any number of authors: identities are
free, so a share for each would not bound the sum. The bucket is BURST_SECONDS deep, so that the first jobs after a quiet time
do not wait. Authors take turns, the one that was charged least recently first: a new one does not wait behind the many jobs of
another, nor for longer than it takes to pay DEBT_SECONDS off, however much one of them cost.

An author whose jobs are all that this peer runs delays no others, and does not wait. A manifest may name any author: the signer of
a job's launch pays for it, or else the author of the record by which it was taken up (`fusion.runtime.device.accounts.payer`).

The time to read and check graphs is measured (`fusion.runtime.job.context.Context.work_for`). The rest is many small costs in the
loop, in p2pd and at the peers that store records, alike for all jobs, and charged at the fixed prices below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cachetools import LRUCache

from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

SHARE = 0.04  # of the time
BURST_SECONDS = 0.4
DEBT_SECONDS = 0.8
REMEMBERED = 4096  # authors, and jobs: those that were charged, or taken up, last

# Of a slow core, for a job of one small stage: measured with 180 jobs at three peers.
READ_SECONDS = 0.02  # a manifest: looked up, fetched, stored and announced
STAGE_SECONDS = 0.1  # a claim, with loading and publishing
STANDBY_SECONDS = 0.05  # a standby


class Offer(NamedTuple):
    """A job that was not taken up yet, and the account that pays for reading its manifest."""

    job: JobId
    author: PeerId


class NewJobPace:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Whether this peer has work of other authors.
        self.beside: Callable[[PeerId], bool] = lambda author: False
        self._clock = clock
        self._left, self._at = BURST_SECONDS, clock()
        # (debt, time) of each author: the debt shrinks by SHARE of the time.
        self._charged: LRUCache[PeerId, tuple[float, float]] = LRUCache(REMEMBERED)
        self._payers: LRUCache[JobId, PeerId] = LRUCache(REMEMBERED)  # of jobs that were taken up

    def take_up(self, offers: Iterable[Offer], begin: Callable[[JobId], bool]) -> None:
        """Call `begin` with the jobs that may be taken up now, in the order given among equals. It returns whether it has begun to read;
        then READ_SECONDS are charged."""
        by_author: dict[PeerId, list[JobId]] = {}
        for job, author in offers:
            by_author.setdefault(author, []).append(job)
        waiting: list[tuple[float, int, PeerId, JobId]] = []
        for author, jobs in by_author.items():
            if not self.beside(author):
                for job in filter(begin, jobs):
                    self._begun(job, author)
                continue
            charged = self.charged(author)
            for turn, job in enumerate(jobs):
                waiting.append((charged + READ_SECONDS * turn, len(waiting), author, job))
        begun = 0
        for *_, author, job in sorted(waiting):
            if self.left_seconds <= begun * STAGE_SECONDS:  # the cost that may follow each
                break
            if begin(job):
                self._begun(job, author)
                begun += 1

    def _begun(self, job: JobId, author: PeerId) -> None:
        self._payers[job] = author
        self.charge(job, author, READ_SECONDS)

    def charge(self, job: JobId, author: PeerId, seconds: float) -> None:
        """Charge seconds of computing for a job, whose manifest names `author`, to the account that paid for its manifest."""
        payer = self._payers.get(job, author)
        self._charged[payer] = self.charged(payer) + seconds, self._clock()
        if self.beside(payer):
            self._left, self._at = max(-DEBT_SECONDS, self.left_seconds - seconds), self._clock()

    @property
    def left_seconds(self) -> float:
        """Seconds in the bucket; below 0 after jobs that cost more than was left."""
        return min(BURST_SECONDS, self._left + SHARE * (self._clock() - self._at))

    def charged(self, author: PeerId) -> float:
        """The author's debt in seconds: its charges, less SHARE of the time since."""
        seconds, at = self._charged.get(author, (0.0, 0.0))
        return max(0.0, seconds - SHARE * (self._clock() - at))
