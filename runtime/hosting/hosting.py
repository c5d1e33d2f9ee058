"""A peer at work: it looks for jobs in the directory, claims stages and runs them. What it says about jobs is
`fusion.runtime.hosting.job_desk`'s; which stages to claim is decided by `fusion.runtime.hosting.duties` and `fusion.swarm.election`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fusion.runtime.context import Context
from fusion.runtime.cool_down import CoolDown
from fusion.runtime.errors import JobFailed
from fusion.runtime.hosting.duties import Vacancy, beside_the_idle, stages_to_claim
from fusion.runtime.hosting.job_desk import ENDED, PROTOCOL, JobDesk, Service, stop_request
from fusion.runtime.job import Manifest
from fusion.runtime.manifest_shelf import ManifestShelf, ShelfConfig
from fusion.swarm import handlers
from fusion.swarm.directory import HEARTBEAT_SECONDS
from fusion.swarm.election import should_claim, winner
from fusion.swarm.errors import SwarmError
from fusion.swarm.records import ClaimRecord, JobId, JobRecord, one_line

__all__ = ["PROTOCOL", "Hosting", "HostingConfig", "Service", "stop_request"]

log = logging.getLogger(__name__)

REMEMBERED_JOBS = 1000
REMEMBERED_PLACES = 65_536

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

    def __post_init__(self) -> None:
        if self.heartbeat_seconds <= 0 or self.nudge_seconds < 0 or min(self.seats, self.places) < 1:
            raise ValueError("heartbeat_seconds, seats and places must be positive, nudge_seconds at least 0")


@dataclass(frozen=True)
class _Hosted:
    task: asyncio.Task[None]
    manifest: Manifest
    memory_bytes: int


class Hosting:
    """Claims stages for this peer and runs them until their job ends, they are lost, or the peer leaves.

    `fitness` is the score of our claims that nobody proposed, from 0 to below 1. `run` does it all; `beat` is one
    heartbeat of it, for tests that drive `clock` (seconds that only rise) and `now` (unix seconds) themselves.
    """

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        fitness: float,
        config: HostingConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.on_rest: Callable[[], object] = lambda: None  # called when a stage has ended here
        self._context = context
        self._services = services
        self._fitness = fitness
        self._config = config or HostingConfig()
        self._clock = clock
        self._desk = JobDesk(context, services, self.nudge, self._stopped, now)
        self._shelf = ManifestShelf(context.blobs, self._spawn, self.nudge, self._config.shelf, clock)
        self._cooling: CoolDown[Place] = CoolDown(
            self._config.cool_down_seconds, self._config.longest_cool_down_seconds, clock
        )
        self._hosts: dict[Place, _Hosted] = {}
        self._empty_since: dict[Place, float] = {}
        # Jobs that have ended, and the lead's term then: only a later lead knows better, whatever the directory says.
        self._over: dict[JobId, int] = {}
        self._nudged = asyncio.Event()
        self._beating = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None  # None: not running

    @property
    def hosted(self) -> tuple[Place, ...]:
        """The stages that run here now."""
        return tuple(sorted(self._hosts))

    @property
    def free_memory_bytes(self) -> int:
        return self._context.memory_bytes - sum(hosted.memory_bytes for hosted in self._hosts.values())

    def nudge(self) -> None:
        """Look at the jobs now rather than at the next heartbeat."""
        self._nudged.set()

    async def start(self) -> None:
        self._context.leases.on_lost = self._lost
        await self._desk.start()

    async def run(self) -> None:
        """Look, claim, host and publish until cancelled; then release what we hold."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                while True:
                    again = loop.time() + self._config.nudge_seconds
                    self._nudged.clear()
                    await self.beat()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._config.heartbeat_seconds):
                            await self._nudged.wait()
                    await asyncio.sleep(again - loop.time())
            finally:
                self._tasks = None
                await self._leave()

    async def beat(self) -> None:
        """Look at the directory once, claim what we should, say what we have to say; only while `run` runs."""
        async with self._beating:
            try:
                await self._look()
                await self._desk.publish()
            except (SwarmError, OSError) as error:
                log.warning("directory: %s", error)

    # --- deciding what to host

    async def _look(self) -> None:
        records = await self._context.directory.jobs()
        open_jobs: dict[JobId, tuple[JobRecord, Manifest]] = {}
        for record in records:
            self._context.leases.observe(record.job, 0, record.term)
            if record.state in ENDED:
                self._end(record.job)
                if record.author != self._context.peer_id:  # what we lead ends by itself
                    self._cancel(record.job)
            elif record.term > self._over.get(record.job, -1):
                manifest = self._shelf.get(record)
                if manifest is not None:
                    open_jobs[record.job] = (record, manifest)
        self._shelf.keep_only({record.job for record in records})
        hosted = {job for job, _ in self._hosts}
        self._desk.hear(records, hosted, await self._leaderless(hosted))
        vacancies = await self._vacancies({job: manifest for job, (_, manifest) in open_jobs.items()})
        if self._hosts and any(vacancy.score < 1.0 for vacancy in vacancies):
            peers = await self._context.directory.peers()
            vacancies = list(beside_the_idle(vacancies, self._context.peer_id, peers))
        seats = self._config.seats - len(self._hosts)
        chosen = stages_to_claim(vacancies, self.free_memory_bytes, seats)
        await asyncio.gather(*(self._take(vacancy, *open_jobs[vacancy.job]) for vacancy in chosen))

    async def _leaderless(self, hosted: set[JobId]) -> set[JobId]:
        """Those of the jobs hosted here whose first stage nobody owns."""
        jobs = [job for job in hosted if (job, 0) not in self._hosts]
        owners = await asyncio.gather(*(self._context.leases.owner(job, 0) for job in jobs))
        return {job for job, owner in zip(jobs, owners, strict=True) if owner is None}

    async def _vacancies(self, jobs: Mapping[JobId, Manifest]) -> list[Vacancy]:
        places = [
            (job, stage)
            for job, manifest in jobs.items()
            for stage in range(manifest.stages)
            if (job, stage) not in self._hosts
            and not self._cooling.lasts((job, stage))
            and _needed(manifest, stage) <= self.free_memory_bytes
        ]
        random.shuffle(places)  # where there are too many, others next time
        places.sort(key=lambda place: jobs[place[0]].proposed[place[1]] != self._context.peer_id)
        del places[self._config.places :]
        claims = await asyncio.gather(*(self._context.leases.claims(*place) for place in places))
        found = (
            self._vacancy(place, jobs[place[0]], held) for place, held in zip(places, claims, strict=True)
        )
        return [vacancy for vacancy in found if vacancy is not None]

    def _vacancy(self, place: Place, manifest: Manifest, claims: tuple[ClaimRecord, ...]) -> Vacancy | None:
        us, (job, stage) = self._context.peer_id, place
        # A claim of ours that we do not hold is from before a restart, and no reason to wait.
        claims = tuple(claim for claim in claims if claim.peer != us)
        if winner(claims) is not None:
            self._empty_since.pop(place, None)
            return None
        now = self._clock()
        empty = now - self._empty_since.setdefault(place, now)
        while len(self._empty_since) > REMEMBERED_PLACES:
            del self._empty_since[next(iter(self._empty_since))]
        score = 1.0 if manifest.proposed[stage] == us else self._fitness
        if not should_claim(claims, us, score=score, vacant_seconds=empty):
            return None
        return Vacancy(
            job=job, stage=stage, score=score, empty_seconds=empty, memory_bytes=_needed(manifest, stage)
        )

    async def _take(self, vacancy: Vacancy, record: JobRecord, manifest: Manifest) -> None:
        try:
            claim = await self._context.leases.claim(vacancy.job, vacancy.stage, vacancy.score)
        except SwarmError as error:
            log.warning("stage %d of %s not claimed: %s", vacancy.stage, manifest.name, error)
            self._cooling.start((vacancy.job, vacancy.stage))
            return
        if claim is None:
            return
        place = (claim.job, claim.stage)
        task = self._spawn(self._host(claim, record, manifest))
        self._hosts[place] = _Hosted(task, manifest, vacancy.memory_bytes)
        task.add_done_callback(lambda _: self._ended(place))

    # --- hosting

    async def _host(self, claim: ClaimRecord, record: JobRecord, manifest: Manifest) -> None:
        job, stage, began = claim.job, claim.stage, self._clock()
        log.info("stage %d of %s is ours (term %d)", stage, manifest.name, claim.term)
        if stage == 0:
            self._desk.lead(claim, manifest, record)
        try:
            await self._services[manifest.kind].host(job, manifest, stage, claim.term)
            self._end(job)
            log.info("stage %d of %s has ended", stage, manifest.name)
        except JobFailed as error:
            log.error("job %s failed: %s", manifest.name, one_line(str(error)))
            self._end(job)
            if stage == 0:
                self._desk.fail(job, str(error))
        except Exception as error:
            # The boundary of one stage, made of what a stranger sent: whatever goes wrong in it must not take the
            # peer's other stages along.
            log.error(
                "stage %d of %s: %s: %s", stage, manifest.name, type(error).__name__, one_line(str(error))
            )
            log.debug("where it happened", exc_info=error)
            if self._clock() - began >= self._config.settled_seconds:
                self._cooling.forget((job, stage))
            self._cooling.start((job, stage))
        finally:
            if stage == 0:
                self._desk.rest(job)

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
            self.on_rest()
            self.nudge()

    def _end(self, job: JobId) -> None:
        self._over.pop(job, None)
        self._over[job] = self._context.leases.known_term(job, 0)
        while len(self._over) > REMEMBERED_JOBS:
            del self._over[next(iter(self._over))]

    def _lost(self, claim: ClaimRecord) -> None:
        hosted = self._hosts.get((claim.job, claim.stage))
        if hosted is not None:
            log.warning("stage %d of %s now belongs to another peer", claim.stage, hosted.manifest.name)
            hosted.task.cancel()

    def _stopped(self, job: JobId) -> None:
        self._end(job)
        self._cancel(job)

    def _cancel(self, job: JobId) -> None:
        for (other, _), hosted in self._hosts.items():
            if other == job:
                hosted.task.cancel()

    async def _leave(self) -> None:
        with suppress(SwarmError):
            await self._desk.publish()  # whoever leads next should know all that we do
        for hosted in self._hosts.values():
            hosted.task.cancel()
        released = (self._context.leases.release(*place) for place in self._hosts)
        for error in await asyncio.gather(*released, return_exceptions=True):
            if isinstance(error, BaseException):
                log.warning("a stage was not released: %s", handlers.one_line(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "hosting is not running"
        return self._tasks.create_task(work)


def _needed(manifest: Manifest, stage: int) -> int:
    """Bytes of memory that a stage takes, as its launcher estimates it."""
    return manifest.memory_bytes[stage] if manifest.memory_bytes else 0
