"""`fusion-peer generate "PROMPT"`: ask a model that the swarm serves, through any peer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion.cli import client, grants, job_client
from fusion.cli.asking import answer_trace, settings
from fusion.cli.asking.features import features_of
from fusion.cli.terminal import options
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output
from fusion.swarm.errors import NotAdmitted, RemoteError
from fusion.swarm.identity import friendly_name

if TYPE_CHECKING:
    from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece


@options.grouped
def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text to continue.")] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME", help="Name of the model; may be left out if only one is served."
        ),
    ] = "",
    prompt_ids: Annotated[
        str | None,
        typer.Option("--prompt-ids", metavar="1,2,3", help="Token ids in place of a text."),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            "--features",
            metavar="FILE.npy",
            parser=options.a_path,
            help="Audio features, for a model such as Whisper.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            max=settings.MOST_TOKENS,
            help="Most tokens to generate (default: 64, or as many as fit).",
        ),
    ] = None,
    *,
    chosen: settings.TokenChoice,
    json_schema: settings.JsonSchema = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            help="Show log-probabilities of each token and of the N most probable ones.",
        ),
    ] = None,
    no_guesses: Annotated[
        bool, typer.Option("--no-guesses", help="Turn speculative decoding off, to measure its effect.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Afterwards show the rate of tokens, and the peers of the route.")
    ] = False,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Generate text after a prompt with a model that the swarm serves; an encoder-decoder reads the prompt and answers. Tokens
    appear as they are generated."""
    output = Output(as_json=json)
    if features is not None and prompt is not None:
        raise ValueError("give either a PROMPT or --features")
    if features is None and (prompt is None) == (prompt_ids is None):
        raise ValueError("give either a PROMPT or --prompt-ids")
    ids = options.parse_ids(prompt_ids) if prompt_ids is not None else None
    from fusion.runtime.serving.requests.request import GenerateRequest

    request = GenerateRequest(
        model=model,
        prompt=prompt,
        prompt_ids=ids,
        features=b"" if features is None else features_of(features),
        max_tokens=max_tokens,
        sampling=chosen.sampling(),
        seeded=chosen.seed is not None,
        top_logprobs=logprobs,
        stop=tuple(chosen.stop or ()),
        schema=settings.schema(json_schema),
        guesses=not no_guesses,
    )
    try:
        run(_generate(request, way, output, trace), debug=debug)
    except BaseException:  # also Ctrl-C: the line that says what ended it is no part of the answer
        output.end_line()
        raise


async def _generate(request: GenerateRequest, way: client.JoinOptions, output: Output, trace: bool) -> None:
    from fusion.runtime.serving.requests.client import another_peer
    from fusion.runtime.serving.requests.client import generate as ask_gateway
    from fusion.runtime.serving.requests.request import Piece

    async with client.connect(way) as context:
        gateway = await client.gateway(context, way.peer)
        answer: Answer | None = None
        pieces: list[Piece] = []
        seen = answer_trace.AnswerTrace()
        # The prompt stands before its answer, as the model sees it; ids have no text of their own.
        text = request.prompt or ""
        has_text = request.prompt is not None or bool(request.features)
        others = another_peer(context.directory)  # where the gateway vanishes, one of them goes on
        try:
            shown = grants.grants_from(context)
            async for piece in ask_gateway(context.transport, gateway, request, others, shown):
                output.write(text)
                text = ""
                if isinstance(piece, Piece):
                    seen.token()
                    pieces.append(piece)
                    output.write(piece.text if has_text else f"{piece.id} ")
                    continue
                answer = piece
                if has_text:  # what was held back until it was certain
                    output.write(answer.text[len("".join(each.text for each in pieces)) :])
        except NotAdmitted:
            raise
        except RemoteError as error:
            await job_client.find_model(context, request.model)  # is it the name?
            raise settings.of_question(error) from None
    output.write("\n")
    assert answer is not None
    record = answer_trace.answer_record(answer)
    if request.top_logprobs is not None:
        record["logprobs"] = [logprob_record(piece) for piece in pieces]
        for piece in pieces:
            output.note(logprob_line(piece))
    if trace:
        record["trace"] = seen.record()
    output.emit(record)
    output.note(answer_trace.table(seen, answer) if trace else summary(answer))


def logprob_record(piece: Piece) -> dict[str, Any]:
    return {"id": piece.id, "logprob": piece.logprob, "top": [list(entry) for entry in piece.top_logprobs]}


def logprob_line(piece: Piece) -> str:
    """E.g. "  17 -0.4121   of 17 -0.4121, 4 -1.9310": a token, and the most probable ones in its place."""
    best = ", ".join(f"{token} {value:.4f}" for token, value in piece.top_logprobs)
    return f"{piece.id:>6} {piece.logprob:.4f}" + (f"   of {best}" if best else "")


def summary(answer: Answer) -> str:
    """E.g. "64 tokens in 1.3 s (49 tokens/s) through quiet-otter-3f, brave-lynx-01"."""
    through = ", ".join(map(friendly_name, answer.route))
    rate = len(answer.tokens) / answer.seconds if answer.seconds else 0.0
    return f"{len(answer.tokens)} tokens in {answer.seconds:.1f} s ({rate:.0f} tokens/s) through {through}"
