"""One stage's eye on its step: whether it stands still, and what is done about the owner that it stands still with.

Every stage tells the lead for whom it waits, once that takes long. The lead tells the owner that holds all up to leave
(`fusion.runtime.training.step.stalls` decides), if a standby is ready. Whoever sees for itself that its own step stands still, and
was told so, votes from then on that this owner is gone, though it answers, and where it has not left soon asks the
standbys to take over. A lead that does nothing tells nothing: each stage sees so for itself.

All times are parts or multiples of the context's `stall_seconds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from fusion.runtime.job.context import Context
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.stage_work import StageWork
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.events import StageEvent
from fusion.runtime.training.step.stalls import LEAD, LEAD_STALLS, NOT_ALL_SAY_SO, StallClock
from fusion.swarm.claims.election import stands_by, winner
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.api import GLANCE_SECONDS
from fusion.swarm.directory.records import ClaimRecord

LOOK = 1 / 60  # from one look to the next
# From one word to the lead to the next; and for an owner to leave before others ask for its stage
SAY = 1 / 12
GOOD = 1 / 4  # for which such a word is good
VOTE = 2.0  # for which we vote that an owner is gone
MOST_READ = 8  # stages whose owners are read again before the lead is said to be at fault
MOST_SEEN = 64  # of the stages of which one has to go: jobs may have thousands


class StallWatch:
    """Of the stage of `work`."""

    def __init__(self, context: Context, work: StageWork, outbox: Outbox) -> None:
        self._context = context
        self._work = work
        self._outbox = outbox
        self._clock: StallClock | None = None
        self._said = 0.0  # when we last said that our step stands still
        self._idle: dict[int, tuple[Holding, float]] = {}  # stage -> an owner that does nothing, seen when
        self._voted = False  # against any, since the last commit

    async def run(self) -> None:
        here, least = self._work.here, self._context.stall_seconds
        self._clock = StallClock(
            least_seconds=least, since=_now(), tensor_bytes=self._work.largest_bytes,
            state_bytes=max(here.memory_bytes, default=0),
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(LOOK * least)
                await self._look(self._clock, _now())
                self._ask_standbys(_now(), group)

    def hear(self, event: m.Message | StageEvent) -> None:
        """What the stage is about to follow."""
        match event:
            case m.Begin() if self._clock is not None:
                self._clock = self._clock.begin()
            case m.Discard(give_up=told) if self._outbox.lead is None and self._stands_still(1.0):
                for stage, term, _ in told:
                    held = self._context.leases.tenure(self._work.here.job, stage)
                    if held is not None and held.claim.term == term:
                        self._vote_against(held.claim)

    def committed(self) -> None:
        """A step is, here: whoever has a stage works for it."""
        if self._clock is not None:
            self._clock = self._clock.commit(_now())
        if self._voted and self._context.takeover is not None:
            self._voted = False
            self._idle.clear()
            self._context.takeover.withdraw_votes(self._work.here.job)

    async def _look(self, clock: StallClock, now: float) -> None:
        lead, waits_for = self._outbox.lead, self._waits_for
        mark = self._work.mark if lead is None else (self._work.mark, lead.mark)
        self._clock = clock.see(now, mark, busy=waits_for is None)
        pause = SAY * self._context.stall_seconds
        if waits_for is not None and self._stands_still(1.0) and now - self._said >= pause:
            self._said = now
            if lead is not None:
                await self._replace_one(now, waits_for)
            else:
                self._outbox.send(0, m.Suspect(m.NO_JOIN, waits_for=waits_for))
                if self._stands_still(LEAD_STALLS):
                    await self._doubt_lead(ask=waits_for in (LEAD, 0))

    @property
    def _waits_for(self) -> int | None:
        """The stage that we wait for, LEAD for its word; None while we have something to do ourselves."""
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

    async def _replace_one(self, now: float, waits_for: int) -> None:
        """As the lead: have one of those leave with whom the step stands still, if another is ready to take its stage."""
        lead, clock = self._outbox.lead, self._clock
        assert lead is not None and clock is not None
        since = max(clock.since, now - GOOD * self._context.stall_seconds)
        every, mark = not self._stands_still(NOT_ALL_SAY_SO), lead.mark
        for stage in lead.culprits(waits_for, since, all_say_so=every)[:MOST_SEEN]:
            if not _is_covered(self._context.leases.recent(self._work.here.job, stage)):
                continue
            claims = await self._claims(stage)
            owner = winner(claims)
            if lead.mark != mark:
                return
            if owner is not None and _is_covered(claims):
                lead.replace_idle(stage, owner.peer, owner.term)
                self._vote_against(owner)
                self._clock = replace(clock, since=now)  # for the next owner
                return

    async def _doubt_lead(self, *, ask: bool) -> None:
        """The lead does nothing about it, unless it waits for a stage that nobody has. `ask`: its standbys, too: we wait for the lead
        itself, where others wait for those who do."""
        law = self._context.access.law(self._work.here.job)
        if law is None:
            return
        held, unix = self._context.leases.known_tenure, self._context.directory.now()
        known = [held(law.job, stage) for stage in range(law.stages)]
        unknown = [stage for stage, each in enumerate(known) if each is None or not each.lives(unix)]
        if len(unknown) > MOST_READ:
            return
        found = await asyncio.gather(*(self._claims(stage) for stage in {0, *unknown}))
        owners = [winner(claims) for claims in found]
        owner = winner(self._context.leases.recent(law.job, 0))
        if owner is not None and all(owners) and self._stands_still(LEAD_STALLS):
            self._vote_against(owner, ask=ask)

    async def _claims(self, stage: int) -> tuple[ClaimRecord, ...]:
        return await self._context.leases.claims_or_recent(self._work.here.job, stage, GLANCE_SECONDS)

    def _vote_against(self, owner: ClaimRecord, *, ask: bool = True) -> None:
        takeover, here = self._context.takeover, self._work.here
        if takeover is None or owner.peer == self._context.peer_id:
            return
        self._voted = True
        before = self._idle.get(owner.stage)
        if ask and (before is None or before[0].peer != owner.peer):
            self._idle[owner.stage] = Holding(owner.peer, owner.term), _now()
        seconds = VOTE * self._context.stall_seconds
        takeover.vote_against(here.job, owner.stage, owner.peer, owner.term, seconds)

    def _ask_standbys(self, now: float, group: asyncio.TaskGroup) -> None:
        """For the stages of those that were to leave and have not."""
        for stage, (holding, since) in list(self._idle.items()):
            held, seen = self._context.leases.tenure(self._work.here.job, stage), now - since
            left = held is None or held.claim.peer != holding.peer
            if left or seen >= VOTE * self._context.stall_seconds:
                del self._idle[stage]
            elif held is not None and seen >= SAY * self._context.stall_seconds:
                self._outbox.partners.replace(held.claim, group)


def _is_covered(claims: Sequence[ClaimRecord]) -> bool:
    """Whether somebody beside its owner has the stage in memory, to take it over at once."""
    owner = winner(claims)
    return owner is not None and any(
        stands_by(claim) and claim.ready and claim.peer != owner.peer for claim in claims
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
