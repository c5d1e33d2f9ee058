"""`fusion-peer train job.toml`: launch a training job on the swarm and watch it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.cli import client, job_client
from fusion.cli.follow import follow
from fusion.cli.launch_progress import offer, takers, until_held
from fusion.cli.plans.training_plan import show
from fusion.cli.terminal import options
from fusion.cli.terminal.extras import need_peer_extra
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.job.progress import Progress
    from fusion.runtime.job.spec import JobSpec
    from fusion.runtime.launch.prepared import Prepared


@options.grouped
def train(
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB.TOML",
            parser=options.a_path,
            help="The job file: model, data, settings (see examples/).",
        ),
    ],
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the swarm holds model, weights and data.")
    ] = False,
    *,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train a model across the swarm. The job outlives this command; Ctrl-C only stops watching."""
    need_peer_extra("train")
    output = Output(as_json=json)
    from fusion.runtime.job import spec

    run(_train(spec.load(options.job_file(job)), detach, way, output), debug=debug)


async def _train(spec: JobSpec, detach: bool, way: client.JoinOptions, output: Output) -> None:
    async with client.join(way) as context:
        author = job_client.trainer_identity(way.home)  # only now: who cannot join leaves nothing
        context.access.hold(author)
        from fusion.runtime.launch.prepare import prepare_training

        peers = await takers(context, spec.placement.peers)
        prepared = await asyncio.to_thread(
            prepare_training,
            *(spec, peers, context.blobs.store),
            links=await context.directory.links(),
            author=author,
            report=output.status,
            note=output.note,
            now=client.swarm_clock(context),
        )
        if prepared.plan is not None:
            show(prepared.plan, output, {peer.peer: peer.name for peer in peers})
        job = await offer(context, prepared, output)
        if detach:
            await until_held(context, prepared, output)
            output.print_line(f"the swarm holds it; watch it with: fusion-peer jobs watch {job[:12]}")
            return
        last = await _watch(context, prepared, output)
        output.emit({"event": "done", "job": job, "state": last.state, "step": last.step})
        output.print_line(
            f"{last.state} after {last.step} steps; take the model, which peers keep for a day, with: "
            f"fusion-peer jobs export {job[:12]} DIR"
        )


async def _watch(context: Context, prepared: Prepared, output: Output) -> Progress:
    """Hand the job over and show it until it has ended. Returns its last progress."""
    job, held = prepared.job, False

    async def hand_over() -> None:
        nonlocal held
        await until_held(context, prepared, output)
        held = True

    try:
        async with asyncio.TaskGroup() as tasks:
            # It trains while its last blobs are still being copied.
            tasks.create_task(hand_over(), name="handing over")
            return await follow(context, job, output)
    except asyncio.CancelledError:
        after = "goes on" if held else "may not go on: the swarm does not hold all of it yet"
        output.note(f"the job {after}; watch it with: fusion-peer jobs watch {job[:12]}")
        raise
