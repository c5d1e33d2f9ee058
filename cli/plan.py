"""`fusion-peer plan job.toml --swarm swarm.toml`: where a job would run, and how fast, before anything runs."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.cli.launch_progress import takers
from fusion.cli.plans import serving_plan
from fusion.cli.plans.training_plan import show
from fusion.cli.terminal import options
from fusion.cli.terminal.extras import need_peer_extra
from fusion.cli.terminal.logs import configure_logging
from fusion.cli.terminal.output import Output

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.launch.serving_spec import ServingSpec


class Scheduler(StrEnum):
    op_fence = "op-fence"
    equal_ops = "equal-ops"
    equal_flops = "equal-flops"
    exact = "exact"


def plan(
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB.TOML", parser=options.a_path, help="The job file, as for train (see examples/)."
        ),
    ],
    swarm: Annotated[
        Path,
        typer.Option(
            "--swarm",
            metavar="SWARM.TOML",
            parser=options.a_path,
            help="The peers and links (see examples/swarm.toml).",
        ),
    ],
    scheduler: Annotated[
        Scheduler, typer.Option("--scheduler", help="The placement algorithm; the others are baselines.")
    ] = Scheduler.op_fence,
    line_mbps: Annotated[
        float | None,
        typer.Option(
            "--line-mbps",
            metavar="MBPS",
            help="Assume a line of its own for each peer, of this rate up and down.",
        ),
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show where a job would run on a swarm, how long a step would take and the bottleneck. Nothing runs."""
    need_peer_extra("plan")
    configure_logging(debug)
    output = Output(as_json=json)
    from fusion.runtime.job import spec
    from fusion.runtime.placing import swarm_file

    asked, described = spec.load(options.job_file(job)), swarm_file.load(options.job_file(swarm))
    if line_mbps is not None:
        described = described.with_lines(line_mbps)
    output.status(f"placing {asked.name} on {len(described.peers)} peers ...")
    from fusion.runtime.placing.offline_plan import plan_training

    found = plan_training(asked, described, scheduler.value)
    output.emit({"event": "plan", **found.to_json()})
    show(found, output)


async def plan_model(context: Context, spec: ServingSpec, output: Output) -> bool:
    """Show what serving a model would take on the swarm; whether it fits. Raises as `read_servable`."""
    from fusion.runtime.launch.prepare_serving import remarks, servable
    from fusion.runtime.launch.serving_plan import plan_serving, with_stored_weights

    model = await asyncio.to_thread(servable, spec, output.status, context.home)
    for line in await asyncio.to_thread(remarks, spec.path, model):
        output.note(line)
    seen = await takers(context)
    peers, links = spec.admission.among(seen, lambda peer: peer.peer), await context.directory.links()
    planned = await asyncio.to_thread(
        plan_serving, model, peers, links, spec.stages, output.status, context.home
    )
    found = await with_stored_weights(context, planned)
    output.emit({"event": "plan", **found.to_json()})
    serving_plan.show(found, output, {peer.peer: peer.name for peer in peers})
    return bool(found.stages)
