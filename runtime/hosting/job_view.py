"""What this peer knows of the swarm's jobs and of their stages' owners, heartbeat by heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random

from cachetools import FIFOCache

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.belief.reading import Judgement, by_job, judgement
from fusion.runtime.device.accounts import payer
from fusion.runtime.device.new_job_pace import Offer
from fusion.runtime.hosting.hosted_stages import HostedStages
from fusion.runtime.hosting.jobs.board import JobBoard
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.manifest_shelf import ManifestShelf
from fusion.swarm.authority.belief import Belief
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.job_order import ENDED
from fusion.swarm.directory.records import ClaimRecord, JobId, JobRecord, Place
from fusion.swarm.transport import PeerId
from fusion.swarm.yielding import yielding

log = logging.getLogger(__name__)

NEWER_JOBS = 1024  # whose op-set the log has named already
JUDGED_AT_ONCE = 16  # jobs
AUTHORS = 4  # that can fill all places together: one alone gets a quarter of them
DOUBT_SECONDS = 10.0  # for the other owners to state the end as well, or for their claims to expire

OpenJob = tuple[JobRecord, Manifest]  # one that goes on, whose manifest is here and whose graph we can run
OpenJobs = Mapping[JobId, OpenJob]
RecordsByJob = Mapping[JobId, tuple[JobRecord, ...]]  # of each job, whoever published them
Manifests = Mapping[JobId, Manifest]
StagesClaims = Mapping[Place, tuple[ClaimRecord, ...]]  # the live claims of each stage that was read


class JobView:
    """Reads the claims of at most `places` stages that do not run here at a time. Work for a job runs beside `stages`;
    `arrived` is called when a manifest has arrived."""

    def __init__(
        self,
        context: Context,
        board: JobBoard,
        places: int,
        stages: HostedStages,
        arrived: Callable[[], None],
    ) -> None:
        self._context = context
        self._board = board
        self._doubted: dict[JobId, float] = {}  # since when
        self._places = places
        self._accepted: set[JobId] = set()  # whose manifests were here
        self._faults = stages.faults
        self._shelf = ManifestShelf(context, stages.spawn, arrived)
        self._newer: FIFOCache[JobId, None] = FIFOCache(NEWER_JOBS)
        self._judgements: dict[JobId, Judgement] = {}  # of the last heartbeat

    async def job_records(self, max_age_seconds: float) -> RecordsByJob:
        """All records in the directory of jobs that have not failed here."""
        found = by_job(await self._context.directory.job_records(max_age_seconds=max_age_seconds))
        records = {job: of_job for job, of_job in found.items() if job not in self._faults}
        self._shelf.keep_only(records)
        self._accepted &= records.keys()
        return records

    def manifests(self, records: RecordsByJob, own: Collection[JobId]) -> Manifests:
        """Those that are here of the jobs that may go on, or whose end we know of. Missing ones are fetched, of jobs that are new
        to us as `NewJobPace` allows. A job that needs a newer op-set than ours is left out: it goes on without us. `own`: the
        jobs that we have a part in."""
        found: dict[JobId, Manifest] = {}
        new: dict[JobId, list[JobRecord]] = {}
        for job, of_job in records.items():
            running = self._running(of_job)
            if running or job in own or self._board.has_tombstone(job):
                manifest = self._shelf.get(job)
                if manifest is None:
                    if job in own or job in self._accepted or self._board.record(job) is not None:
                        self._shelf.fetch((running or of_job)[0])
                    else:
                        new[job] = running or list(of_job)
                    continue
                with self._faults.isolated(job):
                    self._accept(job, manifest, of_job)
                    if self._supports_opset(job, manifest):
                        found[job] = manifest
        self._fetch_new(new)
        return found

    def _accept(self, job: JobId, manifest: Manifest, records: Iterable[JobRecord]) -> None:
        """From now on the job's law holds here, and it is charged to its author."""
        self._accepted.add(job)
        self._context.accounts.record_launch(job, manifest.author, records, self._context.directory.verify)
        self._context.leases.know(manifest.law(job))

    def _fetch_new(self, new: Mapping[JobId, Sequence[JobRecord]]) -> None:
        """Fetch the manifests of those of these jobs whose turn it is. Of a job's records the one counts whose payer was charged
        least: a stranger may publish records of any job."""
        pace, verify = self._context.pace, self._context.directory.verify
        offers, chosen = [], dict[JobId, JobRecord]()
        for job, records in new.items():
            payers = ((payer(record, verify), record) for record in records)
            least, chosen[job] = min(payers, key=lambda each: pace.charged(each[0]))
            offers.append(Offer(job, least))
        self._quick_random().shuffle(offers)  # the launcher of a job chooses how its id begins
        pace.take_up(offers, lambda job: self._shelf.fetch(chosen[job]))

    def _quick_random(self) -> Random:
        return Random(self._context.random.getrandbits(64))  # nobody gains by guessing it

    def _running(self, records: Iterable[JobRecord]) -> list[JobRecord]:
        """Those that state that the job goes on, unless we know of its end."""
        return [record for record in records if not is_over(record) and not self._board.over(record)]

    def _supports_opset(self, job: JobId, manifest: Manifest) -> bool:
        if manifest.opset <= OPSET_VERSION:
            return True
        if job not in self._newer:
            self._newer[job] = None
            what = (manifest.name, manifest.opset, OPSET_VERSION)
            log.warning("job %s needs op-set %d: this peer knows %d and leaves it to newer ones", *what)
        return False

    async def claims(
        self, known: Manifests, records: RecordsByJob, hosted: Collection[Place], own: Collection[JobId]
    ) -> StagesClaims:
        """The claims of `stages_to_read`, and of those that run here, in `hosted`: these are read with every renewal."""
        leases, free_bytes = self._context.leases, self._context.memory.free_bytes
        jobs = {job: known[job] for job in known if job in own or self._running(records[job])}
        # Whether a job has ended that one record states to have: that takes the claims of all its owners.
        disputed = {job for job in jobs if any(map(is_over, records[job]))}
        context, concerned, random = self._context, {*own, *disputed}, self._quick_random()
        us, of, most = context.peer_id, context.accounts.of, self._places
        places = stages_to_read(jobs, hosted, concerned, us, free_bytes, random, most, of)
        claims = await asyncio.gather(*(leases.claims(*place) for place in places))
        recent = {place: leases.recent(*place) for place in hosted if place[0] in known}
        return {**dict(zip(places, claims, strict=True)), **recent}

    async def beliefs(
        self, records: RecordsByJob, known: Manifests, claims: StagesClaims
    ) -> dict[JobId, Belief]:
        """What to believe of all jobs, by these live claims of their stages. Yields to other tasks meanwhile: each job takes a
        tenth of a millisecond and more, and there may be thousands."""
        by_stage: dict[JobId, dict[int, tuple[ClaimRecord, ...]]] = {}
        for (job, stage), live in claims.items():
            by_stage.setdefault(job, {})[stage] = live
        found: dict[JobId, Belief] = {}
        judgements: dict[JobId, Judgement] = {}
        async for job, of_job in yielding(records.items(), JUDGED_AT_ONCE):
            previous = self._judgements.get(job)
            with self._faults.isolated(job):
                judgements[job] = judgement(
                    self._context, job, of_job, known.get(job), by_stage.get(job, {}), previous
                )
                belief = judgements[job].belief
                assert belief is not None, "there is a record of the job"
                found[job] = belief
                self._context.leases.observe(job, 0, belief.term)
        self._judgements = judgements
        return found

    def open_jobs(self, beliefs: Mapping[JobId, Belief], known: Manifests) -> OpenJobs:
        """Those that go on, as far as their manifests are here. One that an owner states to have ended is left out for
        DOUBT_SECONDS: the other owners may be about to state the same."""
        now, jobs = self._context.clock.monotonic(), {}
        self._doubted = {
            job: since for job, since in self._doubted.items() if job in beliefs and beliefs[job].doubted
        }
        for job, belief in beliefs.items():
            in_doubt = belief.doubted and now - self._doubted.setdefault(job, now) < DOUBT_SECONDS
            known_over = self._board.over(belief.record)
            unproven = self._board.has_tombstone(job) and not belief.vouched
            if job in known and not (belief.over or in_doubt or known_over or unproven):
                jobs[job] = (belief.record, known[job])
        return jobs

    async def leaderless(
        self, own: Collection[JobId], hosted: Collection[Place], claims: StagesClaims
    ) -> set[JobId]:
        """Those of our jobs whose first stage has no owner."""
        others = [job for job in own if (job, 0) not in hosted]
        unread = [job for job in others if (job, 0) not in claims]
        read = await asyncio.gather(*(self._context.leases.claims(job, 0) for job in unread))
        leads = dict(zip(unread, read, strict=True))
        return {job for job in others if winner(leads[job] if job in leads else claims[job, 0]) is None}


def is_over(record: JobRecord) -> bool:
    """Whether it states that the job has ended."""
    return record.state in ENDED


def stages_to_read(
    jobs: Manifests,
    hosted: Collection[Place],
    own: Collection[JobId],
    us: PeerId,
    free_memory_bytes: int,
    random: Random,
    most: int,
    account: Callable[[JobId, PeerId], PeerId],
) -> list[Place]:
    """At most `most` stages whose claims to read: those that we might host, and all of our `own` jobs (when an owner vanishes
    we should know its standbys). Round robin over the accounts that the jobs are charged to, each with no more than its
    share: each read costs us, and the peers that store the claims. Of each account first the stages that were proposed to
    us, then those of our own jobs, at random within each: where there are too many, others next time. Of a job of
    thousands of stages only a share is drawn, as ordering all would take too long."""
    share = max(1, most // AUTHORS)
    by_author: dict[PeerId, list[tuple[bool, bool, Place]]] = {}
    for job, manifest in jobs.items():
        proposed = [stage for stage, peer in enumerate(manifest.proposed) if peer == us]
        for stage in dict.fromkeys(
            _some(proposed, share, random) + _some(range(manifest.stages), share, random)
        ):
            fits = job in own or manifest.needed_bytes(stage) <= free_memory_bytes
            if fits and (job, stage) not in hosted:
                entry = (manifest.proposed[stage] != us, job not in own, (job, stage))
                by_author.setdefault(account(job, manifest.author), []).append(entry)
    turns: list[tuple[int, bool, bool, Place]] = []
    for places in by_author.values():
        random.shuffle(places)
        places.sort(key=lambda entry: entry[:2])
        turns += [(turn, *entry) for turn, entry in enumerate(places[:share])]
    turns.sort(key=lambda entry: entry[:3])
    return [place for *_, place in turns[:most]]


def _some(stages: Sequence[int], most: int, random: Random) -> list[int]:
    return random.sample(stages, most) if len(stages) > most else list(stages)
