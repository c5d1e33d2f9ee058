"""Measures a served model on one core without peers and links: seconds of a token, of a prompt, and of a token each for eight sessions.

    python compute.py DIRECTORY PROMPT_TOKENS MAX_SEQUENCE
        prints {"token_seconds": x, "prompt_seconds": x, "batch_seconds": x}

In a process of its own, with one thread, through the code that the stages run."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from fusion.dag.cutting.cuts import split
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.capture.sources import huggingface
from fusion.runtime.job.spec import HuggingFaceConfig
from fusion.runtime.peer.plane_choice import TORCH, choose
from fusion.runtime.planes.plane import DecodingStage, Piece

TOKENS = 48  # that the time of one is the median of
PROMPTS = 3
CHUNK = 256
SESSIONS = 8  # of the batch


def measure(directory: Path, prompt_tokens: int, max_sequence: int) -> dict[str, float]:
    source = huggingface(HuggingFaceConfig(path=directory), training=False)
    graph = serving_graph(source.inference, cache="kv", maximum_sequence=max_sequence)
    [stage] = split(graph, ())
    plane = choose(TORCH, "cpu", 1).decoding(stage, source.read(stage.graph.variables))
    prompt_seconds, token_seconds = [], list[float]()
    for number in range(PROMPTS):
        name = str(number)
        plane.open(name, prompt_tokens + TOKENS)
        began = time.perf_counter()
        for start in range(0, prompt_tokens, CHUNK):
            plane.run([_piece(name, start, min(CHUNK, prompt_tokens - start))])
        prompt_seconds.append(time.perf_counter() - began)
        for position in range(prompt_tokens, prompt_tokens + TOKENS):
            began = time.perf_counter()
            plane.run([_piece(name, position, 1)])
            token_seconds.append(time.perf_counter() - began)
        plane.close(name)
    # Of prompts the quickest: whatever else this machine does only adds to it.
    return {
        "token_seconds": statistics.median(token_seconds),
        "prompt_seconds": min(prompt_seconds),
        "batch_seconds": _batch_seconds(plane),
    }


def _batch_seconds(plane: DecodingStage) -> float:
    sessions = [f"session {n}" for n in range(SESSIONS)]
    for session in sessions:
        plane.open(session, TOKENS)
    seconds = []
    for position in range(TOKENS):
        began = time.perf_counter()
        plane.run([_piece(session, position, 1) for session in sessions])
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _piece(session: str, start: int, length: int) -> Piece:
    ids = torch.arange(start, start + length).remainder(50).unsqueeze(0)
    positions = torch.arange(start, start + length).unsqueeze(0)
    return Piece(session, start, {"input_ids": ids, "position_ids": positions})


async def compute_seconds(directory: Path, prompt_tokens: int, max_sequence: int) -> dict[str, float]:
    """The same figures, measured in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(directory), str(prompt_tokens), str(max_sequence)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"compute.py ended with {process.returncode}")
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
