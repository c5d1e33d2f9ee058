"""`fusion-peer chat [NAME]`: talk with a model that the swarm serves, through any peer."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.cli import client, grants, job_client
from fusion.cli.asking import settings
from fusion.cli.asking.line_input import LineInput
from fusion.cli.asking.partner import Partner
from fusion.cli.asking.talk import Talk
from fusion.cli.terminal import options
from fusion.cli.terminal.loop import LoopThread
from fusion.cli.terminal.output import Output

if TYPE_CHECKING:
    from fusion.runtime.serving.requests.request import GenerateRequest


@options.grouped
def chat(
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="Name of the model; may be left out if only one is served."),
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            max=settings.MOST_TOKENS,
            help="Most tokens of an answer (default: 1024, or as many as fit).",
        ),
    ] = None,
    *,
    chosen: settings.TokenChoice,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Chat with a model that the swarm serves. /help lists the commands that a line can be; without a terminal each
    line of stdin is a message."""
    from fusion.runtime.serving.requests.request import CHAT_TOKENS, GenerateRequest

    output = Output(as_json=json)
    request = GenerateRequest(
        prompt="",
        chat=True,
        max_tokens=max_tokens or CHAT_TOKENS,
        sampling=chosen.sampling(),
        seeded=chosen.seed is not None,
        stop=tuple(chosen.stop or ()),
    )
    way.checked()
    signal.signal(signal.SIGTERM, _end)  # Ctrl-C alone stops an answer and goes on
    lines = LineInput(interactive=not json)
    with LoopThread(debug=debug) as loop, loop.opened(_open(way, name, request, output)) as partner:
        Talk(loop, partner, lines, output).run()


def _end(number: int, frame: FrameType | None) -> None:
    raise typer.Abort


@asynccontextmanager
async def _open(
    way: client.JoinOptions, name: str, request: GenerateRequest, output: Output
) -> AsyncIterator[Partner]:
    from fusion.runtime.serving.requests.chat_template import ChatTemplates

    async with client.connect(way) as context, aclosing(ChatTemplates()) as templates:
        gateway = await client.gateway(context, way.peer)
        partner = Partner(
            *(context, gateway, partial(job_client.find_served, context), grants.grants_from(context)),
            *(templates, request, output),
        )
        await partner.choose(name, "NAME")
        yield partner
