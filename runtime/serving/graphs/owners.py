"""Runs a stage at its owner; where that vanishes, is silent or loses the stage, at the next owner."""

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
from fusion.runtime.serving.graphs.client import GONE, request_reply
from fusion.runtime.serving.graphs.stages import GraphStages
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.printable import error_line
from fusion.swarm.transport import PeerId

PATIENCE_SECONDS = 60.0  # while no owner answers
RETRY_SECONDS = 0.5
# Most of that patience that one failed owner uses up, however long it had worked
GONE_SECONDS = 15.0
LOOK_SECONDS = 1.0  # between two checks of who owns a stage, while its owner works


class StageOwners:
    """`stages`: those that run here; `forget` is called with a job whose owners may have changed."""

    def __init__(self, context: Context, stages: GraphStages, forget: Callable[[JobId], None]) -> None:
        self._context = context
        self._stages = stages
        self._forget = forget

    async def run(
        self, model: ServedModel, stage: Stage, inputs: Sequence[Array]
    ) -> tuple[list[Array], PeerId]:
        """The outputs of a stage, and the peer that ran it. Raises JobError (the inputs), JobFailed where no owner replies, SwarmError."""
        job, index, clock = model.job, stage.index, self._context.clock.monotonic
        what = f"stage {index} of {model.manifest.name}"
        header = {
            "job": job, "stage": index, "grants": list(self._context.access.chain(job)), **described(inputs)
        }  # fmt: skip
        trouble, waited = f"nobody has {what}", 0.0
        while waited < PATIENCE_SECONDS:
            began = clock()
            # The newest expired claim where no lease is valid any more (`leases.stale_claim`).
            owner = await self._context.leases.owner(job, index) or self._context.leases.stale_claim(
                job, index
            )
            if self._stages.held(job, index) is not None:
                return await self._stages.compute(job, index, inputs), self._context.peer_id
            if owner is not None and owner.peer != self._context.peer_id:
                outputs = await self._from_owner(owner, header, inputs)
                if not isinstance(outputs, str):
                    return outputs, owner.peer
                trouble = f"{what} at {friendly_name(owner.peer)}: {outputs}"
            await asyncio.sleep(RETRY_SECONDS)
            waited += min(clock() - began, GONE_SECONDS)
        raise JobFailed(f"no answer in {PATIENCE_SECONDS:.0f} s: {trouble}")

    async def _from_owner(
        self, owner: ClaimRecord, header: Mapping[str, Any], inputs: Sequence[Array]
    ) -> list[Array] | str:
        """The owner's outputs, or why to try again. JobFailed where it takes longer than any stage may."""
        requested = asyncio.create_task(self._request(owner, header, inputs))
        followed = asyncio.create_task(self._followed(owner))
        size = sum(len(a.data) for a in inputs) + MAX_RUN_BYTES
        seconds = LONGEST_SECONDS + size / SLOWEST_BYTES_PER_SECOND
        try:
            done, _ = await asyncio.wait(
                (requested, followed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if requested in done:
                return requested.result()
        finally:
            for task in (requested, followed):
                task.cancel()
            await asyncio.gather(requested, followed, return_exceptions=True)
        if done:
            return "it has not answered, and another owns the stage now"
        name = friendly_name(owner.peer)
        raise JobFailed(f"stage {owner.stage} at {name} takes longer than any may, {seconds:.0f} s")

    async def _request(
        self, owner: ClaimRecord, header: Mapping[str, Any], inputs: Sequence[Array]
    ) -> list[Array] | str:
        try:
            reply = await request_reply(self._context.transport, owner.peer, "stage", header, inputs)
        except GONE as error:
            self._forget(owner.job)
            return error_line(error)
        if reply.kind != "made":
            return f"it is {reply.kind!r:.40} there"
        return read_arrays(reply.header, reply.payload)

    async def _followed(self, owner: ClaimRecord) -> None:
        """Return once another peer owns the stage, or the same peer under another term."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(SwarmError):
                now = await self._context.leases.owner(owner.job, owner.stage)
                if now is not None and (now.peer, now.term) != (owner.peer, owner.term):
                    return
