"""The stages that this peer stands by for, and what it fetches for them ahead of time.

`fusion.runtime.hosting.standby_assignment` decides which stages; the service that would host a stage prepares it. The pool publishes
its claims through `Standbys.stand_by` and follows each job's snapshots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import FIFOCache

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.device.new_job_pace import STANDBY_SECONDS
from fusion.runtime.hosting.jobs.service import Service
from fusion.runtime.hosting.standby_assignment import (
    BUSY_WANTED,
    WANTED,
    Candidate,
    StandbyCapacity,
    UncoveredStage,
    places_to_cover,
)
from fusion.runtime.hosting.standby_needs import REMEMBERED_PLACES, StandbyNeeds
from fusion.runtime.job.context import Context
from fusion.runtime.job.cool_down import CoolDown
from fusion.runtime.job.errors import Refused
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.training.snapshots.shards_here import ShardsHere
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.job_order import job_order
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, Place
from fusion.swarm.printable import one_line

log = logging.getLogger(__name__)

BUSY_SCORE = 1e-3  # of its fitness is the score of a peer with stages of its own: idle standbys go first
MOST_COVERED = 64  # stages at once
DISK_SHARE = 0.8  # of the blob store's quota, for stages that we only stand by for
PREPARES = 2  # at once
GRACE_SECONDS = 10.0  # after which a job without a record in the directory is given up
COOL_DOWN_SECONDS = 5.0  # after a stage could not be prepared, doubling
LONGEST_COOL_DOWN_SECONDS = 120.0


@dataclass
class _Covered:
    """A stage that we stand by for."""

    record: JobRecord
    manifest: Manifest
    score: float
    busy: bool
    seen_at: float  # when the job was open last
    step: int = -1  # whose state is here, ready to be hosted; -1 for none
    done: tuple[Digest | None, int] | None = None  # the snapshot that was prepared last
    task: asyncio.Task[None] | None = None


class Pool:
    """`spawn` runs work for a job as a task (which ends when the peer leaves); `fitness` is the score of our claims, from 0 to
    below 1."""

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        spawn: Callable[[JobId, Coroutine[Any, Any, None]], asyncio.Task[None]],
        fitness: float = 0.0,
    ) -> None:
        # Called when we stop standing by for a stage: its memory may be freed
        self.on_stop: Callable[[], object] = lambda: None
        # Whether hosting is claiming the stage now, and will use what is prepared.
        self.claims: Callable[[Place], bool] = lambda place: False
        self._context = context
        self._services = services
        self._spawn = spawn
        self._fitness = fitness
        self._clock = clock = context.clock.monotonic
        self._covered: dict[Place, _Covered] = {}
        self._needs = StandbyNeeds(context)
        self._shards = ShardsHere(context)
        self._closed = False
        self._prepares = asyncio.Semaphore(PREPARES)
        self._refused: FIFOCache[Place, None] = FIFOCache(REMEMBERED_PLACES)
        self._cooling: CoolDown[Place] = CoolDown(COOL_DOWN_SECONDS, LONGEST_COOL_DOWN_SECONDS, clock)

    @property
    def places(self) -> tuple[Place, ...]:
        """The stages that we stand by for now."""
        return tuple(sorted(self._covered))

    @property
    def jobs(self) -> set[JobId]:
        return {job for job, _ in self._covered}

    def step_here(self, place: Place) -> int:
        """The step whose state of the stage is on this peer, as of the last `beat`: that of the job's newest snapshot, or -1
        where its shard is not here."""
        if (covered := self._covered.get(place)) is not None and covered.step >= 0:
            return covered.step
        return self._shards.step(place)

    async def beat(
        self,
        jobs: Mapping[JobId, tuple[JobRecord, Manifest]],
        claims: Mapping[Place, tuple[ClaimRecord, ...]],
        hosted: Collection[Place],
        free_memory_bytes: int,
    ) -> None:
        """One heartbeat: begin and stop standing by as assigned, and prepare what is missing. `jobs` are the open ones, `claims` all
        claims of the stages that we might host; a stage that is missing in them is left as it is."""
        jobs = dict(jobs)  # the caller's may change while we read
        await self._shards.look(jobs)
        for place in hosted:
            self.promoted(place)  # however it was claimed: the host uses what `_stop` would free
        us = Candidate(
            peer=self._context.peer_id,
            free_memory_bytes=free_memory_bytes,
            idle=not hosted,
            opset=OPSET_VERSION,
        )
        score = self._fitness * (1.0 if us.idle else BUSY_SCORE)
        openings = self._openings(jobs, claims, hosted)
        wanted = WANTED if us.idle else BUSY_WANTED
        short = any(
            o.owner is not None
            and not o.covered
            and len(o.standbys) < wanted
            and o.memory_bytes <= free_memory_bytes
            for o in openings
        )
        others = await self._needs.candidates() if short else ()
        # Without the stages that we have claimed in the meantime.
        openings = [opening for opening in openings if self._context.leases.holds(*opening.place) is None]
        chosen = () if self._closed else places_to_cover(openings, us, others, score, self._room())
        chosen = (*chosen, *self._needing_us(openings, chosen, free_memory_bytes))
        for place in set(self._covered) - set(chosen):
            if not self.claims(place):
                self._stop(place)
        for place in chosen:
            self._cover(place, jobs, score, not us.idle)
        for place in chosen:
            self._follow(place)

    def promoted(self, place: Place) -> None:
        """Hosting runs the stage now and uses what is prepared. For other stages we score as a busy standby from now on."""
        covered = self._covered.pop(place, None)
        if covered is not None and covered.task is not None:
            covered.task.cancel()
        for other, covered in self._covered.items():
            if not covered.busy:
                covered.busy, covered.score = True, self._fitness * BUSY_SCORE
                self._publish_standby(other, covered)

    def follow(self, record: JobRecord) -> None:
        """The job has a new snapshot: fetch it now rather than at the next heartbeat."""
        for place, covered in self._covered.items():
            if place[0] == record.job and job_order(record) > job_order(covered.record):
                covered.record = record
                self._follow(place)

    async def aclose(self) -> None:
        """Stop standing by for all stages, for good. Idempotent."""
        self._closed = True
        tasks = [covered.task for covered in self._covered.values() if covered.task is not None]
        for place in list(self._covered):
            self._stop(place)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what to stand by for

    def _openings(
        self,
        jobs: Mapping[JobId, tuple[JobRecord, Manifest]],
        claims: Mapping[Place, tuple[ClaimRecord, ...]],
        hosted: Collection[Place],
    ) -> list[UncoveredStage]:
        now, needs = self._clock(), self._needs
        owners = {place: winner(held) for place, held in claims.items()}
        found = [
            needs.of(place, jobs[place[0]][1], claims[place], owners, covered=place in self._covered)
            for place in claims
            if place[0] in jobs
            and place not in hosted
            and place not in self._refused
            and self._admitted(place)
        ]
        seen = {opening.place for opening in found}
        for place, covered in self._covered.items():
            absent = place[0] not in jobs and now - covered.seen_at >= GRACE_SECONDS
            left = place not in seen | self._refused.keys() and place not in hosted and not absent
            if left and self._admitted(place):
                found.append(needs.of(place, covered.manifest, (), {}, covered=True))
        return found

    def _admitted(self, place: Place) -> bool:
        """Whether the job lets us stand by, and own the stage afterwards."""
        leases = self._context.leases
        return leases.refusal(*place, "stand-by") is None and leases.refusal(*place, "own") is None

    def _needing_us(
        self, openings: Sequence[UncoveredStage], chosen: Collection[Place], free_memory_bytes: int
    ) -> list[Place]:
        """The stages whose idle owners stall a job, and that no other standby takes over (`Takeover.needs_us`)."""
        takeover = self._context.takeover
        if takeover is None or self._closed:
            return []
        fitting = (o.place for o in openings if o.memory_bytes <= free_memory_bytes)
        return [place for place in fitting if place not in chosen and takeover.needs_us(*place)]

    def _room(self) -> StandbyCapacity:
        quota = self._context.blobs.store.quota_bytes
        return StandbyCapacity(disk_bytes=int(quota * DISK_SHARE), max_stages=MOST_COVERED)

    # --- standing by

    def _cover(
        self, place: Place, jobs: Mapping[JobId, tuple[JobRecord, Manifest]], score: float, busy: bool
    ) -> None:
        covered = self._covered.get(place)
        record, manifest = jobs.get(place[0], (None, None))
        if covered is None:
            if record is None or manifest is None:
                return
            log.info("standing by for stage %d of %s", place[1], manifest.name)
            covered = _Covered(record, manifest, score, busy, self._clock())
            self._covered[place] = covered
            account = self._context.accounts.of(place[0], manifest.author)
            self._context.pace.charge(place[0], account, STANDBY_SECONDS)
            self._publish_standby(place, covered)
            return
        if record is not None:
            covered.seen_at = self._clock()
            covered.record = max(record, covered.record, key=job_order)
        if (covered.score, covered.busy) != (score, busy):
            covered.score, covered.busy = score, busy
            self._publish_standby(place, covered)

    def _stop(self, place: Place) -> None:
        covered = self._covered.pop(place)
        log.info("no longer standing by for stage %d of %s", place[1], covered.manifest.name)
        if covered.task is not None:
            covered.task.cancel()
        self._context.leases.standbys.stand_down(*place)
        self._services[covered.manifest.kind].forget(*place)
        self.on_stop()

    def _publish_standby(self, place: Place, covered: _Covered) -> None:
        step, ready = max(covered.step, 0), covered.step >= 0
        standbys = self._context.leases.standbys
        standbys.stand_by(*place, score=covered.score, step=step, ready=ready, busy=covered.busy)

    def _follow(self, place: Place) -> None:
        """Prepare the stage unless that is done, under way, or has just failed."""
        covered = self._covered[place]
        idle = covered.task is None or covered.task.done()
        if idle and covered.done != _version(covered.record) and not self._cooling.lasts(place):
            covered.task = self._spawn(place[0], self._prepare(place, covered))

    async def _prepare(self, place: Place, covered: _Covered) -> None:
        service = self._services[covered.manifest.kind]
        while covered.done != _version(covered.record):
            record = covered.record
            try:
                async with self._prepares:
                    covered.step = await service.prepare(place[0], covered.manifest, place[1], record)
            except Exception as error:
                # Isolates a stage, which is built from what a stranger sent: no error of it may end the peer's other work.
                log.warning(
                    "stage %d of %s is not ready here: %s: %s",
                    place[1], covered.manifest.name, type(error).__name__, one_line(str(error)),
                )  # fmt: skip
                log.debug("where it happened", exc_info=error)
                if isinstance(error, Refused):  # leave it to other standbys
                    self._refused[place] = None
                self._cooling.start(place)
                return
            self._cooling.forget(place)
            covered.done = _version(record)
            if self._covered.get(place) is covered:
                self._context.leases.update(*place, step=covered.step, ready=True)


def _version(record: JobRecord) -> tuple[Digest | None, int]:
    """Of a job's state, for a standby."""
    return record.snapshot, record.snapshot_step
