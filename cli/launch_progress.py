"""On whom to place a job; to give it to the swarm once it is prepared, and show how far it has taken it over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from fusion.cli import client, job_client
from fusion.cli.terminal.output import Output, bytes_text, seconds_text
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import friendly_name

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.launch.handed_over import Held
    from fusion.runtime.launch.prepared import Prepared
    from fusion.swarm.directory.records import JobId, PeerRecord
    from fusion.swarm.identity import Identity

STALL_SECONDS = 180.0  # without a stage loaded or a blob copied, handing a job over has failed


async def takers(context: Context, wanted: Sequence[str] = ()) -> tuple[PeerRecord, ...]:
    """The peers to place a job on; `wanted` (ids or names) are waited for. SwarmError if there is none."""
    from fusion.runtime.placing.answering_peers import answering_peers

    return await answering_peers(context, await client.working_peers(context, wanted), wanted)


async def offer(context: Context, prepared: Prepared, output: Output) -> JobId:
    """Publish the job; from now on peers take its stages and fetch its blobs from us, while we stay."""
    from fusion.runtime.launch.launch import launch

    manifest = prepared.manifest
    output.print_line(f"{manifest.name} ({manifest.kind}): {prepared.parameters:,} parameters in "
                      f"{manifest.stages} stage{'s'[: manifest.stages > 1]}, "
                      f"job {prepared.job[:12]}")  # fmt: skip
    if prepared.stage_count is not None:
        output.print_line(prepared.stage_count.line(friendly_name))
    if manifest.serve is not None:
        output.print_line(await _to_fetch(context, prepared))
    job = await launch(context, prepared)
    output.emit({
        "event": "launched", "job": job, "name": manifest.name, "kind": manifest.kind, "stages": manifest.stages,
        "parameters": prepared.parameters, "predicted_seconds": prepared.predicted_seconds,
        "proposed": list(manifest.proposed), "plan": prepared.plan and prepared.plan.to_json(),
        "stage_count": prepared.stage_count and prepared.stage_count.to_json(),
    })  # fmt: skip
    return job


async def _to_fetch(context: Context, prepared: Prepared) -> str:
    """How much of its weights has to reach the peers that are to have them."""
    from fusion.runtime.launch.on_disk import on_disk

    manifest = prepared.manifest
    has = await on_disk(context, list(zip(manifest.proposed, manifest.weights, strict=True)))
    sizes = [context.blobs.store.size(digest) for digest in manifest.weights]
    missing = sum(size for size, there in zip(sizes, has, strict=True) if not there)
    if not missing:
        return (
            f"its peers have all of its weights ({bytes_text(sum(sizes))}) on their disks: nothing to fetch"
        )
    return f"its peers have to fetch {bytes_text(missing)} of weights, of {bytes_text(sum(sizes))}"


async def until_held(context: Context, prepared: Prepared, output: Output) -> None:
    """Until the swarm holds all of the job, so that we may leave. JobFailed if it failed or nobody takes it."""
    from fusion.runtime.job.errors import JobFailed
    from fusion.runtime.launch.launch import wait_until_held

    seen: list[Held] = []
    known: set[object] = set()

    def show(held: Held) -> None:
        seen[:] = [held]
        # Owners report their own progress: going back and forth, or byte by byte, does not extend the deadline.
        if (mark := held.mark) not in known:
            known.add(mark)
            deadline.reschedule(loop.time() + STALL_SECONDS)
        waits = "; ".join(each.line(friendly_name) for each in held.waiting)
        output.status(
            f"handing over: {held.ready} of {held.stages} stages ready, {held.copied} of {held.blobs} blobs held"
            + (f"; {waits}" if waits else "")
        )

    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(STALL_SECONDS) as deadline:
            await wait_until_held(context, prepared, on_change=show)
    except TimeoutError:
        stuck = f"nothing moved for {STALL_SECONDS:.0f} s"
        stuck = "; ".join([stuck, *(each.line(friendly_name) for held in seen for each in held.waiting)])
        raise JobFailed(f"the swarm has not taken {prepared.manifest.name} over: {stuck}") from None
    output.emit({"event": "held", "job": prepared.job})


async def until_answering(context: Context, prepared: Prepared, output: Output) -> None:
    """Until a token has gone around the ring of a served model. JobFailed where none does."""
    if prepared.manifest.serve is not None and prepared.manifest.serve.outputs:
        return  # it generates none, and its stages are in memory
    from fusion.runtime.launch.first_token import first_token

    output.status("asking it for a token")
    found = await first_token(context, prepared, STALL_SECONDS)
    if found is not None:
        output.emit(
            {
                "event": "token",
                "job": prepared.job,
                "token": found.token,
                "seconds": found.seconds,
                "route": list(found.route),
            }
        )
        output.print_line(
            f"its first token came around {len(found.route)} peer{'s' * (len(found.route) != 1)} in {seconds_text(found.seconds)}"
        )


async def take_back(context: Context, prepared: Prepared, author: Identity) -> None:
    """End what does not come to answer: names mean the newest job of their author, and the model before is to stay."""
    from fusion.runtime.belief.reading import read_belief

    with suppress(SwarmError):
        belief = await read_belief(context, prepared.job, manifest=prepared.manifest)
        if belief is not None and not belief.over:
            await job_client.stop(context, belief.record, author)
