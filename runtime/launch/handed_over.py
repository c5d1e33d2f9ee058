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
ASKED_SECONDS = 2.0  # for which a peer may be silent when it is asked how far a stage is


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A stage that is not ready."""

    stage: int
    owner: PeerId | None  # who has claimed it
    loading: StageLoading | None = None  # as the owner says it, if it does
    failed: tuple[PeerId, str] | None = None  # where it did not work out, and why, as that peer says it

    def line(self, name: Callable[[str], str]) -> str:
        """For people, who know a peer by its name."""
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
    copied: int  # blobs that another peer with a stage of the job holds too
    blobs: int
    waiting: tuple[Waiting, ...] = ()  # the stages that are not ready

    @property
    def mark(self) -> tuple[object, ...]:
        """How far that is, with what owners say of their stages in MARKS steps at most for each."""
        told = ((each.stage, each.owner, each.loading) for each in self.waiting)
        waiting = tuple(
            (stage, owner, loading and (loading.phase, MARKS * loading.bytes // max(1, loading.of_bytes)))
            for stage, owner, loading in told
        )
        return self.claimed, self.ready, self.copied, waiting

    @property
    def complete(self) -> bool:
        return self.ready == self.stages and self.copied == self.blobs


async def look_held(context: Context, prepared: Prepared) -> Held:
    """As the directory and the owners of what is not ready say now. Anybody may claim a stage or say that he holds a blob: what
    counts is the claims that count (`fusion.swarm.claims.tenure`), and blobs at those who make them. Raises SwarmError."""
    claims = await context.leases.claims_of(prepared.job, range(prepared.manifest.stages))
    winners = [winner(found) for found in claims]
    owners = [owner for owner in winners if owner is not None]
    late = {
        stage: None if owner is None else owner.peer
        for stage, owner in enumerate(winners)
        if owner is None or not owner.ready
    }
    proposed = prepared.manifest.proposed
    asked = {stage: owner or PeerId(proposed[stage]) for stage, owner in late.items()}
    said = await _statuses(context, set(asked.values()))
    awaited = [digest for digest in prepared.blobs if digest not in _unasked(prepared)]
    takers = {owner.peer for owner in owners}
    if context.peer_id in takers:  # others come to hold what is for our own stage as they stand by for it
        takers |= {claim.peer for found in claims for claim in found if stands_by(claim)}
    takers.discard(context.peer_id)
    providers = await asyncio.gather(*(context.directory.providers(digest) for digest in awaited))
    return Held(
        claimed=len(owners),
        ready=sum(owner.ready for owner in owners),
        stages=len(claims),
        copied=sum(any(provider.peer in takers for provider in found) for found in providers),
        blobs=len(awaited),
        waiting=tuple(
            _waiting((prepared.job, stage), owner, asked[stage], said.get(asked[stage], {}))
            for stage, owner in late.items()
        ),
    )


def _waiting(place: Place, owner: PeerId | None, asked: PeerId, said: Mapping[str, Any]) -> Waiting:
    """`asked`: the owner, or who should have been it, that answers so."""
    loading = (each for each in stages_loading(said) if (each.job, each.stage) == place)
    failed = ((asked, each.reason) for each in stages_failed(said) if (each.job, each.stage) == place)
    return Waiting(
        stage=place[1],
        owner=owner,
        loading=None if owner is None else next(loading, None),
        failed=None if owner is not None else next(failed, None),
    )


async def _statuses(context: Context, peers: set[PeerId]) -> dict[PeerId, Mapping[str, Any]]:
    """What each of the peers answers to `status`; nothing where it is silent, or is us."""

    async def ask(peer: PeerId) -> Mapping[str, Any]:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(ASKED_SECONDS):
                return (await call(context.transport, peer, STATUS.name, "status")).header
        return {}

    others = sorted(peer for peer in peers if peer and peer != context.peer_id)
    return dict(zip(others, await asyncio.gather(*map(ask, others)), strict=True))


def _unasked(prepared: Prepared) -> frozenset[Digest]:
    """What owners of an older release do not fetch: how to chat with a served model. Others have it when they are ready."""
    manifest = prepared.manifest
    return frozenset(digest for _, digest in manifest.files) if manifest.serve is not None else frozenset()
