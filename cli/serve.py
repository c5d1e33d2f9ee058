"""`fusion-peer serve DIR --name NAME`: put a model on the swarm, for anyone to ask; a GGUF file likewise. With a job instead:
its newest snapshot, and each newer one in its place."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.cli import client, job_client
from fusion.cli.launch_progress import offer, take_back, takers, until_answering, until_held
from fusion.cli.plan import plan_model
from fusion.cli.terminal import options
from fusion.cli.terminal.extras import need_peer_extra
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output
from fusion.runtime.launch.serving_spec import ServingSpec

if TYPE_CHECKING:
    from fusion.runtime.belief.naming import Known
    from fusion.runtime.job.context import Context
    from fusion.runtime.launch.prepared import Prepared
    from fusion.swarm.identity import Identity


MOST_STAGES = 4096  # of a job, as its manifest may say


class Quantization(StrEnum):
    int8 = "int8"
    int4 = "int4"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@options.grouped
def serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|GGUF|JOB",
            help="A Hugging Face model directory, one written by `jobs export`, a GGUF file, or a training job: its newest "
            "snapshot, replaced by each newer one.",
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The name of the model; required without --plan.")
    ] = "",
    stages: Annotated[
        int | None,
        typer.Option(
            "--stages",
            min=1,
            max=MOST_STAGES,
            help="Number of stages (default: as few as give nearly the shortest time per token).",
        ),
    ] = None,
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            "--quantization",
            help="Store the large matrices as int8 or int4: less memory, more tokens/s, nearly the same answers.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option("--dtype", help="Dtype of weights and computation; auto: that of its files."),
    ] = Dtype.auto,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=2,
            metavar="TOKENS",
            help="Longest sequence, prompt and answer together: a shorter one needs less memory (default: the model's).",
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Show what serving it would need, and where it would run; nothing starts."
        ),
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="For a job: serve its newest snapshot and return.")
    ] = False,
    admission: Annotated[
        options.Who | None,
        typer.Option(
            "--admission",
            help="Who may own stages, read the model and send prompts: everybody (open), or those of --admit.",
        ),
    ] = None,
    admit: Annotated[
        list[str] | None,
        typer.Option(
            "--admit",
            metavar="PEER",
            help="Admit this peer id: for good (listed), or by an invite (granted).",
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            metavar="DIR|GGUF",
            parser=options.a_path,
            help="A small model of the same tokenizer for speculative decoding over slow links: the same answers, sooner.",
        ),
    ] = None,
    *,
    way: client.JoinOptions,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model across the swarm. Returns once a token has gone through all of its stages."""
    need_peer_extra("serve")
    output = Output(as_json=json)
    path = options.a_path(source)
    job = source if not path.exists() and path.name == source and options.may_be_job(source) else None
    if job is None:
        if once:
            raise ValueError("--once: goes with a job, not with a model's files")
        options.check_model_files(path)
    if draft is not None:
        try:
            options.check_model_files(draft)
        except ValueError as error:
            raise ValueError(f"--draft: {error}") from None
    if plan and job is not None:
        raise ValueError("--plan: goes with a model's files, not with a job")
    if not plan:
        options.check_served_name(name)
    admitted = options.admitted(admission, admit or ())
    if job is not None and not client.has_way(way):
        raise ValueError(
            f"{path} is not a directory or a GGUF file, and there is no peer to ask for a job of that name (--bootstrap)"
        )
    client.need_way(way)
    output.status("loading the runtime ...")
    spec = ServingSpec(
        path=path,
        name=name,
        stages=stages,
        admission=admitted,
        draft=draft,
        dtype=None if dtype is Dtype.auto else dtype.value,
        quantization=None if quantization is None else quantization.value,
        context=context,
    )
    if plan:
        run(_plan(spec, way, output), debug=debug)
    elif job is None:
        run(_serve(spec, way, output), debug=debug)
    else:
        run(_follow(job, spec, way, output, once=once, has_admission=admission is not None), debug=debug)


async def _plan(spec: ServingSpec, way: client.JoinOptions, output: Output) -> None:
    async with client.join(way) as context:
        fits = await plan_model(context, spec, output)
    if not fits:
        raise typer.Exit(1)


async def _serve(spec: ServingSpec, way: client.JoinOptions, output: Output) -> None:
    async with client.join(way) as context:
        author = job_client.trainer_identity(
            way.home
        )  # only now: a command that cannot join leaves nothing behind
        context.access.hold(author)
        await _hand_over(context, spec, author, output)


async def _hand_over(
    context: Context, spec: ServingSpec, author: Identity, output: Output, step: int | None = None
) -> Prepared:
    """Launch the serving job of this model and wait until the peers hold it. `step`: of the snapshot that the model is."""
    from fusion.runtime.launch.prepare_serving import prepare_serving

    peers = await takers(context)
    prepared = await asyncio.to_thread(
        prepare_serving,
        *(spec, peers, context.blobs.store),
        links=await context.directory.links(),
        author=author,
        home=context.home if step is None else None,
        report=output.status,
        note=output.note,
        now=client.swarm_clock(context),
    )
    job = await offer(context, prepared, output)
    try:
        await until_held(context, prepared, output)
        await until_answering(context, prepared, output)
    except BaseException:
        if step is not None:
            await take_back(context, prepared, author)
        else:
            output.note(f"the swarm keeps what it has of it; end that with: fusion-peer jobs stop {job[:12]}")
        raise
    output.emit(
        {"event": "serving", "job": job, "name": spec.name, **({} if step is None else {"step": step})}
    )
    what = "it" if step is None else f"the snapshot of step {step}"
    serve = prepared.manifest.serve
    how = f'generate "..." --model {spec.name}'
    if serve is not None and serve.outputs:
        how = f"run {spec.name} --input x.npz --output y.npz"
    asking = f"ask it with: fusion-peer {how}"
    if serve is not None and serve.embeds:
        asking = "any peer's HTTP API answers for it: /v1/embeddings"
    output.print_line(f"the swarm serves {what}; {asking}")
    return prepared


# --- a job's snapshots


async def _follow(
    wanted: str,
    spec: ServingSpec,
    way: client.JoinOptions,
    output: Output,
    *,
    once: bool,
    has_admission: bool,
) -> None:
    """Serve the job's newest snapshot, and each newer one in its place until the job is over. `has_admission`: --admission was
    given."""
    async with client.join(way) as context:
        author = job_client.trainer_identity(way.home)
        context.access.hold(author)
        from fusion.runtime.launch.served_snapshots import Callbacks, serve_snapshots

        known = await job_client.find_current(context, wanted)
        _check_job(known, has_admission)
        callbacks = Callbacks(
            hand_over=lambda folder, step: _hand_over(
                context, replace(spec, path=folder), author, output, step
            ),
            stop=lambda record: job_client.stop(context, record, author),
            status=output.status,
            note=output.note,
            replaced=lambda job: output.emit({"event": "replaced", "job": job}),
        )
        await serve_snapshots(context, known, callbacks, once=once)


def _check_job(known: Known, has_admission: bool) -> None:
    """Raises ValueError where the job's snapshots cannot be served, or not without --admission."""
    name, manifest = known.record.name, known.manifest
    if manifest is None:
        raise ValueError(f"nobody gives us the manifest of {name}; try again in a moment")
    if manifest.kind != "train":
        raise ValueError(f"{name} serves a model already; ask it with: fusion-peer generate --model {name}")
    if manifest.admission.kind != "open" and not has_admission:
        raise ValueError(
            f"--admission: {name} is not for everybody; say who may ask its model (open, listed or granted)"
        )
