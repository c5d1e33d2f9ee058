"""Compares int8 and int4 with float32: perplexity on held-out text, bytes of weights, tokens a second.

    python tests/bench/quantised.py [--folder DIR] [--steps 600] [--rounds 5] [--only perplexity,decode,mixture,matrices]
        [--device cuda] [--json]

The model is the one that `fusion-peer demo` trains, trained here in one process as long as there (an hour of one busy
core; it is kept in DIR and not trained again), and for speed also the Llama of `make bench ARGS="--only decode"` and, with `mixture`, a
Mixtral of its size with eight experts. Decoding is of one stage on one thread, for one session and for four together; the three take turns, and each has its best round. Perplexity is that
of the graph that is served, on windows of the held-out files. On a GPU all of this runs there, the training too, and the
Llama is the one of 1.1 billion parameters of `tests/bench/cuda.py` and the Mixtral one of 1.0 billion; `matrices` is of a CPU's products.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.convergence_run import Line
from bench.cuda import LARGE
from bench.decode import SMALL, make_model
from bench.text_table import text_of

from fusion.cli.demo import DEFAULT_STEPS, SEQUENCE, job_text
from fusion.dag.cutting.costs import type_bytes
from fusion.dag.cutting.cuts import split
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.quantise import Kind
from fusion.runtime.capture import sources
from fusion.runtime.capture.quantised_weights import quantised, quantised_model
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.capture.sources import LanguageModel
from fusion.runtime.job.spec import GPTConfig, HuggingFaceConfig, parse
from fusion.runtime.launch.export_files import export_files
from fusion.runtime.launch.pack import pack_data
from fusion.runtime.launch.prepare import train_config
from fusion.runtime.launch.shard import silent
from fusion.runtime.peer.plane_choice import TORCH, choose
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.products.experts import PackedExperts
from fusion.runtime.planes.products.packed import Packed, in_blocks, linear, pack
from fusion.runtime.planes.products.quantised import InBlocks
from fusion.runtime.planes.products.quantised_code import product
from fusion.runtime.planes.torch_decoding import TorchDecodingStage
from fusion.runtime.training.snapshots import snapshot
from fusion.swarm.blobs.store import BlobStore

KINDS: tuple[Kind | None, ...] = (None, "int8", "int4")
WINDOWS = 400
TOKENS = 64
LARGE_MIXTURE = {**LARGE, "intermediate_size": 4096, "num_hidden_layers": 4}
MATRICES = ((4096, 4096), (11008, 4096), (4096, 11008))


def name_of(kind: Kind | None) -> str:
    return kind or "float32"


# --- the demo's model


def trained(folder: Path, steps: int, device: str) -> tuple[LanguageModel, torch.Tensor]:
    """The exported model of the demo after so many steps, and windows of the held-out text (windows, sequence + 1)."""
    spec = parse(job_text(["peer"], steps), folder)
    assert isinstance(spec.model, GPTConfig)
    model = sources.builtin(spec.model, spec.train.seed, byte_level=True, tokenizer=None)
    store = BlobStore(folder / "blobs", 1 << 30)
    data = pack_data(spec.data, None, model.about.vocabulary, SEQUENCE, store, silent, silent)
    assert data.held_out is not None
    directory = folder / f"exported-{steps}"
    if not directory.is_dir():
        values = _train(model, spec, data, store, device)
        directory.mkdir(parents=True)
        for name, content in export_files(model).items():
            (directory / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        named = {
            n: values[v.name].to("cpu", copy=True)
            for v in clean(model.inference).variables
            for n in (v.name, *v.aliases)
        }
        snapshot.save(named, directory / "model.safetensors", {"format": "pt"})
    text = torch.frombuffer(bytearray(store.path(data.held_out).read_bytes()), dtype=torch.uint8).long()
    windows = text[: (len(text) - 1) // SEQUENCE * SEQUENCE + 1].unfold(0, SEQUENCE + 1, SEQUENCE)
    return sources.exported(directory), windows[:: max(1, len(windows) // WINDOWS)]


def _train(
    model: LanguageModel, spec: Any, data: Any, store: BlobStore, device: str
) -> dict[str, torch.Tensor]:
    train = spec.train
    config = train_config(spec, data)
    assert model.training is not None
    texts = store.path(data.train), store.path(data.held_out)
    line = Line(clean(model.training), (), model.read, config, *texts, device=device)

    async def steps() -> None:
        for step in range(train.steps):
            loss = await line.step(step)
            if step % 50 == 49:
                print(f"step {step + 1}: loss {loss:.3f}", file=sys.stderr, flush=True)

    asyncio.run(steps())
    return line.variables()


# --- what is measured


def stage_of(
    graph: Graph, read: sources.Read, kind: Kind | None, device: str
) -> tuple[TorchDecodingStage, int]:
    """The graph as one stage, and the bytes of its variables according to their types."""
    if kind is not None:
        graph, read = quantised_model(graph, read, kind)
    stage = choose(TORCH, device, 1).decoding(split(graph, ())[0], read(graph.variables))
    assert isinstance(stage, TorchDecodingStage)
    return stage, sum(type_bytes(v.type) for v in graph.variables)


def perplexity(stage: TorchDecodingStage, windows: torch.Tensor) -> float:
    total = 0.0
    for number, window in enumerate(windows):
        name = str(number)
        stage.open(name, SEQUENCE)
        inputs = {"input_ids": window[None, :-1], "position_ids": torch.arange(SEQUENCE)[None]}
        (made,) = stage.run([Piece(name, 0, inputs)])
        stage.close(name)
        logits = made["result/0"][0].cpu().double()
        total += float(functional.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(total / windows[:, 1:].numel())


def rate(stage: TorchDecodingStage, sessions: int) -> float:
    """Tokens a second of greedy answers to prompts of 7 tokens, all sessions together."""
    names = [str(n) for n in range(sessions)]
    tokens = {name: list(range(n + 1, n + 8)) for n, name in enumerate(names)}
    for name in names:
        stage.open(name, SEQUENCE)
    at, started = 0, 0.0
    for turn in range(TOKENS + 1):
        if turn == 1:
            started = time.perf_counter()  # the prompt is done
        pieces = []
        for name in names:
            ids = torch.tensor([tokens[name][at:]])
            positions = torch.arange(at, at + ids.shape[1])[None]
            pieces.append(Piece(name, at, {"input_ids": ids, "position_ids": positions}))
        at = len(tokens[names[0]])
        for name, made in zip(names, stage.run(pieces), strict=True):
            tokens[name].append(int(made["result/0"][0, -1].argmax()))
    seconds = time.perf_counter() - started
    for name in names:
        stage.close(name)
    return sessions * TOKENS / seconds


def best_rates(stages: Mapping[str, TorchDecodingStage], rounds: int) -> dict[int, dict[str, float]]:
    """Tokens a second, by the number of sessions that decode together."""
    return {
        count: _best({name: partial(rate, stage, count) for name, stage in stages.items()}, rounds)
        for count in (1, 4)
    }


def _best(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The largest figure of each measurement; they are run in turn."""
    found = dict.fromkeys(measures, 0.0)
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name] = max(found[name], measure())
    return found


def held_bytes(value: torch.Tensor | Packed | PackedExperts) -> int:
    if isinstance(value, PackedExperts):
        return sum(map(held_bytes, value.matrices))
    return (value.blocks if isinstance(value, Packed) else value).nbytes


def of_model(model: LanguageModel, windows: torch.Tensor | None, rounds: int, device: str) -> dict[str, Any]:
    graph = serving_graph(model.inference, maximum_sequence=model.about.max_sequence)
    made = {name_of(kind): stage_of(graph, model.read, kind, device) for kind in KINDS}
    results: dict[str, Any] = {
        "parameter_bytes": {name: bytes_ for name, (_, bytes_) in made.items()},
        "held_bytes": {
            name: sum(held_bytes(v) for v in stage._variables) for name, (stage, _) in made.items()
        },
    }
    if windows is not None:
        whole = clean(model.inference)
        results["perplexity"] = {
            name_of(kind): perplexity(stage_of(whole, model.read, kind, device)[0], windows) for kind in KINDS
        }
    if rounds:
        stages = {name: stage for name, (stage, _) in made.items()}
        results["tokens_per_second"] = best_rates(stages, rounds)
    return results


def of_matrices(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Products a second of 4 rows, as one session runs them, and of 64 rows, with matrices too large for the caches."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for rows, columns in MATRICES:
        matrix = torch.randn(rows, columns) * 0.02
        packed = pack(matrix)
        assert packed is not None
        ways: dict[str, partial[torch.Tensor]] = {"float32": partial(linear, matrix=packed, bias=None)}
        kinds: tuple[Kind, ...] = ("int8", "int4")
        for kind in kinds:
            stored = [in_blocks(part) for part in quantised(matrix, kind)]
            weight, scales, minimums = (*stored, None)[:3]
            code = product(8 if kind == "int8" else 4, True, minimums is not None)
            assert code is not None
            way = InBlocks(code, rows, columns, scales.shape[1]).linear
            ways[kind] = partial(way, weight=weight, scales=scales, minimums=minimums, bias=None)
        for count in (4, 64):
            given = torch.randn(1, count, columns)
            measures = {name: partial(_per_second, way, given) for name, way in ways.items()}
            results.setdefault(f"{rows} x {columns}", {})[f"{count}"] = _best(measures, rounds)
    return results


def _per_second(way: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> float:
    started = time.perf_counter()
    way(given)
    return 1 / (time.perf_counter() - started)


# --- the command


def llama(folder: Path, device: str) -> LanguageModel:
    directory, shape = folder / f"llama-{device}", SMALL if device == "cpu" else LARGE
    if not directory.is_dir():
        make_model(str(directory), shape=shape)
    return sources.huggingface(HuggingFaceConfig(path=directory), training=False)


def mixture(folder: Path, device: str) -> LanguageModel:
    directory = folder / f"mixtral-{device}"
    if not directory.is_dir():
        torch.manual_seed(0)
        shape = {**SMALL, "num_key_value_heads": 2} if device == "cpu" else LARGE_MIXTURE
        config = MixtralConfig(
            **shape, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=1024
        )
        MixtralForCausalLM(config).save_pretrained(directory)
    return sources.huggingface(HuggingFaceConfig(path=directory), training=False)


def measure(folder: Path, steps: int, rounds: int, only: set[str], device: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if only & {"perplexity", "decode"}:
        model, windows = trained(folder, steps, device)
        decoded = rounds if "decode" in only else 0
        results["demo"] = of_model(model, windows if "perplexity" in only else None, decoded, device)
    if "decode" in only:
        results["llama"] = of_model(llama(folder, device), None, rounds, device)
    if "mixture" in only:
        results["mixture"] = of_model(mixture(folder, device), None, rounds, device)
    if "matrices" in only and device == "cpu":
        results["matrices"] = of_matrices(rounds)
    return results


def table(results: Mapping[str, Any]) -> str:
    rows = [("what", *map(name_of, KINDS), "target")]
    for name in ("demo", "llama", "mixture"):
        if found := results.get(name):
            rows += _rows(name, found)
    for shape, counts in results.get("matrices", {}).items():
        for count, rates in counts.items():
            rows.append(
                (f"{count} rows x {shape}: ms", *_against(rates, lambda rate: f"{1e3 / rate:.2f}"), "")
            )
    return text_of(rows)


def _rows(name: str, found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    if values := found.get("perplexity"):
        off = {kind: 100 * (value / values["float32"] - 1) for kind, value in values.items()}
        cells = [f"{value:.4f} ({off[kind]:+.2f} %)" for kind, value in values.items()]
        rows.append((f"{name}: perplexity, held-out text", *cells, "<= +0.5 %, +3 %"))
    sizes = found["parameter_bytes"]
    cells = [f"{size / 2**20:.2f} ({size / sizes['float32']:.3f})" for size in sizes.values()]
    rows.append((f"{name}: weights as the graph counts them, MiB", *cells, ""))
    held = [f"{size / 2**20:.2f}" for size in found["held_bytes"].values()]
    rows.append((f"{name}: weights that the stage holds, MiB", *held, "the same"))
    for sessions, rates in found.get("tokens_per_second", {}).items():
        cells = _against(rates, lambda rate: f"{rate:.0f}")
        rows.append((f"{name}: tokens/s, {sessions} session(s)", *cells, ">= 1.00, int8 1.30"))
    return rows


def _against(rates: Mapping[str, float], text: Callable[[float], str]) -> list[str]:
    return [f"{text(rate)} (x {rate / rates['float32']:.2f})" for rate in rates.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="perplexity,decode,mixture,matrices")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as made:
        folder = given.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        results = measure(folder, given.steps, given.rounds, set(given.only.split(",")), given.device)
    print(json.dumps(results) if given.json else table(results))


if __name__ == "__main__":
    main()
