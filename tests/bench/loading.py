"""Measures the loading of a large model: memory of every process, sampled from /proc, and bytes fetched.

    python tests/bench/loading.py --gigabytes 3 --peers 3 --lend 1.5GiB

makes a Llama of random bfloat16 weights of that size on the disk, serves it with peers that lend so much each, asks it for a few
tokens, stops everything, starts the same peers again (their homes stay) and serves it once more: then nothing is to be fetched.
Prints a table: of each process the most resident memory, and how far above what it lends that was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.text_table import text_of

from fusion.cli.local.fleet import Fleet, FleetError, LocalPeer, open_fleet
from fusion.dag.ir.graph import TensorType, Variable
from fusion.runtime.job.size_text import parse_size
from fusion.runtime.planes.weights_file import weights_bytes_of

SAMPLE_SECONDS = 0.05
PATIENCE_SECONDS = 600.0
QUIET_SECONDS = 40.0  # longer than a peer waits before it tries again to copy a stage
TOLERATED_BYTES = 300 << 20  # above what a peer lends: Python, its libraries, buffers
MIB = 1 << 20
WIDTH, VOCABULARY = 2048, 32_000


@dataclass
class Peak:
    resident: int = 0  # bytes, pages of files included
    private: int = 0  # without those
    phase: str = ""


@dataclass
class Watched:
    """Samples the memory of processes, by name, until the block ends."""

    processes: dict[str, psutil.Process] = field(default_factory=dict)
    peaks: dict[str, Peak] = field(default_factory=dict)
    phase: str = ""
    trace: bool = False

    def look(self) -> None:
        for name, process in list(self.processes.items()):
            with contextlib.suppress(psutil.Error, OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                said = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
                resident, private = int(said["VmRSS"]) << 10, int(said["RssAnon"]) << 10
                peak = self.peaks.setdefault(name, Peak())
                if resident > peak.resident + 50 * MIB and self.trace:
                    say(
                        f"{time.monotonic():.0f} {name}: {resident / MIB:.0f} MiB, {private / MIB:.0f} private ({self.phase})"
                    )
                if resident > peak.resident:
                    peak.resident, peak.phase = resident, self.phase
                peak.private = max(peak.private, private)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async def for_ever() -> None:
            while True:
                self.look()
                await asyncio.sleep(SAMPLE_SECONDS)

        task = asyncio.create_task(for_ever())
        try:
            yield
        finally:
            task.cancel()


def write_model(directory: Path, bytes_: int, dtype: str) -> int:
    """Save a Llama of about so many bytes, in shards of one layer each. Returns its exact bytes."""
    import transformers

    width, inner = WIDTH, 4 * WIDTH
    layer = 2 * (2 * width * width + 2 * width * width // 4 + 3 * width * inner)
    layers = max(3, round((bytes_ - 4 * VOCABULARY * width) / layer))
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=1024, dtype=dtype, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(directory)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    pool = torch.randn(1 << 25).mul_(0.02).to(getattr(torch, dtype))
    chance = random.Random(0)

    def drawn(variable: Variable) -> torch.Tensor:
        shape = [int(d) for d in variable.type.shape]  # type: ignore[arg-type]
        if len(shape) == 1:
            return torch.ones(shape, dtype=pool.dtype)
        count = torch.Size(shape).numel()
        value = torch.empty(count, dtype=pool.dtype)
        for at in range(0, count, pool.numel() // 2):
            size = min(pool.numel() // 2, count - at)
            start = chance.randrange(pool.numel() - size)
            value[at : at + size] = pool[start : start + size]
        return value.view(shape)

    places: dict[str, str] = {}
    shards: dict[str, list[Variable]] = {}
    for name, parameter in module.named_parameters():
        shard = f"model-{name.split('.')[2] if '.layers.' in name else 'ends'}.safetensors"
        type_ = TensorType(tuple(parameter.shape), dtype)
        shards.setdefault(shard, []).append(Variable(name, type_, "parameter", True, ()))
        places[name] = shard
    total = 0
    for shard, variables in shards.items():
        found = weights_bytes_of(variables, lambda wanted: {v.name: drawn(v) for v in wanted})
        with (directory / shard).open("wb") as file:
            for piece in found.pieces:
                file.write(piece)
        total += found.size_bytes
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


async def measure(arguments: argparse.Namespace, model: Path, homes: Path) -> dict[str, Any]:
    seen = Watched(trace=arguments.trace)
    runs = []
    for number in (1, 2):
        async with open_fleet("fusion-loading-") as fleet, seen.watching():
            seen.phase = f"start {number}"
            peers = await started(fleet, arguments, homes, seen)
            before = {path: path.stat().st_ino for path in blobs(homes)}
            began = time.monotonic()
            if number == 2:  # the peers go on with the job that they had; one served anew comes after its end
                seen.phase = "serving again by themselves"
                await answered(fleet, arguments, homes, "again")
                say(f"start {number}: served again by its peers after {time.monotonic() - began:.0f} s")
                seen.phase = "stopping"
                await fleet.run(
                    "stop",
                    "jobs",
                    "stop",
                    "large",
                    "--home",
                    str(homes / "launcher"),
                    "--bootstrap",
                    peers[0].address,
                )
                began = time.monotonic()
            seen.phase = f"serving {number}"
            launched = await serve(fleet, arguments, model, homes / "launcher", peers[0], seen)
            took = time.monotonic() - began
            fetched = sum(p.stat().st_size for p in blobs(homes) if before.get(p) != p.stat().st_ino)
            seen.phase = f"answering {number}"
            answer = await answered(fleet, arguments, homes, f"answer-{number}")
            if number == 1:
                await settled(homes)  # owners keep a copy of the stage before, in their own time
            runs.append({"seconds": took, "fetched_bytes": fetched, "serve": launched, "answer": answer})
            say(
                f"start {number}: serving after {took:.0f} s, {fetched / 1e6:,.0f} MB fetched; {answer.get('tokens')}"
            )
    lent = parse_size(arguments.lend, "--lend")
    peaks = {
        name: {
            "resident_bytes": peak.resident, "private_bytes": peak.private, "when": peak.phase,
            "above_bytes": peak.resident - (lent if name.startswith("peer-") else 0),
        }
        for name, peak in seen.peaks.items()
    }  # fmt: skip
    return {"runs": runs, "peaks": peaks, "lent_bytes": lent}


async def answered(fleet: Fleet, arguments: argparse.Namespace, homes: Path, name: str) -> dict[str, Any]:
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            found = await fleet.run(
                name, "generate", "--model", "large", "--prompt-ids", "1,2,3,4,5", "--max-tokens",
                str(arguments.tokens), "--home", str(homes / "peer-0"),
            )  # fmt: skip
            return found[-1]
        except FleetError:
            if time.monotonic() > until:
                raise
        await asyncio.sleep(1.0)


async def started(fleet: Fleet, arguments: argparse.Namespace, homes: Path, seen: Watched) -> list[LocalPeer]:
    peers: list[LocalPeer] = []
    for number in range(arguments.peers):
        name = f"peer-{number}"
        home = homes / name
        home.mkdir(parents=True, exist_ok=True)
        (fleet.root / name).symlink_to(home)
        joins = [peers[0].address] if peers else []
        peer = await fleet.start_peer(name, "--memory", arguments.lend, bootstrap=joins)
        seen.processes[name] = psutil.Process(peer.process.pid)
        peers.append(peer)
    return peers


async def serve(
    fleet: Fleet, arguments: argparse.Namespace, model: Path, home: Path, first: LocalPeer, seen: Watched
) -> list[dict[str, Any]]:
    async def watch_launcher() -> None:
        while "launcher" not in seen.processes:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "serve" in process.cmdline():
                        seen.processes["launcher"] = process
            await asyncio.sleep(SAMPLE_SECONDS)

    seen.processes.pop("launcher", None)
    watching = asyncio.create_task(watch_launcher())
    try:
        stages = [] if arguments.stages is None else ["--stages", str(arguments.stages)]
        return await fleet.run(
            "launcher", "serve", str(model), "--name", "large", "--home", str(home), "--bootstrap", first.address,
            "--dtype", arguments.serve_dtype, *stages,
        )  # fmt: skip
    finally:
        watching.cancel()


async def settled(homes: Path) -> None:
    """Wait until no peer has received a blob for a while."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS:
        size = sum(path.stat().st_size for path in [*blobs(homes), *homes.glob("peer-*/blobs/partial/*")])
        if size != last:
            last, since = size, time.monotonic()
        await asyncio.sleep(1.0)


def blobs(homes: Path) -> Iterator[Path]:
    """The large blobs of the peers."""
    for path in homes.glob("peer-*/blobs/*"):
        if path.is_file() and path.stat().st_size > MIB:
            yield path


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--dtype", default="bfloat16", help="of the model's files")
    parser.add_argument("--serve-dtype", default="auto", help="serve --dtype")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--lend", default="1.5GiB")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, help="where the model and the homes lie, and stay (a temporary one)"
    )
    parser.add_argument("--trace", action="store_true", help="say when a process grows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="fusion-loading-"))
    try:
        model = folder / f"model-{arguments.gigabytes:g}-{arguments.dtype}"
        if not model.is_dir():
            model.mkdir(parents=True)
            say(
                f"{write_model(model, int(arguments.gigabytes * 1e9), arguments.dtype) / 1e9:.2f} GB of weights in {model}"
            )
        homes = folder / "homes"
        shutil.rmtree(homes, ignore_errors=True)
        found = asyncio.run(measure(arguments, model, homes))
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps(found))
        return
    rows = [
        [
            name, f"{peak['resident_bytes'] / MIB:,.0f}", f"{peak['private_bytes'] / MIB:,.0f}", peak["when"],
            f"{peak['above_bytes'] / MIB:+,.0f}" if name.startswith("peer-") else "-",
        ]
        for name, peak in found["peaks"].items()
    ]  # fmt: skip
    print(text_of([["process", "resident MiB", "of it private", "when", "above what it lends"], *rows]))
    worst = max(p["above_bytes"] for name, p in found["peaks"].items() if name.startswith("peer-"))
    second = found["runs"][1]["fetched_bytes"]
    print(f"at most {worst / MIB:+,.0f} MiB above what is lent (tolerated: {TOLERATED_BYTES / MIB:.0f}); "
          f"fetched at the second start: {second} bytes")  # fmt: skip
    sys.exit(worst > TOLERATED_BYTES or second > 0)


if __name__ == "__main__":
    main()
