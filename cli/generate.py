"""`fusion-peer generate "PROMPT"`: ask a model that the swarm serves, through any peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.cli import client, grants, job_client
from fusion.cli.terminal import options
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output
from fusion.swarm.errors import NotAdmitted, RemoteError
from fusion.swarm.identity import friendly_name

if TYPE_CHECKING:
    from fusion.runtime.serving.requests.request import Answer, GenerateRequest


def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text to go on from.")] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="Which model; not needed where only one is served.")
    ] = "",
    prompt_ids: Annotated[
        str | None,
        typer.Option("--prompt-ids", metavar="1,2,3", help="Token ids, where a model has no tokenizer."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate, at most.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the most probable token each time.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Draw from the k most probable tokens; 0: all.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the fewest tokens whose probabilities reach this sum.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Same seed, same answer (with a temperature).")
    ] = None,
    peer: options.PeerAddress = None,
    swarm_key: options.SwarmKey = None,
    bootstrap: options.Bootstrap = None,
    home: options.Home = options.DEFAULT_HOME,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Go on from a prompt with a model that the swarm serves. Tokens appear as they are made."""
    output = Output(as_json=json)
    if (prompt is None) == (prompt_ids is None):
        raise ValueError("give either a PROMPT or --prompt-ids")
    ids = options.parse_ids(prompt_ids) if prompt_ids is not None else None
    from fusion.runtime.serving.requests.request import GenerateRequest, Sampling

    request = GenerateRequest(
        model=model,
        prompt=prompt,
        prompt_ids=ids,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed or 0),
        seeded=seed is not None,
    )
    run(_generate(request, client.Way(home, bootstrap, peer, swarm_key), output), debug=debug)


async def _generate(request: GenerateRequest, way: client.Way, output: Output) -> None:
    from fusion.runtime.serving.requests.client import another_peer
    from fusion.runtime.serving.requests.client import generate as ask_gateway
    from fusion.runtime.serving.requests.request import Answer

    async with client.connect(way) as context:
        gateway = await client.gateway(context, way.peer)
        answer: Answer | None = None
        # The prompt stands before its answer, as the model sees it; ids have no text of their own.
        text = request.prompt or ""
        others = another_peer(context.directory)  # where the gateway vanishes, one of them goes on
        try:
            shown = grants.grants_from(context)
            async for piece in ask_gateway(context.transport, gateway, request, others, shown):
                output.write(text)
                text = ""
                if isinstance(piece, Answer):
                    answer = piece
                else:
                    output.write(piece.text if request.prompt is not None else f"{piece.id} ")
        except NotAdmitted:
            raise
        except RemoteError:
            await job_client.find_model(context, request.model)  # is it the name?
            raise
    output.write("\n")
    assert answer is not None
    output.emit(answer_record(answer))
    output.note(summary(answer))


def answer_record(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "route": list(answer.route),
        "seconds": round(answer.seconds, 4),
    }


def summary(answer: Answer) -> str:
    """E.g. "64 tokens in 1.3 s (49 tokens/s) through quiet-otter-3f, brave-lynx-01"."""
    through = ", ".join(map(friendly_name, answer.route))
    rate = len(answer.tokens) / answer.seconds if answer.seconds else 0.0
    return f"{len(answer.tokens)} tokens in {answer.seconds:.1f} s ({rate:.0f} tokens/s) through {through}"
