"""How far the swarm has taken a job over, and what the stages that are not ready wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import StageLoading, stages_loading
from fusion.runtime.job.protocol import STATUS
from fusion.runtime.launch.prepared import Prepared
from fusion.swarm.claims.election import stands_by, winner
from fusion.swarm.directory.records import Digest, JobId
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

    def line(self, name: Callable[[str], str]) -> str:
        """For people, who know a peer by its name."""
        if self.owner is None:
            return f"stage {self.stage}: nobody has it yet"
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
    said = await asyncio.gather(
        *(_loading(context, prepared.job, stage, peer) for stage, peer in late.items())
    )
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
            Waiting(stage=stage, owner=peer, loading=loading)
            for (stage, peer), loading in zip(late.items(), said, strict=True)
        ),
    )


async def _loading(context: Context, job: JobId, stage: int, owner: PeerId | None) -> StageLoading | None:
    """What the owner says of a stage that is on its way into its memory; None where it does not say."""
    with suppress(SwarmError, TimeoutError):
        async with asyncio.timeout(ASKED_SECONDS):
            if owner is not None and owner != context.peer_id:
                answer = await call(context.transport, owner, STATUS.name, "status")
                found = stages_loading(answer.header)
                return next((each for each in found if (each.job, each.stage) == (job, stage)), None)
    return None


def _unasked(prepared: Prepared) -> frozenset[Digest]:
    """What owners of an older release do not fetch: how to chat with a served model. Others have it when they are ready."""
    manifest = prepared.manifest
    return frozenset(digest for _, digest in manifest.files) if manifest.serve is not None else frozenset()
