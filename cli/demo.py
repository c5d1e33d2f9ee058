"""`fusion-peer demo`: the whole system on this machine, in a few minutes, leaving nothing behind."""

from __future__ import annotations

import asyncio
import glob
import json as json_text
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from fusion.cli.local.fleet import Fleet, LocalPeer, Record, open_fleet, while_parent_lives
from fusion.cli.terminal import options
from fusion.cli.terminal.extras import need_peer_extra
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output, busy_text, bytes_text, rate_text

DEFAULT_STEPS = 600
PROMPT = "def "
MODEL_NAME = "stdlib-gpt"
ANSWER_TOKENS = 120
BLOCKS, WIDTH, HEADS, SEQUENCE = 4, 192, 6, 128
MICROBATCHES, MICROBATCH_SIZE = 4, 4


def demo(
    peers: Annotated[
        int, typer.Option("--peers", min=1, max=16, help="Peers beside the bootstrap peer.")
    ] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = DEFAULT_STEPS,
    json: options.Json = False,
    debug: options.Debug = False,
    stop_with: options.StopWith = None,
) -> None:
    """Start peers on this machine, train a GPT on Python's standard library across them, and generate code with it."""
    need_peer_extra("demo")
    # Progress goes to stderr when the last line of stdout is for a program.
    output = Output(stdout=sys.stderr if json else sys.stdout)
    figures = run(while_parent_lives(stop_with, _demo(peers, steps, output)), debug=debug)
    Output(as_json=json).emit(figures.record())


@dataclass
class Figures:
    """What the demo reports; `losses` are (step, loss), one for each training step."""

    peers: int
    started: float = field(default_factory=time.monotonic)
    stages: int = 0
    steps: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    validation_loss: float | None = None
    text: str = ""
    tokens_per_second: float = 0.0
    seconds: float = 0.0

    def record(self) -> Record:
        return {
            "peers": self.peers,
            "stages": self.stages,
            "steps": self.steps,
            "loss_first": self.losses[0][1] if self.losses else None,
            "loss_last": self.losses[-1][1] if self.losses else None,
            "val_loss": self.validation_loss,
            "text": self.text,
            "tokens_per_s": round(self.tokens_per_second, 2),
            "seconds": round(self.seconds, 1),
        }


async def _demo(count: int, steps: int, output: Output) -> Figures:
    figures = Figures(peers=count + 1)
    async with open_fleet() as fleet:
        output.print_line(f"1. {count + 1} peers start as processes of their own and find each other")
        bootstrap, workers = await _start_peers(fleet, count, output)
        output.print_line(
            "\n2. They train a GPT on Python's standard library, a stage each, with no coordinator"
        )
        await _train(fleet, workers, steps, figures, output)
        output.print_line("\n3. The trained model is exported, and the swarm serves it")
        exported = fleet.root / "exported"
        home = str(fleet.root / "trainer")
        via = ("--home", home, "--peer", workers[0].address)
        await fleet.run("export", "jobs", "export", MODEL_NAME, str(exported), *via)
        sizes = [file.stat().st_size for file in exported.iterdir()]
        output.print_line(f"   exported {len(sizes)} files, {bytes_text(sum(sizes))}")
        await fleet.run(
            "serve", "serve", str(exported), "--name", "demo", "--stages", str(len(workers)), *via
        )
        output.print_line(
            f"\n4. The bootstrap peer, which neither launched nor trained it, goes on from {PROMPT!r}"
        )
        await _generate(fleet, bootstrap, figures, output)
    figures.seconds = time.monotonic() - figures.started
    _conclude(figures, output)
    return figures


async def _start_peers(fleet: Fleet, count: int, output: Output) -> tuple[LocalPeer, list[LocalPeer]]:
    # It lends next to nothing, so that it only introduces the others and, later, answers for them.
    bootstrap = await fleet.start_peer("bootstrap", "--memory", "1MiB")
    output.print_line(f"   {_introduction(bootstrap)}  (bootstrap)")
    async with asyncio.TaskGroup() as tasks:
        starting = [
            tasks.create_task(fleet.start_peer(f"peer-{i + 1}", bootstrap=(bootstrap.address,)))
            for i in range(count)
        ]
    workers = [task.result() for task in starting]
    for worker in workers:
        output.print_line(f"   {_introduction(worker)}")
    return bootstrap, workers


def _introduction(peer: LocalPeer) -> str:
    speed = float(peer.ready["flops_per_second"]) / 1e9
    return f"{peer.ready['name']:<20} pid {peer.process.pid:<8} {speed:5.0f} GFLOP/s  {peer.address}"


async def _train(
    fleet: Fleet, workers: list[LocalPeer], steps: int, figures: Figures, output: Output
) -> None:
    job = fleet.root / "job.toml"
    job.write_text(job_text([worker.peer_id for worker in workers], steps), "utf-8")
    names = {worker.peer_id: worker.ready["name"] for worker in workers}

    def show(record: Record) -> None:
        if record["event"] == "launched":
            figures.stages = record["stages"]
            output.print_line(
                f"   {record['parameters']:,} parameters, {BLOCKS} blocks, in {record['stages']} stages:"
            )
            for stage, peer in enumerate(record["proposed"]):
                output.print_line(f"   stage {stage}  {names.get(peer, peer)}")
        elif record["event"] == "progress":
            learn(record, figures, output)

    await fleet.run("train", "train", str(job), "--home", str(fleet.root / "trainer"),
                    "--peer", workers[0].address, on_record=show)  # fmt: skip
    output.end_status()


def learn(record: Record, figures: Figures, output: Output) -> None:
    """Take in one progress record of the training, and show it."""
    figures.steps = record["step"]
    figures.losses += [(step, loss) for step, loss in record["losses"]]
    if record["validation_loss"] is not None and record["validation_loss"] != figures.validation_loss:
        figures.validation_loss = record["validation_loss"]
        output.print_line(
            f"   step {record['validation_step']:>5}  loss on held-out files {figures.validation_loss:.3f}"
        )
    if record["loss"] is not None:
        output.status(
            f"   step {record['step']:>5}/{record['steps']}  loss {record['loss']:.3f}  "
            f"{rate_text(record['tokens_per_second'])} tokens/s  busy {busy_text(record['busy'])}  "
            f"wire {bytes_text(record['sent_bytes'])}"
        )


async def _generate(fleet: Fleet, gateway: LocalPeer, figures: Figures, output: Output) -> None:
    [answer] = await fleet.run(
        *("generate", "generate", PROMPT, "--model", "demo", "--max-tokens", str(ANSWER_TOKENS)),
        *(
            "--temperature",
            "0.7",
            "--seed",
            "1",
            "--peer",
            gateway.address,
            "--home",
            str(fleet.root / "user"),
        ),
    )
    figures.text = PROMPT + answer["text"]
    figures.tokens_per_second = len(answer["tokens"]) / max(answer["seconds"], 1e-9)
    for line in figures.text.splitlines():
        output.print_line(f"   | {line}")


def _conclude(figures: Figures, output: Output) -> None:
    first, last = figures.record()["loss_first"], figures.record()["loss_last"]
    output.print_line(
        f"\n{figures.peers} peers, {figures.stages} stages, {figures.steps} steps: loss {first:.3f} -> {last:.3f}, "
        f"{figures.validation_loss:.3f} on held-out files; answered at {figures.tokens_per_second:.0f} tokens/s; "
        f"{figures.seconds:.0f} s in all. Every process and file of it is gone."
    )


def job_text(peers: list[str], steps: int, library: Path | None = None) -> str:
    """The demo's job file: a byte-level GPT on the standard library's top-level sources, a stage for each of `peers`."""
    folder = library or Path(sysconfig.get_path("stdlib"))
    files = json_text.dumps(f"{glob.escape(str(folder))}/*.py", ensure_ascii=False)  # a text to TOML as well
    listed = ", ".join(f'"{peer}"' for peer in peers)
    return f"""
name = "{MODEL_NAME}"

[model]
kind = "gpt"
blocks = {BLOCKS}
width = {WIDTH}
heads = {HEADS}

[data]
files = [{files}]
held_out = 0.05

[train]
steps = {steps}
sequence = {SEQUENCE}
microbatches = {MICROBATCHES}
microbatch_size = {MICROBATCH_SIZE}
evaluate_every = {max(1, steps // 6)}

[optimizer]
learning_rate = 3e-3
schedule = "cosine"
warmup_steps = {min(20, steps // 10)}
weight_decay = 0.01

[placement]
stages = {len(peers)}
peers = [{listed}]
"""
