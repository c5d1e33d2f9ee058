"""`fusion-peer jobs`: what runs on the swarm; watch it, stop it, take its model home."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.cli import client, invites, job_client
from fusion.cli.follow import follow
from fusion.cli.terminal import options
from fusion.cli.terminal.extras import need_peer_extra
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output

if TYPE_CHECKING:
    from fusion.swarm.directory.records import JobRecord

app = typer.Typer(
    help="The jobs of the swarm: list, watch, stop, export, and who may take part.", rich_markup_mode=None
)


@app.callback(invoke_without_command=True)
@options.grouped
def jobs(
    context: typer.Context,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    if context.invoked_subcommand is None:
        run(_list(way, Output(as_json=json)), debug=debug)
    else:  # options before the subcommand are its defaults
        options_before = {name: value for name, value in context.params.items() if value}
        context.default_map = {context.invoked_subcommand: options_before}


@app.command("list")
@options.grouped
def list_jobs(
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List every job that the swarm knows."""
    run(_list(way, Output(as_json=json)), debug=debug)


async def _list(way: client.JoinOptions, output: Output) -> None:
    from fusion.runtime.belief.reading import overview

    async with client.connect(way) as context:
        await client.working_peers(context)
        found = sorted(
            (seen.belief.record for seen in await overview(context)), key=lambda job: (job.name, job.job)
        )
    output.emit({"jobs": [shown(job) for job in found]})
    output.table(
        "Jobs",
        ("job", "name", "kind", "state", "step", "stages", "says"),
        [
            (job.job[:12], job.name, job.kind, job.state, str(job.step), str(job.stages), job.message)
            for job in found
        ],
    )


@app.command()
@options.grouped
def watch(
    job: options.Job,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show the progress of a job until it has ended."""
    run(_watch(job, way, Output(as_json=json)), debug=debug)


async def _watch(job: str, way: client.JoinOptions, output: Output) -> None:
    async with client.connect(way) as context:
        record = await job_client.find_job(context, job)
        last = await follow(context, record.job, output)
    output.emit({"event": "done", "job": record.job, "state": last.state, "step": last.step})
    output.print_line(f"{record.name} is {last.state} after {last.step} steps")


@app.command()
@options.grouped
def stop(
    job: options.Job,
    now: Annotated[
        bool, typer.Option("--now", help="At once: the steps after the newest snapshot are lost.")
    ] = False,
    *,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """End a job that was launched with this home; a training job takes a last snapshot first."""
    run(_stop(job, way, now, Output(as_json=json)), debug=debug)


async def _stop(job: str, way: client.JoinOptions, now: bool, output: Output) -> None:
    async with client.connect(way) as context:
        author = job_client.trainer_identity(way.home)  # only now: who cannot join leaves nothing
        record = await job_client.find_led(context, job)
        if record.kind == "train" and not now:
            output.note(f"{record.name} is saved before it stops (--now: it stops at once)")
        end = await job_client.stop(context, record, author, save=not now)
    output.emit({"job": record.job, "name": record.name, **asdict(end)})
    trained = f" after {end.step} steps, saved at step {max(end.saved, 0)}" if record.kind == "train" else ""
    output.print_line(f"{record.name} ({record.job[:12]}) is {end.state}{trained}")


app.command()(invites.invite)
app.command()(invites.accept)
app.command()(invites.revoke)


@app.command()
@options.grouped
def export(
    job: options.Job,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", parser=options.a_path, help="A new or empty directory for the model."),
    ],
    *,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a job's newest weights, under the model's own names, and the files that `serve` needs beside them."""
    need_peer_extra("jobs export")
    output = Output(as_json=json)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"{directory} is not an empty directory")
    options.check_writable(directory.absolute(), f"{directory} cannot be made")
    client.need_way(way)
    run(_export(job, directory, way, output), debug=debug)


async def _export(job: str, directory: Path, way: client.JoinOptions, output: Output) -> None:
    from fusion.runtime.job.model_files import is_exported_directory
    from fusion.runtime.launch.export import export as export_job
    from fusion.runtime.launch.export import export_newest

    async with client.connect(way) as context:
        known = await job_client.find_current(context, job)
        record = known.record
        if known.belief.over:
            step = await export_job(context, record.job, directory, known)
        else:
            step = await export_newest(context, known, directory)
    output.emit({"job": record.job, "name": record.name, "directory": str(directory), "step": step})
    if (doubt := job_client.unproven(known)) is not None:
        output.note(doubt)
    served = f"serve it with: fusion-peer serve {shlex.quote(str(directory))} --name {record.name}"
    if not is_exported_directory(directory):
        served = "these are its tensors alone: its forward gives a loss, which nobody can ask for, so it cannot be served"
    output.print_line(f"{record.name} at step {step} is in {directory}; {served}")


def shown(job: JobRecord) -> dict[str, Any]:
    """What `--json` says of a job: not what it is believed for."""
    return {name: value for name, value in asdict(job).items() if name != "proof"}
