"""A peer at work: it looks for jobs in the directory, claims stages and runs them.

This is the loop. What the peer knows of jobs is in `job_view`, the records that it publishes of them in
`fusion.runtime.hosting.jobs`, what runs here in `hosted_stages`, and how stages are claimed in `stage_claims`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fusion.runtime.hosting.handover import HandoverConfig, Handovers
from fusion.runtime.hosting.hosted_stages import HostedStages
from fusion.runtime.hosting.job_view import JobView
from fusion.runtime.hosting.jobs.board import JobBoard
from fusion.runtime.hosting.jobs.files import JobFiles, KeptJobRecords
from fusion.runtime.hosting.jobs.gossip import JobGossip
from fusion.runtime.hosting.jobs.server import JobServer
from fusion.runtime.hosting.jobs.service import Service
from fusion.runtime.hosting.stage_claims import StageClaims
from fusion.runtime.hosting.standby_pool import Pool
from fusion.runtime.job.context import Context
from fusion.swarm.directory.api import GLANCE_SECONDS, HEARTBEAT_SECONDS
from fusion.swarm.directory.records import ClaimRecord, JobId, JobRecord, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

REST_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class HostingConfig:
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    nudge_seconds: float = 0.2  # between two beats at least, however often other peers request one
    cool_down_seconds: float = 5.0  # after a stage failed here, doubling, before this peer claims it again
    max_stages: int = (
        32  # at once: each renews a claim at every heartbeat, whose signature all peers that store it check
    )
    places: int = 512  # stages whose claims are read in one heartbeat
    handover: HandoverConfig = HandoverConfig()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.heartbeat_seconds <= 0 or self.nudge_seconds < 0 or min(self.max_stages, self.places) < 1:
            raise ValueError(
                "heartbeat_seconds, max_stages and places must be positive, nudge_seconds at least 0"
            )


class Hosting:
    """Claims stages for this peer and runs them until their job ends, they are lost, or the peer leaves.

    `fitness` is the score, from 0 to below 1, of our claims to stages that no placement proposed us for. `run` does it all;
    `beat` is one heartbeat of it, for tests that drive the context's clock themselves.
    """

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        fitness: float,
        config: HostingConfig | None = None,
        files: JobFiles | None = None,
    ) -> None:
        assert context.takeover is not None, "a peer that holds stages takes over others"
        config = config or HostingConfig()
        # Called when stages or standbys have ended here, once for all within REST_SECONDS: a stranger's job may end dozens
        # of them, and the garbage collection that follows stops the loop.
        self.on_rest: Callable[[], object] = lambda: None
        self._rest_due = False
        self._context = context
        self._config = config
        self._takeover = takeover = context.takeover
        self.board = board = JobBoard(context.peer_id)
        kept = None if files is None else KeptJobRecords(files, context.clock.monotonic)
        self._gossip = JobGossip(context, services, board, self._snapshotted, kept)
        self._server = JobServer(context, board, self._gossip, self.nudge, self._finish, self._stopped)
        self._stages = HostedStages(context, services, board, self._gossip, config.cool_down_seconds)
        self._gossip.isolated = self._stages.faults.isolated
        self.failures = self._stages.failures
        self._pool = Pool(context, services, self._stages.spawn, fitness)
        self._view = JobView(context, board, config.places, self._stages, self.nudge)
        self._claims = StageClaims(
            context, self._stages, board, takeover, fitness, config.max_stages, self.nudge
        )
        self._handovers = Handovers(self._stages, context, takeover, config.handover)
        self._nudged = asyncio.Event()
        self._beating = asyncio.Lock()

    @property
    def _our_jobs(self) -> set[JobId]:
        """Those whose stages we run or stand by for."""
        return self._stages.jobs | self._pool.jobs

    @property
    def _engaged(self) -> bool:
        """Whether we have a part in a job: a stage, a standby, or a record to publish."""
        return bool(self._stages.occupied or self._pool.jobs or self.board.republished)

    @property
    def hosted(self) -> tuple[Place, ...]:
        """The stages that run here now."""
        return self._stages.places

    def nudge(self) -> None:
        """Beat now rather than at the next heartbeat."""
        self._nudged.set()

    async def start(self) -> None:
        self._stages.on_begin, self._stages.on_release = self._begun, self._released
        self._pool.on_stop, self._pool.claims = self._rest_soon, self._stages.claims
        self._context.leases.on_lost = self._stages.lost
        await self._takeover.start(self)
        await self._gossip.start()
        await self._server.start()

    async def run(self) -> None:
        """Read the directory, claim, host and publish until cancelled; then release what we hold."""
        async with asyncio.TaskGroup() as tasks:
            self._stages.tasks = tasks
            tasks.create_task(self._gossip.poll())
            try:
                await self._gossip.publish()  # after a cold start ours may be the only records
                await self._beat_for_ever()
            finally:
                self._stages.tasks = None
                with suppress(SwarmError, OSError):
                    await self._gossip.publish_all()  # before others see that the stages are free
                await self._stages.aclose(self._pool.aclose())

    async def _beat_for_ever(self) -> None:
        """Beat at each heartbeat, and at once after a nudge, but at least `nudge_seconds` apart."""
        loop = asyncio.get_running_loop()
        while True:
            again = loop.time() + self._config.nudge_seconds
            nudged = self._nudged.is_set()
            self._nudged.clear()
            await self.beat(nudged=nudged)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat_seconds):
                    await self._nudged.wait()
            await asyncio.sleep(again - loop.time())

    async def beat(self, *, nudged: bool = True) -> None:
        """Read the directory once, claim what we should and publish; only while `run` runs. Not `nudged`: nobody waits for
        it, so a peer that has no part in any job may read cached records."""
        async with self._beating:
            try:
                await self._claims.give_back()
                await self._decide(0.0 if nudged or self._engaged else GLANCE_SECONDS)
                await self._gossip.publish()
            except (SwarmError, OSError) as error:
                log.warning("directory: %s", error)

    # --- one beat, decision by decision

    async def _decide(self, max_age_seconds: float) -> None:
        """Act on the records and claims in the directory. Each decision depends on those before it."""
        records = await self._view.job_records(max_age_seconds)
        known = self._view.manifests(records, self._our_jobs)
        claims = await self._view.claims(known, records, self._stages.running, self._our_jobs)
        # Which records to believe (`fusion.swarm.authority.belief`). Of jobs that are over nothing is claimed or stood by
        # for any more.
        beliefs = await self._view.beliefs(records, known, claims)
        self._end([belief.record for belief in beliefs.values() if belief.settled])
        jobs = self._view.open_jobs(beliefs, known)
        self.board.set_open(jobs)
        # Of them, those that our plane can run (`runnable_stages`); others are neither stood by for nor claimed.
        claims = {
            (job, stage): live
            for (job, stage), live in claims.items()
            if job in jobs and self._claims.runs(job, jobs[job][1], stage)
        }
        # Which stages to stand by for (`standby_assignment`). Then it is known which jobs concern us, and which states are
        # on this peer.
        if not self._stages.leaving:
            await self._pool.beat(jobs, claims, self.hosted, self._context.memory.free_bytes)
        # Which jobs to publish because nobody else does, also while we leave. Ends without proof are not among them.
        own = self._our_jobs
        believed = [belief.record for belief in beliefs.values() if belief.settled or not belief.over]
        leaderless = await self._view.leaderless(own, self._stages.running, claims)
        self.board.update_from_directory(believed, own, leaderless)
        if self._stages.leaving:
            return
        # Which of our stages an idle peer should have (`claim_choice.one_to_hand_on`): before there are more of them.
        self._handovers.spread()
        # Which stages are free for us to claim (`vacant_stages`), and which of them we do (`claim_choice`).
        vacant = self._claims.vacant(jobs, claims, self._pool.step_here)
        chosen = await self._claims.choose(vacant)
        await asyncio.gather(*(self._claims.claim(stage, jobs[stage.job]) for stage in chosen))

    def _end(self, records: Sequence[JobRecord]) -> None:
        for record in records:
            self._stages.end(record.job, record)
            if not self._gossip.concludes(record):
                self._stages.cancel(record.job)

    # --- what else happens between two beats

    def _begun(self, place: Place) -> None:
        self._claims.filled(place)
        self._pool.promoted(place)

    def _released(self) -> None:
        self._rest_soon()
        self.nudge()

    def _rest_soon(self) -> None:
        if not self._rest_due:
            self._rest_due = True
            asyncio.get_running_loop().call_later(REST_SECONDS, self._rest)

    def _rest(self) -> None:
        self._rest_due = False
        self.on_rest()

    def _snapshotted(self, record: JobRecord) -> None:
        self._pool.follow(record)

    def _finish(self, job: JobId) -> bool:
        """Have a job that we lead save its last snapshot and end; False where there is nothing to wait for."""
        first = self._stages.running.get((job, 0))
        return first is not None and first.service.stop(job)

    def _stopped(self, job: JobId) -> None:
        self._stages.end(job)
        self._stages.cancel(job)

    async def leave(self) -> None:
        """Hand every stage to a standby at a boundary where nothing is lost, as far as there are any; `run` may be
        cancelled then. Nothing is claimed any more. The time it takes is bounded."""
        self._stages.leaving = True
        with suppress(SwarmError, OSError):
            await self._gossip.publish_all()  # for the next leads
        await self._pool.aclose()
        await self._handovers.leave()

    # --- a stage whose owner is gone, or leaves: `fusion.runtime.job.context.StageHolder`

    def holds(self, job: JobId, stage: int) -> int:
        """The term under which the stage runs here; 0 if it does not."""
        return self._stages.holds((job, stage))

    @property
    def occupied(self) -> bool:
        """Whether a stage runs here, or is about to."""
        return self._stages.occupied

    async def take_over(
        self,
        job: JobId,
        stage: int,
        over: int,
        handover: Mapping[str, Any] | None,
        proof: tuple[bytes, ...] = (),
    ) -> ClaimRecord | None:
        """Claim the stage above the term `over`, whose holder is gone or has released it, as `proof` shows, and begin to
        host it. None where we cannot or another peer was first."""
        return await self._claims.take_over((job, stage), over, handover, proof)

    def give_away(self, job: JobId, stage: int, peer: PeerId) -> None:
        """Begin to hand a stage that runs here to `peer`. It stays here if the peer does not take it."""
        self._handovers.give_away((job, stage), peer)
