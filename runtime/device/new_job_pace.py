"""How fast a peer with work of others takes up jobs that are new to it: what offers cost it in a second is bounded, whatever is
offered. Pure.

To take a job up is to read its manifest. What follows, a claim of a stage, loading it, standing by for it, is not held up but
charged: a stage that needs another owner gets one at once. All of it together takes SHARE of the time, whoever offers:
identities are free, so no share of each would bound them. It is a token bucket of seconds, BURST_SECONDS deep, so that the first jobs
after a quiet time wait for nothing. Authors take turns, whoever was charged least in the last while first: a new one
does not wait behind the many jobs of another, nor for longer than it takes to pay DEBT_SECONDS off, however much one of them cost.

An author whose jobs are all that this peer runs holds up nobody, and waits for nothing. Anybody may write a manifest in the name of
another: whoever signed that a job was launched pays for it, or else whoever spoke of it when it was taken up
(`fusion.runtime.device.accounts`).

What reading and checking graphs takes is measured (`fusion.runtime.job.context.Context.work_for`). The rest are many small things in
the loop, in p2pd and at the peers that keep records, alike for all jobs, and has a price.
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

# Of a slow core, for a job of one small stage: what was seen of 180 jobs at three peers.
READ_SECONDS = 0.02  # a manifest: found, fetched, kept and announced
STAGE_SECONDS = 0.1  # one that is claimed, loaded, and told of
STANDBY_SECONDS = 0.05  # one that is stood by for


class Offer(NamedTuple):
    """A job that was not taken up yet, and whoever speaks of it."""

    job: JobId
    author: PeerId


class NewJobPace:
    """`clock` gives seconds that only rise."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Whether this peer has work of others than that author.
        self.beside: Callable[[PeerId], bool] = lambda author: False
        self._clock = clock
        self._left, self._at = BURST_SECONDS, clock()
        # What each was charged and has not made up for by waiting, and when that was so.
        self._charged: LRUCache[PeerId, tuple[float, float]] = LRUCache(REMEMBERED)
        self._spoke: LRUCache[JobId, PeerId] = LRUCache(REMEMBERED)  # of a job that was taken up

    def take_up(self, offers: Iterable[Offer], begin: Callable[[JobId], bool]) -> None:
        """`begin` with those of the jobs whose turn it is, in the order given among equals; of those that it says to have
        begun the manifest is paid for."""
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
            if self.left_seconds <= begun * STAGE_SECONDS:  # which is what may follow
                break
            if begin(job):
                self._begun(job, author)
                begun += 1

    def _begun(self, job: JobId, author: PeerId) -> None:
        self._spoke[job] = author
        self.charge(job, author, READ_SECONDS)

    def charge(self, job: JobId, author: PeerId, seconds: float) -> None:
        """So much is computed for a job whose manifest names that author, or was."""
        payer = self._spoke.get(job, author)
        self._charged[payer] = self.charged(payer) + seconds, self._clock()
        if self.beside(payer):
            self._left, self._at = max(-DEBT_SECONDS, self.left_seconds - seconds), self._clock()

    @property
    def left_seconds(self) -> float:
        """That new jobs may cost now; below 0 where they cost more than they might."""
        return min(BURST_SECONDS, self._left + SHARE * (self._clock() - self._at))

    def charged(self, author: PeerId) -> float:
        """Seconds, less what a share of the time since has made up for."""
        seconds, at = self._charged.get(author, (0.0, 0.0))
        return max(0.0, seconds - SHARE * (self._clock() - at))
