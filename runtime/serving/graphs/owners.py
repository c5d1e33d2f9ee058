"""What a stage makes of arrays, by its owner: where that vanishes, falls silent or is followed by another, by the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fusion.dag.cutting.stage import Stage
from fusion.runtime.device.overrun import LONGEST_SECONDS
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.protocol import MAX_RUN_BYTES
from fusion.runtime.serving.answers.clients import SLOWEST_BYTES_PER_SECOND
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.graphs.arrays import Array, described, read_arrays
from fusion.runtime.serving.graphs.client import GONE, ask
from fusion.runtime.serving.graphs.stages import GraphStages
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.printable import error_line
from fusion.swarm.transport import PeerId

PATIENCE_SECONDS = 60.0  # while no owner answers
RETRY_SECONDS = 0.5
# Of that patience, at most, for an owner that was there and has gone, however long it was at work
GONE_SECONDS = 15.0
LOOK_SECONDS = 1.0  # from one look at who owns a stage to the next, while its owner is at work


class StageOwners:
    """`stages`: those that run here; `forget`: that the owners of a job's stages may be others than was thought."""

    def __init__(self, context: Context, stages: GraphStages, forget: Callable[[JobId], None]) -> None:
        self._context = context
        self._stages = stages
        self._forget = forget

    async def make(
        self, model: ServedModel, stage: Stage, given: Sequence[Array]
    ) -> tuple[list[Array], PeerId]:
        """And who made it. Raises JobError (what was given), JobFailed where nobody does, SwarmError."""
        job, index, clock = model.job, stage.index, self._context.clock.monotonic
        what = f"stage {index} of {model.manifest.name}"
        header = {
            "job": job, "stage": index, "grants": list(self._context.access.chain(job)), **described(given)
        }  # fmt: skip
        trouble, waited = f"nobody has {what}", 0.0
        while waited < PATIENCE_SECONDS:
            began = clock()
            # Where nobody owns it by right any more, whoever claims it all the same (`leases.stale_claim`).
            owner = await self._context.leases.owner(job, index) or self._context.leases.stale_claim(
                job, index
            )
            if self._stages.held(job, index) is not None:
                return await self._stages.compute(job, index, given), self._context.peer_id
            if owner is not None and owner.peer != self._context.peer_id:
                made = await self._from_owner(owner, header, given)
                if not isinstance(made, str):
                    return made, owner.peer
                trouble = f"{what} at {friendly_name(owner.peer)}: {made}"
            await asyncio.sleep(RETRY_SECONDS)
            waited += min(clock() - began, GONE_SECONDS)
        raise JobFailed(f"no answer in {PATIENCE_SECONDS:.0f} s: {trouble}")

    async def _from_owner(
        self, owner: ClaimRecord, header: Mapping[str, Any], given: Sequence[Array]
    ) -> list[Array] | str:
        """What it makes, or why somebody is to be asked again. JobFailed where it takes longer than any stage may."""
        asked = asyncio.create_task(self._ask(owner, header, given))
        followed = asyncio.create_task(self._followed(owner))
        size = sum(len(a.data) for a in given) + MAX_RUN_BYTES
        seconds = LONGEST_SECONDS + size / SLOWEST_BYTES_PER_SECOND
        try:
            done, _ = await asyncio.wait(
                (asked, followed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if asked in done:
                return asked.result()
        finally:
            for task in (asked, followed):
                task.cancel()
            await asyncio.gather(asked, followed, return_exceptions=True)
        if done:
            return "it has not answered, and another owns the stage now"
        name = friendly_name(owner.peer)
        raise JobFailed(f"stage {owner.stage} at {name} takes longer than any may, {seconds:.0f} s")

    async def _ask(
        self, owner: ClaimRecord, header: Mapping[str, Any], given: Sequence[Array]
    ) -> list[Array] | str:
        try:
            answer = await ask(self._context.transport, owner.peer, "stage", header, given)
        except GONE as error:
            self._forget(owner.job)
            return error_line(error)
        if answer.kind != "made":
            return f"it is {answer.kind!r:.40} there"
        return read_arrays(answer.header, answer.payload)

    async def _followed(self, owner: ClaimRecord) -> None:
        """Returns once somebody else owns the stage, or the same peer under another term."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(SwarmError):
                now = await self._context.leases.owner(owner.job, owner.stage)
                if now is not None and (now.peer, now.term) != (owner.peer, owner.term):
                    return
