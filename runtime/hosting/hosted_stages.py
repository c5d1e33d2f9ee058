"""The stages that run on this peer, from our claim to its release, and how each of them ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cachetools import FIFOCache

from fusion.runtime.device.new_job_pace import STAGE_SECONDS
from fusion.runtime.hosting.job_faults import JobFaults
from fusion.runtime.hosting.jobs.board import JobBoard
from fusion.runtime.hosting.jobs.gossip import JobGossip
from fusion.runtime.hosting.jobs.service import Service
from fusion.runtime.job.context import Context
from fusion.runtime.job.cool_down import CoolDown
from fusion.runtime.job.errors import JobFailed, Refused, Unrunnable
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import MAX_FAILURES, MAX_REASON, Progress, StageFailure
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, Place
from fusion.swarm.errors import StaleTerm, SwarmError
from fusion.swarm.printable import error_line, one_line
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

LONGEST_COOL_DOWN_SECONDS = 300.0
OVERTAKEN_SECONDS = 5.0  # within which only one failure by a stale term goes without a cool-down
UNRUNNABLE = 256  # workloads remembered
SETTLED_SECONDS = 60.0  # a stage that ran for so long before it failed starts a new back-off


Workload = tuple[str, bool, Digest, tuple[int, ...]]


def workload_of(manifest: Manifest) -> Workload:
    """A key that is the same for jobs that run the same under other ids, and in the same mode: a graph that cannot generate may still
    answer in one run."""
    in_one_run = manifest.serve is not None and bool(manifest.serve.outputs)
    return manifest.kind, in_one_run, manifest.graph, tuple(manifest.cuts)


@dataclass(eq=False)
class Hosted:
    """A stage that runs here."""

    task: asyncio.Task[None]
    manifest: Manifest
    service: Service
    passing: bool = False  # it is being handed to another peer: we expect to lose the claim


class HostedStages:
    """Stages run as tasks of `tasks`, None while nothing is hosted. A stage that failed here may be claimed again after
    `cool_down_seconds`, doubling."""

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        board: JobBoard,
        gossip: JobGossip,
        cool_down_seconds: float,
    ) -> None:
        self._clock = clock = context.clock.monotonic
        self.running: dict[Place, Hosted] = {}
        self.tasks: asyncio.TaskGroup | None = None
        self.leaving = False  # nothing begins here any more
        self.faults = JobFaults()
        self.faults.leave = self._leave
        self.on_begin: Callable[[Place], object] = lambda place: None  # a stage runs here from now on
        self.on_release: Callable[[], object] = lambda: None  # one has ended here and is released
        self.cooling: CoolDown[Place] = CoolDown(cool_down_seconds, LONGEST_COOL_DOWN_SECONDS, clock)
        # Of jobs that no peer could run: another job of the same workload is neither claimed nor published.
        self.unrunnable: FIFOCache[Workload, None] = FIFOCache(UNRUNNABLE)
        self._overtaken: CoolDown[Place] = CoolDown(OVERTAKEN_SECONDS, OVERTAKEN_SECONDS, clock)
        # Of the last failure of each stage here
        self._reasons: FIFOCache[Place, str] = FIFOCache(MAX_FAILURES)
        self._claiming: list[Place] = []
        self._context = context
        context.pace.beside = self._run_beside
        self._services = services
        self._board = board
        self._gossip = gossip

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(sorted(self.running))

    @property
    def jobs(self) -> set[JobId]:
        return {job for job, _ in self.running}

    def failures(self) -> tuple[StageFailure, ...]:
        """The stages that failed here and do not run here now, the newest first."""
        failed = [(place, reason) for place, reason in self._reasons.items() if place not in self.running]
        return tuple(
            StageFailure(job=job, stage=stage, reason=reason) for (job, stage), reason in reversed(failed)
        )

    @property
    def occupied(self) -> bool:
        """Whether a stage runs here, or is about to."""
        return bool(self.running or self._claiming)

    @property
    def accepting(self) -> bool:
        """Whether stages may begin here."""
        return self.tasks is not None and not self.leaving

    def claims(self, place: Place) -> bool:
        """Whether we are claiming the stage now, with its memory reserved."""
        return place in self._claiming

    def holds(self, place: Place) -> int:
        """The term under which the stage runs here; 0 if it does not."""
        hosted, claim = self.running.get(place), self._context.leases.holds(*place)
        return claim.term if hosted is not None and claim is not None and not hosted.task.done() else 0

    def spawn(self, job: JobId, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` for the job beside the stages: it ends none but the job's own."""
        assert self.tasks is not None, "nothing is hosted"
        task = self.tasks.create_task(self.faults.isolate(job, work), name=repr(work))
        # A task that is cancelled at once never awaits it
        task.add_done_callback(lambda _: work.close())
        return task

    def _run_beside(self, account: PeerId) -> bool:
        """Whether stages of others' jobs run here."""
        return any(other != account for other in self.accounts())

    def accounts(self) -> Iterator[PeerId]:
        """The account that each of the stages that run here is charged to."""
        for (job, _), hosted in self.running.items():
            yield self._context.accounts.of(job, hosted.manifest.author)

    # --- from a claim to its release

    @contextmanager
    def room(self, place: Place, manifest: Manifest) -> Iterator[bool]:
        """Reserves the stage's memory while it is claimed, so that concurrent claims together do not exceed the budget; a stage that
        begins keeps it. Yields whether there was enough."""
        try:
            self._context.memory.hold(place, manifest.needed_bytes(place[1]))
        except MemoryError:
            yield False
            return
        self._claiming.append(place)
        try:
            yield True
        finally:
            self._claiming.remove(place)
            if place not in self.running and place not in self._claiming:
                self._context.memory.release(place)

    def unused(self) -> Iterator[Place]:
        """Stages that we own and that do not run here: they were granted after the job had ended or we began to leave, and are
        blocked for other peers."""
        for claim in self._context.leases.owned():
            place = (claim.job, claim.stage)
            if place not in self.running and place not in self._claiming:
                yield place

    def begin(
        self,
        place: Place,
        record: JobRecord,
        manifest: Manifest,
        handover: Mapping[str, Any] | None = None,
    ) -> None:
        """Run a stage that we have claimed, unless it runs already, or we have lost it."""
        claim = self._context.leases.holds(*place)
        over = not self.accepting or self._board.get(place[0]) is None
        if over or place in self.running or claim is None:
            return
        task = self.spawn(claim.job, self._run(claim, record, manifest, handover))
        self.running[place] = Hosted(task, manifest, self._services[manifest.kind])
        account = self._context.accounts.of(place[0], manifest.author)
        self._context.pace.charge(place[0], account, STAGE_SECONDS)
        self.on_begin(place)
        task.add_done_callback(lambda _: self._ended(place))

    async def _run(
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
            self.end(job)
            log.info("stage %d of %s has ended", stage, manifest.name)
            await self._gossip.conclude(record, *final)
        except JobFailed as error:
            log.error("job %s failed: %s", manifest.name, one_line(str(error)))
            if isinstance(error, Unrunnable):
                self.unrunnable[workload_of(manifest)] = None
            self.end(job)
            if stage == 0:
                self._board.cut_short(job, "failed", str(error), *final)
        except Exception as error:
            # Isolates a stage, which is built from what a stranger sent: no error of it may end the peer's other stages.
            self._failed(claim, manifest, error, self._clock() - began)
        finally:
            if stage == 0:
                self._board.stop_leading(job, *final)

    def _failed(self, claim: ClaimRecord, manifest: Manifest, error: Exception, ran_seconds: float) -> None:
        """The stage cannot go on here, for now."""
        place = (claim.job, claim.stage)
        if self._context.leases.holds(*place) is None:
            log.info("stage %d of %s is over here: %s", claim.stage, manifest.name, one_line(str(error)))
            return  # another peer owns it: an expected refusal
        self._reasons.pop(place, None)
        self._reasons[place] = _reason(error, str(self._context.home))
        if isinstance(error, Refused):  # other peers may accept it
            log.warning("refused: %s", one_line(str(error)))
            self.cooling.refuse(place)
            return
        what = (claim.stage, manifest.name, type(error).__name__, one_line(str(error)))
        log.error("stage %d of %s: %s: %s", *what)
        log.debug("where it happened", exc_info=error)
        if isinstance(error, StaleTerm) and not self._overtaken.lasts(place):
            self._overtaken.start(place)
            return  # the neighbours refused our term with a higher one: the next claim is above that
        if ran_seconds >= SETTLED_SECONDS:
            self.cooling.forget(place)
        self.cooling.start(place)

    def _ended(self, place: Place) -> None:
        """Release a stage that has ended here, even one that was cancelled before it began."""
        if self.tasks is not None:
            self.spawn(place[0], self._release(place))

    async def _release(self, place: Place) -> None:
        try:
            await self._context.leases.release(*place)
        except SwarmError as error:
            log.warning("stage %d of job %s not released: %s", place[1], place[0][:12], error)
        finally:
            del self.running[place]
            self._context.memory.release(place)
            self.on_release()

    # --- stages that end before their job does

    def lost(self, claim: ClaimRecord) -> None:
        """Another peer has claimed the stage above us."""
        hosted = self.running.get((claim.job, claim.stage))
        if hosted is not None and not hosted.passing:
            log.warning("stage %d of %s now belongs to another peer", claim.stage, hosted.manifest.name)
            hosted.task.cancel()

    def end(self, job: JobId, record: JobRecord | None = None) -> None:
        """The job has ended, as `record` states, if there is one: none of its stages begins any more."""
        self._board.end(job, self._context.leases.known_term(job, 0), record)
        for place in [place for place in self._reasons if place[0] == job]:
            del self._reasons[place]

    def _leave(self, job: JobId) -> None:
        self.end(job)
        self.cancel(job)

    def cancel(self, job: JobId) -> None:
        """Stop all stages of the job."""
        for (other, _), hosted in self.running.items():
            if other == job:
                hosted.task.cancel()

    async def aclose(self, *others: Coroutine[Any, Any, None]) -> None:
        """Stop and release all stages, and await `others` meanwhile."""
        for hosted in self.running.values():
            hosted.task.cancel()
        releases = (self._context.leases.release(*place) for place in self.running)
        for error in await asyncio.gather(*others, *releases, return_exceptions=True):
            if isinstance(error, BaseException):
                log.warning("a stage was not released: %s", error_line(error))


def _reason(error: Exception, home: str) -> str:
    """One line for the job's launcher and any other peer, without paths of this machine."""
    if isinstance(error, OSError):
        return one_line(error.strerror or type(error).__name__)
    shown = type(error).__module__.startswith("fusion.") or isinstance(error, MemoryError)
    line = str(error).replace(home, "HOME") if os.path.isabs(home) else str(error)
    line = one_line(line[:MAX_REASON]) if shown else ""
    return line or type(error).__name__
