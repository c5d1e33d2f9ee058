"""The backup pool, as one peer of it sees it: stages that it stands by for, and what it brings here ahead of time.

Which stages those are is decided by `fusion.runtime.hosting.standby_assignment`; what "ready to host" means for a stage, by the service
that would host it. The pool announces itself through `Standbys.stand_by` and follows the job's snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import math
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
    Standby,
    StandbyCapacity,
    UncoveredStage,
    is_short,
    places_to_cover,
)
from fusion.runtime.job.context import Context
from fusion.runtime.job.cool_down import CoolDown
from fusion.runtime.job.errors import JobError, Refused
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.training.snapshots import snapshot
from fusion.swarm.claims.election import stands_by, winner
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.job_order import job_order
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import one_line

log = logging.getLogger(__name__)

BUSY_SCORE = 1e-3  # of its fitness is what a peer with stages of its own offers: idle standbys go first
MOST_COVERED = 64  # stages at once
DISK_SHARE = 0.8  # of the blob store's quota, for stages that we only stand by for
PREPARES = 2  # at once
# For an owner to load its stage, alone with the launcher's uplink: one that never does must not be left without standbys.
LOADING_SECONDS = 180.0
GRACE_SECONDS = 10.0  # a job that the directory does not name for so long is given up
COOL_DOWN_SECONDS = 5.0  # after a stage could not be prepared, doubling
LONGEST_COOL_DOWN_SECONDS = 120.0
KEPT_SNAPSHOTS = 2  # that a standby of a training job has on disk
REMEMBERED_PLACES = 65_536
PEERS_SECONDS = 2 * HEARTBEAT_SECONDS  # for which the list of peers is good


@dataclass
class _Covered:
    """A stage that we stand by for."""

    record: JobRecord
    manifest: Manifest
    score: float
    busy: bool
    seen_at: float
    step: int = -1  # that is here, ready to be hosted; -1 while nothing is
    done: tuple[Digest | None, int] | None = None  # the snapshot that was prepared last
    task: asyncio.Task[None] | None = None


class Pool:
    """`spawn` runs work for a job beside everything else (it ends when the peer leaves); `fitness` is the score of our claims,
    from 0 to below 1."""

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        spawn: Callable[[JobId, Coroutine[Any, Any, None]], asyncio.Task[None]],
        fitness: float = 0.0,
    ) -> None:
        self.on_stop: Callable[[], object] = lambda: (
            None
        )  # we stand by for a stage no more, and what was kept for it may go
        # Whether hosting claims the stage now: what is warm is for it.
        self.claims: Callable[[Place], bool] = lambda place: False
        self._context = context
        self._services = services
        self._spawn = spawn
        self._fitness = fitness
        self._clock = clock = context.clock.monotonic
        self._covered: dict[Place, _Covered] = {}
        self._short_since: FIFOCache[Place, float] = FIFOCache(REMEMBERED_PLACES)
        self._loading_since: FIFOCache[Place, tuple[str, float]] = FIFOCache(REMEMBERED_PLACES)
        self._shards: dict[
            JobId, tuple[Digest, int, tuple[Digest, ...]]
        ] = {}  # of the newest snapshot, if its index is here
        self._closed = False
        self._peers: Sequence[Candidate] = ()
        self._peers_read_at = -math.inf
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
        """The step whose state of the stage is on this peer, as far as the last `beat` knows: that of the job's newest
        snapshot, or -1 where its shard is not here. Whoever has it should host the stage before others."""
        job, stage = place
        if (covered := self._covered.get(place)) is not None and covered.step >= 0:
            return covered.step
        _, step, shards = self._shards.get(job, (None, -1, ()))
        return step if stage < len(shards) and self._context.blobs.has(shards[stage]) else -1

    async def beat(
        self,
        jobs: Mapping[JobId, tuple[JobRecord, Manifest]],
        claims: Mapping[Place, tuple[ClaimRecord, ...]],
        hosted: Collection[Place],
        free_memory_bytes: int,
    ) -> None:
        """One heartbeat: stand by for what we should, no longer for what we should not, and bring here what is missing
        of it. `jobs` are the open ones, `claims` all claims of the stages that we might host; a stage that is missing
        in them is left as it is."""
        jobs = dict(jobs)  # the caller's may change while we read
        await self._take_stock(jobs)
        for place in hosted:
            self.promoted(place)  # whatever took it there: what the host uses must not be forgotten
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
            and not o.ours
            and len(o.standbys) < wanted
            and o.memory_bytes <= free_memory_bytes
            for o in openings
        )
        others = await self._candidates() if short else ()
        # What we came to own while we read is hosting's.
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
        """Hosting took the stage: what is warm stays for it. From now on idle standbys go before us elsewhere."""
        covered = self._covered.pop(place, None)
        if covered is not None and covered.task is not None:
            covered.task.cancel()
        for other, covered in self._covered.items():
            if not covered.busy:
                covered.busy, covered.score = True, self._fitness * BUSY_SCORE
                self._publish_standby(other, covered)

    def follow(self, record: JobRecord) -> None:
        """The job has come to a new snapshot: bring it here now rather than at the next heartbeat."""
        for place, covered in self._covered.items():
            if place[0] == record.job and job_order(record) > job_order(covered.record):
                covered.record = record
                self._follow(place)

    async def aclose(self) -> None:
        """Stop standing by for anything, for good. Idempotent."""
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
        now = self._clock()
        owners = {place: winner(held) for place, held in claims.items()}
        found = [
            self._opening(place, jobs[place[0]][1], claims[place], owners, now)
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
                found.append(self._opening(place, covered.manifest, (), {}, now))
        return found

    def _admitted(self, place: Place) -> bool:
        """Whether the job lets us stand by, and own the stage afterwards."""
        leases = self._context.leases
        return leases.refusal(*place, "stand-by") is None and leases.refusal(*place, "own") is None

    def _opening(
        self,
        place: Place,
        manifest: Manifest,
        claims: tuple[ClaimRecord, ...],
        owners: Mapping[Place, ClaimRecord | None],
        now: float,
    ) -> UncoveredStage:
        job, stage = place
        us, owner, next_owner = (
            self._context.peer_id,
            owners.get(place),
            owners.get((job, (stage + 1) % manifest.stages)),
        )
        standbys = tuple(
            Standby(peer=claim.peer, score=claim.score, ready=claim.ready)
            for claim in claims
            if stands_by(claim) and claim.peer != us
        )
        if is_short(len(standbys) + (place in self._covered)):
            since = self._short_since.setdefault(place, now)
        else:
            since = now
            self._short_since.pop(place, None)
        may_load_until = self._may_load_until(place, owner, now)
        memory_bytes = manifest.needed_bytes(stage)
        return UncoveredStage(
            job=job,
            stage=stage,
            # Until the owner has loaded the stage it needs the launcher's uplink more than we do.
            owner=owner.peer if owner is not None and may_load_until <= now else None,
            memory_bytes=memory_bytes,
            disk_bytes=memory_bytes * (KEPT_SNAPSHOTS if manifest.kind == "train" else 1),
            opset=manifest.opset,
            standbys=standbys,
            ours=place in self._covered,
            short_seconds=max(0.0, now - max(since, may_load_until)),
            next_owner=next_owner.peer if next_owner is not None else None,
        )

    def _needing_us(
        self, openings: Sequence[UncoveredStage], chosen: Collection[Place], free_memory_bytes: int
    ) -> list[Place]:
        """The stages of a job that stands still with their owners, whoever else says that it stands by for them."""
        takeover = self._context.takeover
        if takeover is None or self._closed:
            return []
        fitting = (o.place for o in openings if o.memory_bytes <= free_memory_bytes)
        return [place for place in fitting if place not in chosen and takeover.needs_us(*place)]

    def _may_load_until(self, place: Place, owner: ClaimRecord | None, now: float) -> float:
        """Until when nobody should come to stand by, so that the owner can load the stage."""
        if owner is None or owner.ready:
            self._loading_since.pop(place, None)
            return 0.0
        peer, since = self._loading_since.get(place, (None, now))
        since = since if peer == owner.peer else now
        self._loading_since[place] = owner.peer, since
        return since + LOADING_SECONDS

    async def _candidates(self) -> Sequence[Candidate]:
        """Who else could stand by; reading all peers is dear, and a stage may be short of standbys for long."""
        if self._clock() - self._peers_read_at < PEERS_SECONDS:
            return self._peers
        try:
            peers = await self._context.directory.peers()
        except SwarmError as error:
            log.debug("peers not read: %s", error)
            return self._peers
        self._peers_read_at = self._clock()
        self._peers = [
            Candidate(
                peer=peer.peer,
                free_memory_bytes=peer.free_memory_bytes,
                idle=peer.idle,
                opset=peer.opset,
            )
            for peer in peers
            if peer.role == "peer"
        ]
        return self._peers

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
        """Prepare the stage unless that is done, under way, or failed lately."""
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
                # The boundary of one stage, made of what a stranger sent: what goes wrong in it must not take the
                # peer's other work along.
                log.warning(
                    "stage %d of %s is not ready here: %s: %s",
                    place[1], covered.manifest.name, type(error).__name__, one_line(str(error)),
                )  # fmt: skip
                log.debug("where it happened", exc_info=error)
                if isinstance(error, Refused):  # others may stand by for it, as soon as we do not
                    self._refused[place] = None
                self._cooling.start(place)
                return
            self._cooling.forget(place)
            covered.done = _version(record)
            if self._covered.get(place) is covered:
                self._context.leases.update(*place, step=covered.step, ready=True)

    async def _take_stock(self, jobs: Mapping[JobId, tuple[JobRecord, Manifest]]) -> None:
        """Read from our own disk which shards the jobs' newest snapshots consist of."""
        self._shards = {job: known for job, known in self._shards.items() if job in jobs}
        blobs = self._context.blobs
        for job, (record, manifest) in jobs.items():
            digest, known = record.snapshot, self._shards.get(job)
            if digest is None or (known is not None and known[0] == digest) or not blobs.has(digest):
                continue
            try:
                data = await blobs.of(job).read(digest, snapshot.MAX_INDEX_BYTES)
                index = snapshot.decode_index(data, job, manifest.stages)
            except (SwarmError, JobError) as error:
                log.warning("the snapshot of %s: %s", manifest.name, one_line(str(error)))
                continue
            self._shards[job] = (digest, index.step, index.shards)
        blobs.hold(self, {shard for *_, shards in self._shards.values() for shard in shards})


def _version(record: JobRecord) -> tuple[Digest | None, int]:
    """What a standby follows of a job."""
    return record.snapshot, record.snapshot_step
