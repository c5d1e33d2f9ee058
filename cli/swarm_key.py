"""`fusion-peer swarm-key`: the key of a closed swarm, whose members answer nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusion.cli.terminal import options
from fusion.cli.terminal.output import Output

app = typer.Typer(help="Make the key of a closed swarm.", rich_markup_mode=None)


@app.callback()
def swarm_key() -> None:
    """Make the key of a closed swarm: peers that have it are its members, and answer nobody else."""


@app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=options.a_path, help="The file to write.")],
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a new key into FILE, which only its owner can read. Give it to the members over a private channel."""
    from fusion.swarm.swarm_key import new_key

    output = Output(as_json=json)
    key = new_key(file)
    output.emit({"event": "swarm-key", "file": str(file), "swarm": key.peer_id})
    output.print_line(
        f"the key of a new swarm is in {file}; each member starts with: fusion-peer start --swarm-key FILE"
    )
