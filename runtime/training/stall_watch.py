"""Detects at one stage that its step has stalled, and has the owner at fault replaced.

A stage that has waited long reports to the lead which stage it waits for. The lead tells the owner at fault to give its stage
up (`fusion.runtime.training.step.stalls` decides), if a standby is ready. A stage that receives this while its own step is
stalled votes from then on that the owner is gone, though it answers, and if it has not left soon asks the standbys to take
over. An idle lead reports nothing: each stage detects that by itself.

The lead replaces in the same way an owner that keeps a snapshot from becoming durable
(`fusion.runtime.training.snapshots.late_parts` decides): without its last snapshot a job does not end. Where the lead is that owner, the
other stages detect it themselves.

All times are fractions or multiples of the context's `stall_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fusion.runtime.job.context import Context
from fusion.runtime.training.lead.lead import Lead
from fusion.runtime.training.snapshots.late_parts import BELIEVED, LeadDoubt
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.stage_work import StageWork
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.events import StageEvent
from fusion.runtime.training.step.stalls import LEAD, LEAD_STALLS, UNANIMOUS, StallClock
from fusion.swarm.claims.election import stands_by, winner
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.api import GLANCE_SECONDS
from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

CHECK_PERIOD = 1 / 60
# From one report to the lead to the next; and for an owner to leave before its standbys are asked to take over
REPORT_PERIOD = 1 / 12
REPORT_TTL = 1 / 4
VOTE_TTL = 2.0  # of our vote that an owner is gone
MOST_READ = 8  # stages whose claims are read again before the lead is suspected
MOST_SUSPECTS = 64  # considered at once: jobs may have thousands of stages


class StallWatch:
    """Watches the stage of `work` for stalls."""

    def __init__(self, context: Context, work: StageWork, outbox: Outbox) -> None:
        self._context = context
        self._work = work
        self._outbox = outbox
        self._clock: StallClock | None = None
        self._reported_at = 0.0  # when we last reported that our step has stalled
        self._idle: dict[int, tuple[Holding, float]] = {}  # stage -> its idle owner, and since when we know
        self._voted = False  # against any owner, since the last commit
        self._evaluates = False  # the step after the last commit evaluates the model
        self._lead_doubt = LeadDoubt()
        self._doubted: tuple[PeerId, float] | None = None  # the lead, and the wait, that it is about
        self._unproven: set[PeerId] = set()  # leads that we voted against without a proof
        self._doubting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        here, least = self._work.here, self._context.stall_seconds
        self._clock = StallClock(
            least_seconds=least, since=_now(), tensor_bytes=self._work.largest_bytes,
            state_bytes=max(here.memory_bytes, default=0),
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(CHECK_PERIOD * least)
                await self._check(self._clock, _now())
                if self._outbox.lead is None and (self._doubting is None or self._doubting.done()):
                    self._doubting = group.create_task(self._doubt_snapshot(self._clock.snapshot_patience))
                self._ask_standbys(_now(), group)

    def receive(self, event: m.Message | StageEvent) -> None:
        """An event, before the stage handles it."""
        match event:
            case m.Begin() if self._clock is not None:
                self._clock = self._clock.begin()
            case m.Commit(after=after):
                self._evaluates = after.evaluate
            case m.Discard(give_up=owners) if self._outbox.lead is None and self._stands_still(1.0):
                for stage, term, _ in owners:
                    held = self._context.leases.tenure(self._work.here.job, stage)
                    if held is not None and held.claim.term == term:
                        self._vote_against(held.claim)

    def committed(self) -> None:
        """A step was committed here, so every owner works."""
        if self._clock is not None:
            self._clock = self._clock.commit(_now(), evaluates=self._evaluates)
        if self._voted and self._context.takeover is not None:
            self._voted = False
            self._idle.clear()
            self._context.takeover.withdraw_votes(self._work.here.job)

    async def _check(self, clock: StallClock, now: float) -> None:
        lead, waits_for = self._outbox.lead, self._waits_for
        mark = self._work.mark if lead is None else (self._work.mark, lead.mark)
        self._clock = clock.see(now, mark, busy=waits_for is None)
        pause = REPORT_PERIOD * self._context.stall_seconds
        if lead is not None and now - self._reported_at >= pause:
            patience = clock.snapshot_patience
            believed = self._work.snapshots.waited_seconds >= BELIEVED * patience
            late = partial(lead.late_in_snapshot, patience, believed=believed)
            if suspects := late():
                self._reported_at = now
                await self._replace_first(lead, suspects, lambda: late() == suspects)
        if waits_for is not None and self._stands_still(1.0) and now - self._reported_at >= pause:
            self._reported_at = now
            if lead is not None:
                since = now - REPORT_TTL * self._context.stall_seconds
                if not clock.drags_on(now):
                    since = max(since, clock.since)
                unanimous, before = not self._stands_still(UNANIMOUS), lead.mark
                suspects = lead.culprits(waits_for, since, unanimous=unanimous)
                await self._replace_first(lead, suspects, lambda: lead.mark == before)
            else:
                self._outbox.send(0, m.Suspect(m.NO_JOIN, waits_for=waits_for))
                if self._stands_still(LEAD_STALLS):
                    stalled = partial(self._stands_still, LEAD_STALLS)
                    await self._vote_against_lead(stalled, ask=waits_for in (LEAD, 0))

    @property
    def _waits_for(self) -> int | None:
        """The stage that we wait for, or LEAD for a message of the lead; None while we have something to compute."""
        match self._work.state.phase:
            case "running":
                return self._work.waits_for
            case "ready":
                return LEAD
            case "idle":
                return LEAD if self._work.state.linked else self._outbox.partners.missing
            case _:
                return None

    def _stands_still(self, times: float) -> bool:
        running = self._work.state.phase in ("running", "ready")
        return self._clock is not None and self._clock.stands_still(_now(), running=running, times=times)

    async def _replace_first(
        self, lead: Lead, suspects: Sequence[int], unchanged: Callable[[], bool]
    ) -> None:
        """Replace the owner of the first of these stages that has a ready standby, while nothing has changed."""
        for stage in suspects[:MOST_SUSPECTS]:
            if not _is_covered(self._context.leases.recent(self._work.here.job, stage)):
                continue
            claims = await self._claims(stage)
            owner = winner(claims)
            if not unchanged():
                return
            if owner is not None and _is_covered(claims):
                lead.replace_idle(stage, owner.peer, owner.term)
                self._vote_against(owner)
                if self._clock is not None:
                    self._clock = replace(self._clock, since=_now())  # for the next owner
                return

    async def _doubt_snapshot(self, patience: float) -> None:
        """Find out whether it is the lead that keeps a snapshot from becoming durable, and vote against it if so."""
        snapshots, job = self._work.snapshots, self._work.here.job
        leader, since, index = (
            self._context.leases.known_holder(job, 0),
            snapshots.waits_since,
            snapshots.indexed,
        )
        if leader is None or since is None:
            return
        if (leader, since) != self._doubted:
            self._lead_doubt, self._doubted = LeadDoubt(), (leader, since)
        doubt = replace(self._lead_doubt, unproven=len(self._unproven - {leader}))
        waited = snapshots.waited_seconds, snapshots.attempt_seconds
        pause = REPORT_PERIOD * self._context.stall_seconds
        match doubt.next(*waited, patience, indexed=index is not None, ending=self._work.ends):
            case "check" if index is not None:
                refused = await snapshots.refuses_shard(0, index, patience)
                if (
                    refused
                ):  # a lead deletes its shard when it requests another snapshot: we may not know of that yet
                    await asyncio.sleep(pause)
                    refused = snapshots.indexed == index and await snapshots.refuses_shard(0, index, patience)
                refused &= snapshots.indexed == index
                if (leader, since) == self._doubted:
                    self._lead_doubt = replace(doubt, checked=snapshots.waited_seconds, refused=refused)
            case "vote":
                if not doubt.refused and leader not in self._unproven:
                    log.warning("the lead of job %.8s does not complete its last snapshot", job)
                    self._unproven.add(leader)
                await self._vote_against_lead(lambda: snapshots.waits_since == since, ask=True, kept=True)
                await asyncio.sleep(pause)

    async def _vote_against_lead(self, still: Callable[[], bool], *, ask: bool, kept: bool = False) -> None:
        """The lead does nothing about what the job waits for: vote against it, unless it waits for a stage without an owner. `ask`: ask
        its standbys to take over, too: we wait for the lead itself, others only for stages that do. `still`: whether that is so once
        claims were read; `kept`: as in `_vote_against`."""
        law = self._context.access.law(self._work.here.job)
        if law is None:
            return
        held, unix = self._context.leases.known_tenure, self._context.directory.now()
        known = [held(law.job, stage) for stage in range(law.stages)]
        unknown = [stage for stage, each in enumerate(known) if each is None or not each.lives(unix)]
        if len(unknown) > MOST_READ:
            return
        reads = await asyncio.gather(*(self._claims(stage) for stage in {0, *unknown}))
        owners = [winner(claims) for claims in reads]
        owner = winner(self._context.leases.recent(law.job, 0))
        if owner is not None and all(owners) and still():
            self._vote_against(owner, ask=ask, kept=kept)

    async def _claims(self, stage: int) -> tuple[ClaimRecord, ...]:
        return await self._context.leases.claims_or_recent(self._work.here.job, stage, GLANCE_SECONDS)

    def _vote_against(self, owner: ClaimRecord, *, ask: bool = True, kept: bool = False) -> None:
        """`kept`: whatever steps are committed, which would show that an owner does its part of them."""
        takeover, here = self._context.takeover, self._work.here
        if takeover is None or owner.peer == self._context.peer_id:
            return
        self._voted |= not kept
        before = self._idle.get(owner.stage)
        if ask and (before is None or before[0].peer != owner.peer):
            self._idle[owner.stage] = Holding(owner.peer, owner.term), _now()
        seconds = VOTE_TTL * self._context.stall_seconds
        takeover.vote_against(here.job, owner.stage, owner.peer, owner.term, seconds)

    def _ask_standbys(self, now: float, group: asyncio.TaskGroup) -> None:
        """Request standbys to take over from owners that were told to leave and have not."""
        for stage, (holding, since) in list(self._idle.items()):
            held, waited = self._context.leases.tenure(self._work.here.job, stage), now - since
            left = held is None or held.claim.peer != holding.peer
            if left or waited >= VOTE_TTL * self._context.stall_seconds:
                del self._idle[stage]
            elif held is not None and waited >= REPORT_PERIOD * self._context.stall_seconds:
                self._outbox.partners.replace(held.claim, group)


def _is_covered(claims: Sequence[ClaimRecord]) -> bool:
    """Whether a standby has the stage in memory and can take it over at once."""
    owner = winner(claims)
    return owner is not None and any(
        stands_by(claim) and claim.ready and claim.peer != owner.peer for claim in claims
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
