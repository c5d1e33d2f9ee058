"""Which stages are short of standbys, and since when; until when an owner may still be loading its stage; and the other candidates
to stand by."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from cachetools import FIFOCache

from fusion.runtime.hosting.standby_assignment import Candidate, Standby, UncoveredStage, is_short
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.claims.election import stands_by
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import ClaimRecord, Place
from fusion.swarm.errors import SwarmError

# For an owner to load its stage without competing for the launcher's uplink. Bounded: one that never loads needs standbys, too.
LOADING_SECONDS = 180.0
KEPT_SNAPSHOTS = 2  # that a standby of a training job has on disk
REMEMBERED_PLACES = 65_536
PEERS_SECONDS = 2 * HEARTBEAT_SECONDS  # for which the list of peers is good

log = logging.getLogger(__name__)


class StandbyNeeds:
    def __init__(self, context: Context) -> None:
        self._peer_id = context.peer_id
        self._directory = context.directory
        self._clock = context.clock.monotonic
        self._short_since: FIFOCache[Place, float] = FIFOCache(REMEMBERED_PLACES)
        self._loading_since: FIFOCache[Place, tuple[str, float]] = FIFOCache(REMEMBERED_PLACES)
        self._peers: Sequence[Candidate] = ()
        self._peers_read_at = -math.inf

    def of(
        self,
        place: Place,
        manifest: Manifest,
        claims: tuple[ClaimRecord, ...],
        owners: Mapping[Place, ClaimRecord | None],
        *,
        covered: bool,
    ) -> UncoveredStage:
        """`claims`: all of the stage; `owners`: of this one and the next, where they are known; `covered`: we stand by for it."""
        (job, stage), now = place, self._clock()
        owner, next_owner = owners.get(place), owners.get((job, (stage + 1) % manifest.stages))
        standbys = tuple(
            Standby(peer=claim.peer, score=claim.score, ready=claim.ready)
            for claim in claims
            if stands_by(claim) and claim.peer != self._peer_id
        )
        if is_short(len(standbys) + covered):
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
            covered=covered,
            short_seconds=max(0.0, now - max(since, may_load_until)),
            next_owner=next_owner.peer if next_owner is not None else None,
        )

    def _may_load_until(self, place: Place, owner: ClaimRecord | None, now: float) -> float:
        """Until when no standby should be added, so that the owner can load the stage."""
        if owner is None or owner.ready:
            self._loading_since.pop(place, None)
            return 0.0
        peer, since = self._loading_since.get(place, (None, now))
        since = since if peer == owner.peer else now
        self._loading_since[place] = owner.peer, since
        return since + LOADING_SECONDS

    async def candidates(self) -> Sequence[Candidate]:
        """The other peers that could stand by. Cached: reading all peers is expensive, and a stage may be short of standbys for long."""
        if self._clock() - self._peers_read_at < PEERS_SECONDS:
            return self._peers
        try:
            peers = await self._directory.peers()
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
