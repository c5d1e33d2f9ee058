"""How far the swarm has taken a job over, and what the stages that are not ready wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import StageLoading, stages_failed, stages_loading
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.launch.prepared import Prepared
from fusion.swarm.claims.election import stands_by, winner
from fusion.swarm.directory.records import Digest, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId, call

MARKS = 64
STATUS_SECONDS = 2.0  # for a peer to reply to `status`


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A stage that is not ready."""

    stage: int
    owner: PeerId | None  # that has claimed it
    loading: StageLoading | None = None  # as the owner reports it, if it does
    failed: tuple[PeerId, str] | None = None  # the peer where it failed, and the reason that it reports

    def line(self, name: Callable[[str], str]) -> str:
        """For users, with peers by name."""
        if self.owner is None:
            line = f"stage {self.stage}: nobody has it yet"
            return line if self.failed is None else f"{line} ({name(self.failed[0])}: {self.failed[1]})"
        at = f"stage {self.stage} at {name(self.owner)}: "
        return at + ("on its way" if self.loading is None else self.loading.line())


@dataclass(frozen=True, kw_only=True)
class Held:
    """How far the swarm has taken a job over."""

    claimed: int  # stages with a live owner
    ready: int  # stages that are loaded
    stages: int
    copied: int  # blobs that another peer with a stage of the job holds as well
    blobs: int
    waiting: tuple[Waiting, ...] = ()  # the stages that are not ready

    @property
    def mark(self) -> tuple[object, ...]:
        """Changes with each progress: of a stage's loading, in MARKS steps at most."""
        stages = ((each.stage, each.owner, each.loading) for each in self.waiting)
        waiting = tuple(
            (stage, owner, loading and (loading.phase, MARKS * loading.bytes // max(1, loading.of_bytes)))
            for stage, owner, loading in stages
        )
        return self.claimed, self.ready, self.copied, waiting

    @property
    def complete(self) -> bool:
        return self.ready == self.stages and self.copied == self.blobs


async def look_held(context: Context, prepared: Prepared) -> Held:
    """The state now, by the directory and by the owners of stages that are not ready. Any peer may publish claims and providers of
    blobs: those count that win (`fusion.swarm.claims.tenure`), and blobs at their peers. Raises SwarmError."""
    claims = await context.leases.claims_of(prepared.job, range(prepared.manifest.stages))
    winners = [winner(found) for found in claims]
    owners = [owner for owner in winners if owner is not None]
    late = {
        stage: None if owner is None else owner.peer
        for stage, owner in enumerate(winners)
        if owner is None or not owner.ready
    }
    proposed = prepared.manifest.proposed
    loaders = {stage: owner or PeerId(proposed[stage]) for stage, owner in late.items()}
    statuses = await _statuses(context, set(loaders.values()))
    awaited = [digest for digest in prepared.blobs if digest not in _optional(prepared)]
    holders = {owner.peer for owner in owners}
    if context.peer_id in holders:  # our own stage's blobs are copied to its standbys
        holders |= {claim.peer for found in claims for claim in found if stands_by(claim)}
    holders.discard(context.peer_id)
    providers = await asyncio.gather(*(context.directory.providers(digest) for digest in awaited))
    return Held(
        claimed=len(owners),
        ready=sum(owner.ready for owner in owners),
        stages=len(claims),
        copied=sum(any(provider.peer in holders for provider in found) for found in providers),
        blobs=len(awaited),
        waiting=tuple(
            _waiting((prepared.job, stage), owner, loaders[stage], statuses.get(loaders[stage], {}))
            for stage, owner in late.items()
        ),
    )


def _waiting(place: Place, owner: PeerId | None, loader: PeerId, status: Mapping[str, Any]) -> Waiting:
    """`status`: of `loader`, the owner or else the proposed one."""
    loading = (each for each in stages_loading(status) if (each.job, each.stage) == place)
    failed = ((loader, each.reason) for each in stages_failed(status) if (each.job, each.stage) == place)
    return Waiting(
        stage=place[1],
        owner=owner,
        loading=None if owner is None else next(loading, None),
        failed=None if owner is not None else next(failed, None),
    )


async def _statuses(context: Context, peers: set[PeerId]) -> dict[PeerId, Mapping[str, Any]]:
    """The reply of each of the peers to `status`; empty where it does not reply, none of our own."""

    async def status(peer: PeerId) -> Mapping[str, Any]:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(STATUS_SECONDS):
                return (await call(context.transport, peer, STATUS.name, "status")).header
        return {}

    others = sorted(peer for peer in peers if peer and peer != context.peer_id)
    return dict(zip(others, await asyncio.gather(*map(status, others)), strict=True))


def _optional(prepared: Prepared) -> frozenset[Digest]:
    """Blobs that owners of an older release do not fetch: a served model's chat files. Others have them once they are ready."""
    manifest = prepared.manifest
    return frozenset(digest for _, digest in manifest.files) if manifest.serve is not None else frozenset()
