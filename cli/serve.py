"""`fusion-peer serve DIR --name NAME`: put a model on the swarm, for anyone to ask."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fusion.cli import client, job_client
from fusion.cli.launch_progress import offer, until_held
from fusion.cli.terminal import options
from fusion.cli.terminal.extras import need_peer_extra
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output
from fusion.runtime.job.admission import AdmissionSpec
from fusion.runtime.job.model_files import check_directory


class Who(StrEnum):
    open = "open"
    listed = "listed"
    granted = "granted"


def serve(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A Hugging Face model directory, or one written by `jobs export`."
        ),
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What to call the model.")],
    stages: Annotated[
        int | None, typer.Option("--stages", min=1, help="Over how many peers (as few as it fits).")
    ] = None,
    admission: Annotated[
        Who, typer.Option("--admission", help="Who may own, read and ask: everybody, or those of --admit.")
    ] = Who.open,
    admit: Annotated[
        list[str] | None,
        typer.Option(
            "--admit", metavar="PEER", help="A peer id that may: for good (listed), or as invited (granted)."
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            metavar="DIR",
            help="A small model of the same tokenizer that guesses for it over slow links: the same answers, sooner.",
        ),
    ] = None,
    peer: options.PeerAddress = None,
    swarm_key: options.SwarmKey = None,
    bootstrap: options.Bootstrap = None,
    home: options.Home = options.DEFAULT_HOME,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model across the swarm. It returns once the peers hold the model."""
    need_peer_extra("serve")
    output = Output(as_json=json)
    check_directory(directory)
    if draft is not None:
        try:
            check_directory(draft)
        except ValueError as error:
            raise ValueError(f"--draft: {error}") from None
    if not name.strip():
        raise ValueError("--name: a name, such as my-model")
    try:
        admitted = AdmissionSpec(kind=admission.value, peers=tuple(admit or ()))
    except ValueError as error:
        raise ValueError(f"--admission, --admit: {error}") from None
    output.status("loading the runtime ...")
    run(
        _serve(
            directory, name, stages, admitted, draft, client.Way(home, bootstrap, peer, swarm_key), output
        ),
        debug=debug,
    )


async def _serve(
    directory: Path,
    name: str,
    stages: int | None,
    admission: AdmissionSpec,
    draft: Path | None,
    way: client.Way,
    output: Output,
) -> None:
    async with client.join(way) as context:
        author = job_client.trainer_identity(way.home)  # only now: who cannot join leaves nothing
        context.access.hold(author)
        from fusion.runtime.launch.launch import prepare_serving

        peers = await client.working_peers(context)
        prepared = await asyncio.to_thread(
            prepare_serving,
            *(directory, name, peers, context.blobs.store),
            stages=stages,
            links=await context.directory.links(),
            author=author,
            admission=admission,
            draft=draft,
            say=output.status,
        )
        job = await offer(context, prepared, output)
        await until_held(context, prepared, output)
        output.emit({"event": "serving", "job": job, "name": name})
        output.say(f'the swarm serves it; ask it with: fusion-peer generate "..." --model {name}')
