"""Hands stages over to other peers at a boundary where nothing is lost: all of them when this peer leaves, one of several of a
job once an idle peer stands by for it, and one that the job's lead moves."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fusion.runtime.hosting.claim_choice import one_to_hand_on
from fusion.runtime.hosting.hosted_stages import Hosted, HostedStages
from fusion.runtime.hosting.jobs.service import Service
from fusion.runtime.job.context import Context, Takeover
from fusion.runtime.job.cool_down import CoolDown
from fusion.runtime.job.errors import JobError
from fusion.swarm.claims.election import successors, winner
from fusion.swarm.claims.leases import Leases
from fusion.swarm.directory.records import ClaimRecord, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import one_line
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

PASS_SECONDS = 6.0  # for a stage to come to a boundary where it can be handed over
PATIENCE_SECONDS = 120.0  # the same, where the peer stays
SPREAD_SECONDS = 10.0  # between two stages that a peer that stays hands on
LONGEST_SPREAD_SECONDS = 600.0  # doubling up to that, for a stage that no peer took: each offer pauses it
OFFERS = (
    2  # idle peers that a stage is offered to one after the other: one that does not answer takes seconds
)
PROBED = 16  # the best standbys, before an offer
LAST_OFFERS = 3  # standbys that a stage is offered to where its owner leaves, and the job waits
# Standbys that are probed then: anybody may stand by under any number of ids, with the best of scores.
LAST_PROBED = 256
PROBED_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class HandoverConfig:
    settle_seconds: float = 5.0  # for the successor to run the stage
    look_seconds: float = 0.1  # between two reads of whether it does

    def __post_init__(self) -> None:
        if min(self.settle_seconds, self.look_seconds) <= 0:
            raise ValueError("settle_seconds and look_seconds must be positive")


class Handovers:
    """Of the stages in `stages`."""

    def __init__(
        self,
        stages: HostedStages,
        context: Context,
        takeover: Takeover,
        config: HandoverConfig,
    ) -> None:
        self._stages = stages
        self._leases = context.leases
        self._takeover = takeover
        self._config = config
        self._clock = context.clock.monotonic
        self._handing: asyncio.Task[None] | None = None
        self._handed_at = -math.inf
        self._untaken: CoolDown[Place] = CoolDown(SPREAD_SECONDS, LONGEST_SPREAD_SECONDS, self._clock)

    async def leave(self) -> None:
        """Hand over all stages that have standbys."""
        if self._handing is not None:
            self._handing.cancel()
            await asyncio.wait([self._handing])
        await asyncio.gather(
            *(self._pass_last(place, hosted) for place, hosted in list(self._stages.running.items()))
        )

    async def _pass_last(self, place: Place, hosted: Hosted) -> None:
        with self._stages.faults.isolated(place[0]):
            await self._pass_on(place, hosted)

    def spread(self) -> None:
        """Begin to hand a stage on if we run several of one job: all their state on this peer is lost together."""
        if self._clock() - self._handed_at < SPREAD_SECONDS:
            return
        if self._handing is not None and not self._handing.done():
            return
        us, hosts = self._leases.peer_id, self._stages.running
        running = [
            place for place in hosts if (held := self._leases.holds(*place)) is not None and held.ready
        ]
        chosen = one_to_hand_on(
            {place: self._leases.recent(*place) for place in running},
            [
                place
                for place in running
                if hosts[place].manifest.proposed[place[1]] == us or self._untaken.lasts(place)
            ],
        )
        if chosen is not None:
            job, stage, order = chosen
            self._handing = self._stages.spawn(job, self._hand_on((job, stage), hosts[job, stage], order))

    def give_away(self, place: Place, peer: PeerId) -> None:
        """Begin to hand the stage to that peer, unless another handover is under way. It stays here if the peer does not take it."""
        hosted = self._stages.running.get(place)
        if hosted is None or not self._stages.accepting:
            return
        if self._handing is None or self._handing.done():
            self._handing = self._stages.spawn(place[0], self._hand_on(place, hosted, (peer,)))

    async def _hand_on(self, place: Place, hosted: Hosted, order: Sequence[PeerId]) -> None:
        """To one of these peers; it stays here if none of them takes it."""
        order = (await attending(self._takeover, place, order[:PROBED]))[:OFFERS]
        if not order:
            return
        log.info("stage %d of %s goes to an idle peer", place[1], hosted.manifest.name)
        try:
            gone = await self._pass_on(place, hosted, order)
        except Exception as error:
            # Isolates the job, as with `Service.host`: no error of a stranger's job may end the peer.
            log.error(
                "stage %d of %s: %s: %s",
                place[1],
                hosted.manifest.name,
                type(error).__name__,
                one_line(str(error)),
            )
            gone = False
        finally:
            self._handed_at = self._clock()
        if gone:
            self._untaken.forget(place)
        elif await self._still_owns(place):
            self._untaken.start(place)
            hosted.service.stay(*place)
        else:
            hosted.task.cancel()

    async def _still_owns(self, place: Place) -> bool:
        """Whether no peer has taken the stage: its reply may be lost."""
        with suppress(SwarmError):
            await self._leases.claims(*place)
        owner = winner(self._leases.recent(*place))
        return owner is not None and owner.peer == self._leases.peer_id

    async def _pass_on(self, place: Place, hosted: Hosted, order: Sequence[PeerId] | None = None) -> bool:
        claim = self._leases.holds(*place)
        if claim is None or hosted.task.done():
            return True
        hosted.passing = True
        try:
            return await pass_on(claim, hosted.service, self._leases, self._takeover, self._config, order)
        finally:
            hosted.passing = False
            if self._leases.holds(*place) is None:
                hosted.task.cancel()


async def attending(takeover: Takeover, place: Place, peers: Sequence[PeerId]) -> list[PeerId]:
    """Those of `peers` that answer (`Takeover.attends`), in their order."""
    turns = asyncio.Semaphore(PROBED_AT_ONCE)

    async def attends(peer: PeerId) -> bool:
        async with turns:
            return await takeover.attends(peer, *place)

    answers = await asyncio.gather(*map(attends, peers))
    return [peer for peer, answered in zip(peers, answers, strict=True) if answered]


async def pass_on(
    claim: ClaimRecord,
    service: Service,
    leases: Leases,
    takeover: Takeover,
    config: HandoverConfig,
    order: Sequence[PeerId] | None = None,
) -> bool:
    """Hand our stage to the first of `order` that takes it, or without `order`, as we leave, to the best standby, and wait until it
    runs there. False if no peer took it; the stage may then be paused here, or still run. Takes a bounded time."""
    place = (claim.job, claim.stage)
    try:
        seconds = PATIENCE_SECONDS
        if order is None:
            seconds = PASS_SECONDS
            claims = await leases.claims(*place)
            owner = winner(claims)
            if owner is not None and owner.peer != claim.peer:
                return True  # its reply was lost
            standbys = [standby.peer for standby in successors(claims)]
            # Before the stage is paused: offers to peers that do not answer would keep the job waiting, one after the other.
            order = (await attending(takeover, place, standbys[:LAST_PROBED]))[:LAST_OFFERS]
        if not order:
            return False
        async with asyncio.timeout(seconds):
            handover = await service.pass_on(*place)
        taken = await takeover.hand_over(*place, claim.term, handover, order)
        if taken is None:
            return False
        await _until_ready(taken, leases, config)
    except (SwarmError, JobError, TimeoutError) as error:
        reason = one_line(str(error)) or "no answer in time"
        log.warning("stage %d of job %.8s not handed over: %s", claim.stage, claim.job, reason)
        return False
    log.info("stage %d of job %.8s went on to %s", claim.stage, claim.job, taken.peer)
    return True


async def _until_ready(taken: ClaimRecord, leases: Leases, config: HandoverConfig) -> None:
    """Wait until the peer that took our stage runs it, for `settle_seconds` at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(config.settle_seconds):
            while True:
                owner = await leases.owner(taken.job, taken.stage)
                if owner is not None and owner.term >= taken.term and owner.ready:
                    return
                await asyncio.sleep(config.look_seconds)
