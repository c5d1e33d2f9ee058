"""What this peer sees of the swarm's jobs and of who has their stages, from look to look."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random

from cachetools import FIFOCache

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.belief.reading import Judgement, by_job, judgement
from fusion.runtime.device.accounts import speaker
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

NEWER_JOBS = 1024  # that were named to whoever reads our log
JUDGED_AT_ONCE = 16  # jobs
AUTHORS = 4  # that can fill all looks together: one alone has a quarter of them
DOUBT_SECONDS = 10.0  # for the other owners to say so as well, or for their claims to run out

OpenJob = tuple[JobRecord, Manifest]  # one that goes on, whose manifest is here and whose graph we can run
OpenJobs = Mapping[JobId, OpenJob]
RecordsByJob = Mapping[JobId, tuple[JobRecord, ...]]  # all that are published on each job
Manifests = Mapping[JobId, Manifest]
StagesClaims = Mapping[Place, tuple[ClaimRecord, ...]]  # the live claims of each stage that was looked at


class JobView:
    """At most `places` stages that others have, or nobody, are looked at at once. Work for a job runs beside `stages`;
    `arrived` is called when a manifest has come."""

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
        self._taken_up: set[JobId] = set()  # whose manifests were here
        self._faults = stages.faults
        self._shelf = ManifestShelf(context, stages.spawn, arrived)
        self._newer: FIFOCache[JobId, None] = FIFOCache(NEWER_JOBS)
        self._judged: dict[JobId, Judgement] = {}  # by the last look

    async def job_records(self, max_age_seconds: float) -> RecordsByJob:
        """What the directory says of all jobs that have not failed here, whoever says it."""
        found = by_job(await self._context.directory.job_records(max_age_seconds=max_age_seconds))
        records = {job: said for job, said in found.items() if job not in self._faults}
        self._shelf.keep_only(records)
        self._taken_up &= records.keys()
        return records

    def manifests(self, records: RecordsByJob, ours: Collection[JobId]) -> Manifests:
        """Those of the jobs that may go on, or whose end we know of, as far as they are here (the others' are fetched, of
        jobs that are new to us when it is their turn) and ask for no newer op-set than ours: in such a job we have no
        part, and it goes on without us."""
        found: dict[JobId, Manifest] = {}
        offered: dict[JobId, list[JobRecord]] = {}
        for job, said in records.items():
            going = self._going(said)
            if going or job in ours or self._board.buried(job):
                manifest = self._shelf.get(job)
                if manifest is None:
                    if job in ours or job in self._taken_up or self._board.record(job) is not None:
                        self._shelf.fetch((going or said)[0])
                    else:
                        offered[job] = going or list(said)
                    continue
                with self._faults.isolated(job):
                    self._know(job, manifest, said)
                    if self._runs(job, manifest):
                        found[job] = manifest
        self._take_up(offered)
        return found

    def _know(self, job: JobId, manifest: Manifest, said: Iterable[JobRecord]) -> None:
        """From now on the job's law holds here, and it is charged to its author."""
        self._taken_up.add(job)
        self._context.accounts.record_launch(job, manifest.author, said, self._context.directory.verify)
        self._context.leases.know(manifest.law(job))

    def _take_up(self, offered: Mapping[JobId, Sequence[JobRecord]]) -> None:
        """Fetch the manifests of those of these jobs whose turn it is, that of whoever had least of those who speak of one: a
        stranger may speak of any."""
        pace, verify = self._context.pace, self._context.directory.verify
        offers, chosen = [], dict[JobId, JobRecord]()
        for job, said in offered.items():
            payer, chosen[job] = min(
                ((speaker(record, verify), record) for record in said), key=lambda said: pace.charged(said[0])
            )
            offers.append(Offer(job, payer))
        self._quick_random().shuffle(offers)  # whoever launches a job chooses how its id begins
        pace.take_up(offers, lambda job: self._shelf.fetch(chosen[job]))

    def _quick_random(self) -> Random:
        return Random(self._context.random.getrandbits(64))  # nobody gains by guessing it

    def _going(self, said: Iterable[JobRecord]) -> list[JobRecord]:
        """The records of those who say that the job goes on, where we do not know better."""
        return [record for record in said if not is_over(record) and not self._board.over(record)]

    def _runs(self, job: JobId, manifest: Manifest) -> bool:
        if manifest.opset <= OPSET_VERSION:
            return True
        if job not in self._newer:
            self._newer[job] = None
            what = (manifest.name, manifest.opset, OPSET_VERSION)
            log.warning("job %s needs op-set %d: this peer knows %d and leaves it to newer ones", *what)
        return False

    async def claims(
        self, known: Manifests, records: RecordsByJob, hosted: Collection[Place], ours: Collection[JobId]
    ) -> StagesClaims:
        """The claims of `stages_to_read`, and of those that run here, in `hosted`: these are read with every renewal."""
        leases, free_bytes = self._context.leases, self._context.memory.free_bytes
        # Whether a job of which somebody says so has ended, all its owners tell.
        jobs = {job: known[job] for job in known if job in ours or self._going(records[job])}
        disputed = {job for job in jobs if any(map(is_over, records[job]))}
        context, concerned, random = self._context, {*ours, *disputed}, self._quick_random()
        us, of, most = context.peer_id, context.accounts.of, self._places
        places = stages_to_read(jobs, hosted, concerned, us, free_bytes, random, most, of)
        claims = await asyncio.gather(*(leases.claims(*place) for place in places))
        recent = {place: leases.recent(*place) for place in hosted if place[0] in known}
        return {**dict(zip(places, claims, strict=True)), **recent}

    async def beliefs(
        self, records: RecordsByJob, known: Manifests, claims: StagesClaims
    ) -> dict[JobId, Belief]:
        """What to believe of all jobs, by these live claims of their stages. Others run meanwhile: each job takes a tenth of a
        millisecond and more, and there may be thousands."""
        read: dict[JobId, dict[int, tuple[ClaimRecord, ...]]] = {}
        for (job, stage), held in claims.items():
            read.setdefault(job, {})[stage] = held
        found: dict[JobId, Belief] = {}
        judged: dict[JobId, Judgement] = {}
        async for job, said in yielding(records.items(), JUDGED_AT_ONCE):
            before = self._judged.get(job)
            with self._faults.isolated(job):
                judged[job] = judgement(self._context, job, said, known.get(job), read.get(job, {}), before)
                belief = judged[job].belief
                assert belief is not None, "somebody speaks of the job"
                found[job] = belief
                self._context.leases.observe(job, 0, belief.term)
        self._judged = judged
        return found

    def open_jobs(self, beliefs: Mapping[JobId, Belief], known: Manifests) -> OpenJobs:
        """Those that go on, as far as their manifests are here. One of which an owner says that it has ended is left alone
        for a while: the others may be about to say so, too."""
        now, jobs = self._context.clock.monotonic(), {}
        self._doubted = {
            job: since for job, since in self._doubted.items() if job in beliefs and beliefs[job].doubted
        }
        for job, belief in beliefs.items():
            young = belief.doubted and now - self._doubted.setdefault(job, now) < DOUBT_SECONDS
            buried = self._board.over(belief.record) or (self._board.buried(job) and not belief.vouched)
            if job in known and not belief.over and not young and not buried:
                jobs[job] = (belief.record, known[job])
        return jobs

    async def leaderless(
        self, ours: Collection[JobId], hosted: Collection[Place], claims: StagesClaims
    ) -> set[JobId]:
        """Those of our jobs whose first stage nobody owns."""
        others = [job for job in ours if (job, 0) not in hosted]
        unread = [job for job in others if (job, 0) not in claims]
        read = await asyncio.gather(*(self._context.leases.claims(job, 0) for job in unread))
        leads = dict(zip(unread, read, strict=True))
        return {job for job in others if winner(leads[job] if job in leads else claims[job, 0]) is None}


def is_over(record: JobRecord) -> bool:
    """Whether it says that the job has ended."""
    return record.state in ENDED


def stages_to_read(
    jobs: Manifests,
    hosted: Collection[Place],
    ours: Collection[JobId],
    us: PeerId,
    free_memory_bytes: int,
    random: Random,
    most: int,
    account: Callable[[JobId, PeerId], PeerId],
) -> list[Place]:
    """At most `most` stages whose claims we should know: those that we might host, and all of the jobs that we have a hand
    in (when an owner vanishes we should know its standbys). Authors take turns, and none has more than a share: a look
    costs us, and those who keep the claims, something, whoever else there is. Of each author first what was proposed to
    us, then what is of `ours`. Where there are too many, others next time: of a job of thousands of stages no more than
    the share are drawn, not all of them ordered."""
    share = max(1, most // AUTHORS)
    by_author: dict[PeerId, list[tuple[bool, bool, Place]]] = {}
    for job, manifest in jobs.items():
        proposed = [stage for stage, peer in enumerate(manifest.proposed) if peer == us]
        for stage in dict.fromkeys(
            _some(proposed, share, random) + _some(range(manifest.stages), share, random)
        ):
            fits = job in ours or manifest.needed_bytes(stage) <= free_memory_bytes
            if fits and (job, stage) not in hosted:
                entry = (manifest.proposed[stage] != us, job not in ours, (job, stage))
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
