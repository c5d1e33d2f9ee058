"""A peer at work: it looks for jobs in the directory, claims stages and runs them.

What it knows of jobs is the `board`'s in `fusion.runtime.hosting.jobs`, what it says of them `gossip`'s beside it. Which
stages to claim is decided by `claim_choice` and `fusion.swarm.claims.election`, which ones to stand by for by
`standby_pool`. Who sees an owner vanish comes through `takeover`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fusion.runtime.hosting.claim_choice import (
    VacantStage,
    beside_the_idle,
    one_each,
    one_early,
    stages_to_claim,
)
from fusion.runtime.hosting.handover import HandoverConfig, Handovers, Hosted
from fusion.runtime.hosting.jobs.board import JobBoard
from fusion.runtime.hosting.jobs.files import JobFiles, KeptWords
from fusion.runtime.hosting.jobs.gossip import JobGossip
from fusion.runtime.hosting.jobs.server import JobServer, stop_request
from fusion.runtime.hosting.jobs.service import Service
from fusion.runtime.hosting.standby_pool import Pool
from fusion.runtime.hosting.takeover import Takeovers
from fusion.runtime.hosting.vacant_stages import VacantStages
from fusion.runtime.job.context import Context
from fusion.runtime.job.cool_down import CoolDown
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.manifest_shelf import ManifestShelf, ShelfConfig
from fusion.runtime.job.progress import Progress
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.api import GLANCE_SECONDS, HEARTBEAT_SECONDS
from fusion.swarm.directory.job_order import ENDED, newest_jobs
from fusion.swarm.directory.records import ClaimRecord, JobId, JobRecord
from fusion.swarm.errors import StaleTerm, SwarmError
from fusion.swarm.printable import error_line, one_line
from fusion.swarm.transport import PeerId

__all__ = ["Hosting", "HostingConfig", "Service", "stop_request"]

log = logging.getLogger(__name__)

OVERTAKEN_SECONDS = 5.0  # once in so long a stage is claimed anew at once
RECORD_SECONDS = 0.3  # for the directory to say how the job stands, while somebody waits for us to lead it

Place = tuple[JobId, int]


@dataclass(frozen=True, kw_only=True)
class HostingConfig:
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    nudge_seconds: float = 0.2  # from one look to the next, however many ask us to look
    cool_down_seconds: float = 5.0  # after a stage failed here, doubling, before this peer claims it again
    longest_cool_down_seconds: float = 300.0
    settled_seconds: float = 60.0  # a stage that ran for so long did not fail at once
    seats: int = 64  # stages at once
    places: int = 512  # vacant stages looked at in one heartbeat
    shelf: ShelfConfig = ShelfConfig()  # noqa: RUF009 - frozen
    departure: HandoverConfig = HandoverConfig()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.heartbeat_seconds <= 0 or self.nudge_seconds < 0 or min(self.seats, self.places) < 1:
            raise ValueError("heartbeat_seconds, seats and places must be positive, nudge_seconds at least 0")


class Hosting:
    """Claims stages for this peer and runs them until their job ends, they are lost, or the peer leaves.

    `fitness` is the score of our claims that nobody proposed, from 0 to below 1. `run` does it all; `beat` is one
    heartbeat of it, for tests that drive the context's clock themselves.
    """

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        fitness: float,
        config: HostingConfig | None = None,
        files: JobFiles | None = None,
    ) -> None:
        self.on_rest: Callable[[], object] = lambda: None  # called when a stage has ended here
        self._context = context
        self._services = services
        self._fitness = fitness
        self._config = config or HostingConfig()
        self._clock = clock = context.clock.monotonic
        self._succession = context.succession if isinstance(context.succession, Takeovers) else None
        self._pool = Pool(context, services, self._spawn, fitness)
        self._board = JobBoard(context.peer_id)
        kept = None if files is None else KeptWords(files, clock)
        self._gossip = JobGossip(context, services, self._board, self._pool.follow, kept)
        self._server = JobServer(context, self._board, self._gossip, self.nudge, self._stopped)
        self._shelf = ManifestShelf(context.blobs, self._spawn, self.nudge, self._config.shelf, clock)
        self._vacancies = VacantStages(context.peer_id, fitness, clock)
        self._cooling: CoolDown[Place] = CoolDown(
            self._config.cool_down_seconds, self._config.longest_cool_down_seconds, clock
        )
        self._overtaken: CoolDown[Place] = CoolDown(OVERTAKEN_SECONDS, OVERTAKEN_SECONDS, clock)
        self._handovers = Handovers(context, services, self._config.departure, self._spawn, clock)
        self._hosts: dict[Place, Hosted] = {}
        self._claiming: list[Place] = []
        self._leaving = False
        self._nudged = asyncio.Event()
        self._beating = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None  # None: not running

    @property
    def hosted(self) -> tuple[Place, ...]:
        """The stages that run here now."""
        return tuple(sorted(self._hosts))

    def final(self, job: JobId) -> Progress | None:
        """How a job went, if a stage of it ran here to its end."""
        return self._board.final(job)

    @property
    def _engaged(self) -> bool:
        """Whether we have a part in a job: a stage, one that we stand by for, or a last word on it."""
        return bool(self.occupied or self._pool.jobs or self._board.repeated)

    def nudge(self) -> None:
        """Look at the jobs now rather than at the next heartbeat."""
        self._nudged.set()

    async def start(self) -> None:
        self._context.leases.on_lost = self._lost
        if self._succession is not None:
            self._succession.attach(self)
            await self._succession.start()
        await self._gossip.start()
        await self._server.start()

    async def run(self) -> None:
        """Look, claim, host and publish until cancelled; then release what we hold."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._spawn(self._gossip.follow())
            try:
                await self._gossip.publish()  # after a cold start nobody else may know of what was on disk
                while True:
                    again = loop.time() + self._config.nudge_seconds
                    nudged = self._nudged.is_set()
                    self._nudged.clear()
                    await self.beat(nudged=nudged)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._config.heartbeat_seconds):
                            await self._nudged.wait()
                    await asyncio.sleep(again - loop.time())
            finally:
                self._tasks = None
                await self._release_all()

    async def beat(self, *, nudged: bool = True) -> None:
        """Look at the directory once, claim what we should, say what we have to say; only while `run` runs. Not `nudged`:
        nobody waits for it, and a peer that has no part in any job need not know the newest."""
        async with self._beating:
            try:
                await self._give_back()
                await self._look(0.0 if nudged or self._engaged else GLANCE_SECONDS)
                await self._gossip.publish()
            except (SwarmError, OSError) as error:
                log.warning("directory: %s", error)

    # --- deciding what to host

    async def _look(self, max_age_seconds: float) -> None:
        records = await self._context.directory.jobs(max_age_seconds=max_age_seconds)
        open_jobs: dict[JobId, tuple[JobRecord, Manifest]] = {}
        for record in records:
            self._context.leases.observe(record.job, 0, record.term)
            if record.state in ENDED:
                self._end(record.job, record)
                if not self._ends_by_itself(record):
                    self._cancel(record.job)
            elif not self._board.over(record):
                manifest = self._shelf.get(record)
                if manifest is not None:
                    open_jobs[record.job] = (record, manifest)
        self._board.see(open_jobs)
        self._shelf.keep_only({record.job for record in records})
        claims = await self._claims({job: manifest for job, (_, manifest) in open_jobs.items()})
        if not self._leaving:
            await self._pool.beat(open_jobs, claims, self.hosted, self._context.memory.free_bytes)
        ours = {job for job, _ in self._hosts} | self._pool.jobs
        self._board.hear(records, ours, await self._leaderless(ours, claims))
        if self._leaving:
            return
        self._handovers.spread(self._hosts)
        vacancies = self._vacant(open_jobs, claims)
        busy = bool(self._hosts)
        if (busy or len(vacancies) > 1) and any(vacancy.score < 1.0 for vacancy in vacancies):
            peers = await self._context.directory.peers()
            vacancies = list((beside_the_idle if busy else one_each)(vacancies, self._context.peer_id, peers))
        chosen = stages_to_claim(
            vacancies, self._context.memory.free_bytes, self._config.seats - len(self._hosts)
        )
        await asyncio.gather(*(self._take(vacancy, *open_jobs[vacancy.job]) for vacancy in chosen))

    def _ends_by_itself(self, record: JobRecord) -> bool:
        """Whether our own lead has ended the job, and may have last words to say. It has not where we took the lead
        while the one before us was ending the job, which another stage of ours heard of."""
        progress = self._services[record.kind].progress(record.job)
        ours = record.author == self._context.peer_id and self._board.leads(record.job)
        return ours and progress is not None and progress.finished

    async def _leaderless(
        self, jobs: set[JobId], claims: Mapping[Place, tuple[ClaimRecord, ...]]
    ) -> set[JobId]:
        """Those of the jobs hosted or stood by for here whose first stage nobody owns."""
        others = [job for job in jobs if (job, 0) not in self._hosts]
        unread = [job for job in others if (job, 0) not in claims]
        read = await asyncio.gather(*(self._context.leases.claims(job, 0) for job in unread))
        leads = dict(zip(unread, read, strict=True))
        return {job for job in others if winner(leads[job] if job in leads else claims[job, 0]) is None}

    async def _claims(self, jobs: Mapping[JobId, Manifest]) -> dict[Place, tuple[ClaimRecord, ...]]:
        """The claims of the stages that we might host, and of all stages of the jobs that we have a hand in: when an
        owner vanishes we should know its standbys."""
        ours = {job for job, _ in self._hosts} | self._pool.jobs
        us, free = self._context.peer_id, self._context.memory.free_bytes
        places = [
            (job, stage)
            for job, manifest in jobs.items()
            for stage in range(manifest.stages)
            if (job, stage) not in self._hosts and (job in ours or manifest.needed_bytes(stage) <= free)
        ]
        self._context.random.shuffle(places)  # where there are too many, others next time
        places.sort(key=lambda place: (jobs[place[0]].proposed[place[1]] != us, place[0] not in ours))
        del places[self._config.places :]
        claims = await asyncio.gather(*(self._context.leases.claims(*place) for place in places))
        # Those of the stages that run here are read with every renewal.
        hosted = {place: self._context.leases.recent(*place) for place in self._hosts if place[0] in jobs}
        return {**dict(zip(places, claims, strict=True)), **hosted}

    def _vacant(
        self,
        jobs: Mapping[JobId, tuple[JobRecord, Manifest]],
        claims: Mapping[Place, tuple[ClaimRecord, ...]],
    ) -> list[VacantStage]:
        """The stages that we may claim now."""
        found = []
        for place, held in claims.items():
            if place in self._hosts:
                continue
            record, manifest = jobs[place[0]]
            # After a cold start whoever has the state of a stage need not fetch it.
            stocked = record.snapshot is not None and self._pool.step_here(place) >= record.snapshot_step
            early = stocked and not self._hosts
            vacancy = self._vacancies.look(place, manifest, held, early=early)
            fits = vacancy is not None and vacancy.memory_bytes <= self._context.memory.free_bytes
            if vacancy is not None and fits and not self._cooling.lasts(place):
                found.append(vacancy)
        return list(one_early(found, self._context.peer_id))

    async def _take(self, vacancy: VacantStage, record: JobRecord, manifest: Manifest) -> None:
        place = (vacancy.job, vacancy.stage)
        if await self._lives(place) or self._board.get(vacancy.job) is None:
            return
        if not self._reserve(place, manifest):
            return
        try:
            claim = await self._context.leases.claim(vacancy.job, vacancy.stage, vacancy.score)
            if claim is not None:
                self._begin(place, record, manifest)
        except SwarmError as error:
            log.warning("stage %d of %s not claimed: %s", vacancy.stage, manifest.name, error)
            self._cooling.start(place)
        finally:
            self._claimed(place)
        await self._give_back()

    def _reserve(self, place: Place, manifest: Manifest) -> bool:
        """Before a claim: its memory, so that claims on their way cannot together take more than there is."""
        try:
            self._context.memory.hold(place, manifest.needed_bytes(place[1]))
        except MemoryError:
            return False
        self._claiming.append(place)
        return True

    def _claimed(self, place: Place) -> None:
        """The claim was made, or not."""
        self._claiming.remove(place)
        if place not in self._hosts and place not in self._claiming:
            self._context.memory.release(place)

    async def _give_back(self) -> None:
        """Release what we own and nothing runs of: claims that came too late, when the job had ended or we were
        leaving. Nobody else could have the stage."""
        for claim in self._context.leases.mine():
            place = (claim.job, claim.stage)
            if place not in self._hosts and place not in self._claiming:
                with suppress(SwarmError):
                    await self._context.leases.release(*place)

    async def _lives(self, place: Place) -> bool:
        """Whether the stage's last owner, of whom the directory knows no more, is there all the same."""
        owner = self._vacancies.vanished(place, self._context.leases.recent(*place))
        if self._succession is None or owner is None:
            return False
        return (await self._succession.look(owner, *place)).kind == "holds"

    # --- a stage whose owner is gone, or leaves: `fusion.runtime.hosting.takeover.StageHolder`

    def holds(self, job: JobId, stage: int) -> int:
        """The term under which the stage runs here; 0 if it does not."""
        hosted, claim = self._hosts.get((job, stage)), self._context.leases.holds(job, stage)
        return claim.term if hosted is not None and claim is not None and not hosted.task.done() else 0

    @property
    def occupied(self) -> bool:
        """Whether a stage runs here, or is about to."""
        return bool(self._hosts or self._claiming)

    async def take_over(
        self, job: JobId, stage: int, over: int, handover: Mapping[str, Any] | None
    ) -> ClaimRecord | None:
        """Claim the stage above the term `over`, which is known to be free, and begin to host it. None where we cannot
        or another was first."""
        place, known = (job, stage), self._board.get(job)
        if place in self._hosts:
            return self._context.leases.holds(job, stage)
        if known is None or self._tasks is None or self._leaving or self._cooling.lasts(place):
            return None
        record, manifest = known
        full = len(self._hosts) >= self._config.seats
        if full or not 0 <= stage < manifest.stages or not self._reserve(place, manifest):
            return None
        newest = asyncio.ensure_future(self._newest(record)) if stage == 0 else None
        try:
            claim = await self._context.leases.claim(
                job, stage, self._fitness, over=over, confirm=handover is None
            )
            if claim is None:
                return None
            if newest is not None:
                record = await newest  # whoever leads must know the newest snapshot
            self._begin(place, record, manifest, handover)
        except SwarmError as error:
            log.warning("stage %d of %s not claimed: %s", stage, manifest.name, error)
            return None
        finally:
            self._claimed(place)
            if newest is not None:
                newest.cancel()
        await self._give_back()
        return self._context.leases.holds(job, stage)

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """As in `fusion.runtime.job.context.TakeoverReports`."""
        hosted = self._hosts.get((job, stage))
        if hosted is not None and self._tasks is not None and not self._leaving:
            self._handovers.give_away((job, stage), hosted, peer)

    async def _newest(self, record: JobRecord) -> JobRecord:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(RECORD_SECONDS):
                found = await self._context.directory.job(record.job)
                return newest_jobs([record, found])[0] if found is not None else record
        return record

    # --- hosting

    def _begin(
        self,
        place: Place,
        record: JobRecord,
        manifest: Manifest,
        handover: Mapping[str, Any] | None = None,
    ) -> None:
        """Run a stage that we have claimed. It may have been begun by another way, or lost already."""
        claim = self._context.leases.holds(*place)
        over = self._tasks is None or self._leaving or self._board.get(place[0]) is None
        if over or place in self._hosts or claim is None:
            return
        self._vacancies.filled(place)
        task = self._spawn(self._host(claim, record, manifest, handover))
        self._hosts[place] = Hosted(task, manifest)
        self._pool.promoted(place)
        task.add_done_callback(lambda _: self._ended(place))

    async def _host(
        self, claim: ClaimRecord, record: JobRecord, manifest: Manifest, handover: Mapping[str, Any] | None
    ) -> None:
        job, stage, began = claim.job, claim.stage, self._clock()
        log.info("stage %d of %s is ours (term %d)", stage, manifest.name, claim.term)
        if stage == 0:
            self._gossip.lead(claim, manifest, record)
        final: list[Progress] = []
        try:
            await self._services[manifest.kind].host(
                job, manifest, stage, claim.term, handover, left=final.append
            )
            self._end(job)
            log.info("stage %d of %s has ended", stage, manifest.name)
            await self._gossip.conclude(record, *final)
        except JobFailed as error:
            log.error("job %s failed: %s", manifest.name, one_line(str(error)))
            self._end(job)
            if stage == 0:
                self._board.cut_short(job, "failed", str(error), *final)
        except Exception as error:
            if self._context.leases.holds(job, stage) is None:
                log.info("stage %d of %s is over here: %s", stage, manifest.name, one_line(str(error)))
                return  # it is another's: no wonder that it was refused
            # The boundary of one stage, made of what a stranger sent: whatever goes wrong in it must not take the
            # peer's other stages along.
            what = (stage, manifest.name, type(error).__name__, one_line(str(error)))
            log.error("stage %d of %s: %s: %s", *what)
            log.debug("where it happened", exc_info=error)
            if isinstance(error, StaleTerm) and not self._overtaken.lasts((job, stage)):
                self._overtaken.start((job, stage))
                return  # the neighbours knew of a term that we did not: now we do, and claim the stage above it
            if self._clock() - began >= self._config.settled_seconds:
                self._cooling.forget((job, stage))
            self._cooling.start((job, stage))
        finally:
            if stage == 0:
                self._board.rest(job, *final)

    def _ended(self, place: Place) -> None:
        """A host is over, even one that was cancelled before it began: others may have the stage."""
        if self._tasks is not None:
            self._spawn(self._release(place))

    async def _release(self, place: Place) -> None:
        try:
            await self._context.leases.release(*place)
        except SwarmError as error:
            log.warning("stage %d of job %s not released: %s", place[1], place[0][:12], error)
        finally:
            del self._hosts[place]
            self._context.memory.release(place)
            self.on_rest()
            self.nudge()

    def _lost(self, claim: ClaimRecord) -> None:
        place = (claim.job, claim.stage)
        hosted = self._hosts.get(place)
        if hosted is not None and not self._handovers.passes(place):
            log.warning("stage %d of %s now belongs to another peer", claim.stage, hosted.manifest.name)
            hosted.task.cancel()

    def _stopped(self, job: JobId) -> None:
        self._end(job)
        self._cancel(job)

    def _end(self, job: JobId, record: JobRecord | None = None) -> None:
        self._board.end(job, self._context.leases.known_term(job, 0), record)

    def _cancel(self, job: JobId) -> None:
        for (other, _), hosted in self._hosts.items():
            if other == job:
                hosted.task.cancel()

    # --- leaving

    async def leave(self) -> None:
        """Hand every stage to a standby at a boundary where nothing is lost, as far as there are any; `run` may be
        cancelled then. Nothing is claimed any more. The time it takes is bounded (`HostingConfig.departure`)."""
        self._leaving = True
        with suppress(SwarmError, OSError):
            await self._gossip.last_word()  # whoever leads next should know all that we do
        await self._pool.aclose()
        await self._handovers.leave(self._hosts)

    async def _release_all(self) -> None:
        with suppress(SwarmError, OSError):
            await self._gossip.last_word()  # before others see that the stages are free
        for hosted in self._hosts.values():
            hosted.task.cancel()
        releases = (self._context.leases.release(*place) for place in self._hosts)
        for error in await asyncio.gather(self._pool.aclose(), *releases, return_exceptions=True):
            if isinstance(error, BaseException):
                log.warning("a stage was not released: %s", error_line(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "hosting is not running"
        return self._tasks.create_task(work)
