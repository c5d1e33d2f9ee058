"""How this peer gets a stage: it claims one that is vacant, or takes one over whose owner is gone or leaves. Either way it first
reserves the memory, then claims the stage, then runs it.

`claim_choice` decides which vacant stages it claims, `vacant_stages` from when on it may.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fusion.runtime.belief.reading import newest
from fusion.runtime.hosting.claim_choice import (
    VacantStage,
    depends_on_idle_peers,
    one_early,
    our_share,
    stages_to_claim,
)
from fusion.runtime.hosting.hosted_stages import HostedStages, workload_of
from fusion.runtime.hosting.job_view import OpenJob, OpenJobs, StagesClaims
from fusion.runtime.hosting.jobs.board import JobBoard
from fusion.runtime.hosting.runnable_stages import RunnableStages
from fusion.runtime.hosting.vacant_stages import NO_CLAIM_SECONDS, VacantStages
from fusion.runtime.job.context import Context, Takeover
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.directory.job_order import newest_jobs
from fusion.swarm.directory.records import ClaimRecord, JobId, JobRecord, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

RECORD_SECONDS = 0.3  # to read the job's record, while other peers wait for us to lead it


class StageClaims:
    """At most `max_stages` run here at once. `fitness`: the score of claims to stages that we were not proposed for. `nudge` is
    called when a graph that was read shows which stages our plane can run."""

    def __init__(
        self,
        context: Context,
        stages: HostedStages,
        board: JobBoard,
        takeover: Takeover,
        fitness: float,
        max_stages: int,
        nudge: Callable[[], None],
    ) -> None:
        self._vacancies = VacantStages(context.peer_id, fitness, context.clock.monotonic)
        self._context = context
        self._stages = stages
        self._board = board
        self._takeover = takeover
        self._fitness = fitness
        self._max_stages = max_stages
        self._runnable = RunnableStages(context, stages.spawn, nudge)

    def runs(self, job: JobId, manifest: Manifest, stage: int) -> bool:
        """Whether the stage can run here, as far as we know."""
        return workload_of(manifest) not in self._stages.unrunnable and self._runnable.runs(
            job, manifest, stage
        )

    @property
    def _free_stages(self) -> int:
        return self._max_stages - len(self._stages.running)

    # --- vacant stages

    def vacant(
        self, jobs: OpenJobs, claims: StagesClaims, step_here: Callable[[Place], int]
    ) -> tuple[VacantStage, ...]:
        """The stages that we may claim now. `step_here`: the step whose state of a stage is on this peer, or -1."""
        found = []
        for place, held in claims.items():
            if place not in self._stages.running:
                with self._stages.faults.isolated(place[0]):
                    vacancy = self._vacancy(place, jobs[place[0]], held, step_here)
                    if vacancy is not None:
                        found.append(vacancy)
        return one_early(found, self._context.peer_id)

    def _vacancy(
        self,
        place: Place,
        known: OpenJob,
        held: tuple[ClaimRecord, ...],
        step_here: Callable[[Place], int],
    ) -> VacantStage | None:
        record, manifest = known
        # After a cold start a peer that has the state of a stage need not fetch it.
        stocked = record.snapshot is not None and step_here(place) >= record.snapshot_step
        early = stocked and not self._stages.running
        if self._context.leases.refusal(*place, "own") is not None:
            return None  # the job does not admit us
        account = self._context.accounts.of(place[0], manifest.author)
        behind = partial(self._is_behind, place)
        vacancy = self._vacancies.look(place, manifest, held, account=account, early=early, behind=behind)
        fits = vacancy is not None and vacancy.memory_bytes <= self._context.memory.free_bytes
        return vacancy if fits and not self._stages.cooling.lasts(place) else None

    def _is_behind(self, place: Place) -> bool:
        return self._context.leases.stale_claim(*place) is not None

    async def choose(self, vacant: Sequence[VacantStage]) -> tuple[VacantStage, ...]:
        """Those to claim now; the others are left to other peers."""
        busy = bool(self._stages.running)
        if depends_on_idle_peers(vacant, busy=busy):
            peers = await self._context.directory.peers()
            vacant = our_share(vacant, self._context.peer_id, peers, busy=busy)
        running = Counter(self._stages.accounts())
        return stages_to_claim(vacant, self._context.memory.free_bytes, self._free_stages, running)

    async def claim(self, vacancy: VacantStage, known: OpenJob) -> None:
        """Claim a vacant stage and run it, unless its last owner, whose claim the directory has no more, answers that it holds it:
        that peer gets NO_CLAIM_SECONDS to publish a claim again."""
        with self._stages.faults.isolated(vacancy.job):
            await self._claim(vacancy, known)

    async def _claim(self, vacancy: VacantStage, known: OpenJob) -> None:
        place, (record, manifest) = (vacancy.job, vacancy.stage), known
        vanished = self._vacancies.vanished(place, self._context.leases.recent(*place))
        if (
            vanished is not None
            and vacancy.empty_seconds < NO_CLAIM_SECONDS
            and self._may_own(vanished, place)
            and await self._takeover.holds(vanished, *place)
        ):
            return
        if self._board.get(vacancy.job) is None:
            return
        with self._stages.room(place, manifest) as fits:
            if not fits:
                return
            try:
                if await self._context.leases.claim(vacancy.job, vacancy.stage, vacancy.score) is not None:
                    self._stages.begin(place, record, manifest)
            except SwarmError as error:
                log.warning("stage %d of %s not claimed: %s", vacancy.stage, manifest.name, error)
                self._stages.cooling.start(place)
        await self.give_back()

    def _may_own(self, peer: PeerId, place: Place) -> bool:
        """Whether the job still admits its last owner: one that it does not admit may go on all the same."""
        last, access = self._context.leases.known_tenure(*place), self._context.leases.access
        grants = last.claim.grants if last is not None and last.claim.peer == peer else ()
        return access.refusal(place[0], peer, "own", place[1], grants) is None

    def filled(self, place: Place) -> None:
        """The stage runs here now."""
        self._vacancies.filled(place)

    # --- stages whose owner is gone, or leaves

    async def take_over(
        self, place: Place, over: int, handover: Mapping[str, Any] | None, proof: tuple[bytes, ...] = ()
    ) -> ClaimRecord | None:
        """As in `StageHolder`."""
        (job, stage), known = place, self._board.get(place[0])
        if place in self._stages.running:
            return self._context.leases.holds(job, stage)
        if known is None or not self._stages.accepting or self._stages.cooling.lasts(place):
            return None
        record, manifest = known
        if self._free_stages <= 0 or not 0 <= stage < manifest.stages:
            return None
        if self._context.leases.refusal(job, stage, "own") is not None:
            return None
        if not self.runs(job, manifest, stage):
            return None
        with self._stages.room(place, manifest) as fits:
            if not fits:
                return None
            reading = asyncio.ensure_future(self._newest(record, manifest)) if stage == 0 else None
            try:
                claim = await self._context.leases.claim(
                    job, stage, self._fitness, over=over, proof=proof, confirm=handover is None
                )
                if claim is None:
                    return None
                if reading is not None:
                    record = await reading  # a lead must know the newest snapshot
                self._stages.begin(place, record, manifest, handover)
            except SwarmError as error:
                log.warning("stage %d of %s not claimed: %s", stage, manifest.name, error)
                return None
            finally:
                if reading is not None:
                    reading.cancel()
        await self.give_back()
        return self._context.leases.holds(job, stage)

    async def _newest(self, record: JobRecord, manifest: Manifest) -> JobRecord:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(RECORD_SECONDS):
                found = await newest(self._context, record.job, manifest)
                return newest_jobs([record, found])[0] if found is not None else record
        return record

    # --- claims that were granted too late

    async def give_back(self) -> None:
        """Release the stages that we own and that do not run here."""
        for place in self._stages.unused():
            with self._stages.faults.isolated(place[0]), suppress(SwarmError):
                await self._context.leases.release(*place)
