"""`fusion-peer models`: the models that the swarm serves, which `generate` and `chat` can be asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusion.cli import client
from fusion.cli.terminal import options
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output

if TYPE_CHECKING:
    from fusion.runtime.belief.reading import Seen
    from fusion.runtime.job.context import Context

RETRY_SECONDS = 0.5


@options.grouped
def models(
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List the models that the swarm serves, and whether they answer now."""
    run(_models(way, Output(as_json=json)), debug=debug)


@dataclass(frozen=True)
class Model:
    """A served model. `held`: how many of its stages have an owner now."""

    name: str
    job: str
    author: str
    stages: int
    held: int
    vouched: bool

    @property
    def state(self) -> str:
        return "ready" if self.held == self.stages else f"{self.held} of {self.stages} stages are held"

    def record(self) -> dict[str, Any]:
        return {**vars(self), "ready": self.held == self.stages}


async def _models(way: client.JoinOptions, output: Output) -> None:
    async with client.connect(way) as context:
        found = await served(context)
        if not found:  # a client that has just joined may know too little yet
            await asyncio.sleep(RETRY_SECONDS)
            found = await served(context)
    output.emit({"models": [model.record() for model in found]})
    output.table(
        "Models",
        ("model", "author", "state", "job"),
        [
            (
                model.name if model.vouched else f"{model.name} (nobody who runs it vouches for it)",
                model.author[-12:],
                model.state,
                model.job[:12],
            )
            for model in found
        ],
    )


async def served(context: Context) -> list[Model]:
    """By name."""
    from fusion.runtime.belief.reading import overview

    found = [
        _model(seen)
        for seen in await overview(context)
        if seen.belief.record.kind == "serve" and not seen.belief.over
    ]
    return sorted(found, key=lambda model: (model.name, model.job))


def _model(seen: Seen) -> Model:
    from fusion.swarm.claims.election import winner

    record = seen.belief.record
    owners = [winner(claims) for claims in seen.claims.values()]
    return Model(
        name=record.name,
        job=record.job,
        author=record.author,
        stages=record.stages,
        held=sum(owner is not None and owner.ready for owner in owners),
        vouched=seen.belief.vouched,
    )
