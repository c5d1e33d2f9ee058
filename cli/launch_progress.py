"""Give a prepared job to the swarm, and show how far it has taken it over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fusion.cli.terminal.output import Output
from fusion.swarm.identity import friendly_name

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.launch.launch import Held, Prepared
    from fusion.swarm.directory.records import JobId

STALL_SECONDS = 180.0  # without a stage loaded or a blob copied, handing a job over has failed


async def offer(context: Context, prepared: Prepared, output: Output) -> JobId:
    """Publish the job; from now on peers take its stages and fetch its blobs from us, while we stay."""
    from fusion.runtime.launch.launch import launch

    manifest = prepared.manifest
    output.say(f"{manifest.name} ({manifest.kind}): {prepared.parameters:,} parameters in {manifest.stages} stages, "
               f"job {prepared.job[:12]}")  # fmt: skip
    if prepared.stage_count is not None:
        output.say(prepared.stage_count.line(friendly_name))
    job = await launch(context, prepared)
    output.emit({
        "event": "launched", "job": job, "name": manifest.name, "kind": manifest.kind, "stages": manifest.stages,
        "parameters": prepared.parameters, "predicted_seconds": prepared.predicted_seconds,
        "proposed": list(manifest.proposed), "plan": prepared.plan and prepared.plan.to_json(),
        "stage_count": prepared.stage_count and prepared.stage_count.to_json(),
    })  # fmt: skip
    return job


async def until_held(context: Context, prepared: Prepared, output: Output) -> None:
    """Until the swarm holds all of the job, so that we may leave. JobFailed if it failed or nobody takes it."""
    from fusion.runtime.job.errors import JobFailed
    from fusion.runtime.launch.launch import wait_until_held

    def show(held: Held) -> None:
        deadline.reschedule(loop.time() + STALL_SECONDS)
        output.status(
            f"handing over: {held.ready} of {held.stages} stages ready, {held.copied} of {held.blobs} blobs held"
        )

    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(STALL_SECONDS) as deadline:
            await wait_until_held(context, prepared, on_change=show)
    except TimeoutError:
        stuck = f"nothing moved for {STALL_SECONDS:.0f} s"
        raise JobFailed(f"the swarm has not taken {prepared.manifest.name} over: {stuck}") from None
    output.emit({"event": "held", "job": prepared.job})
