"""Two real peers that serve a small model, one stage each, and its right answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
import torch
from bench.serving.http_answer import read_metrics
from support.families import VOCABULARY, build, config, greedy

from fusion.cli.local.fleet import Fleet, LocalPeer, open_fleet
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.capture.sources import huggingface
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.spec import HuggingFaceConfig
from fusion.runtime.placing.placed_job import as_requested

MODEL, STAGES = "small", 2
POSITIONS = 512
QUESTIONS, ANSWER_TOKENS = 12, 48
LONG_PROMPT, LONG_TOKENS = 24, 240  # of answers that somebody does not wait for
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Question:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # what `generate()` gives


@dataclass
class Site:
    fleet: Fleet
    peers: list[LocalPeer]
    questions: list[Question]
    long: Question

    @property
    def url(self) -> str:
        """The metrics of the gateway."""
        return str(self.peers[0].ready["http"])

    async def held(self) -> tuple[int, int]:
        """The sessions and their bytes, of all stages together."""
        found = [await read_metrics(peer.ready["http"]) for peer in self.peers]
        sessions = sum(each.get("fusion_stage_sessions", 0.0) for each in found)
        return int(sessions), int(sum(each.get("fusion_stage_kv_bytes", 0.0) for each in found))

    async def until_free(self, within_seconds: float) -> float:
        """The seconds until no stage has a session or memory for one; infinite after the time limit."""
        began = time.monotonic()
        while await self.held() != (0, 0):
            if time.monotonic() - began > within_seconds:
                return float("inf")
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def resident_bytes(self) -> list[int]:
        """The memory of each peer's own process."""
        return [psutil.Process(peer.process.pid).memory_info().rss for peer in self.peers]


@asynccontextmanager
async def open_site(lent_sessions: float | None = None) -> AsyncIterator[Site]:
    """The running peers. `lent_sessions`: each peer lends memory for about so many of the long answers; None: the default."""
    async with open_fleet("fusion-load-") as fleet:
        path = fleet.root / "model"
        questions, long = await fleet.in_thread(_make, path)
        lent = ()
        if lent_sessions is not None:
            lent = ("--memory", str(await fleet.in_thread(_lent_bytes, path, lent_sessions)))
        first = await fleet.start_peer("peer-0", *lent)
        peers = [first, await fleet.start_peer("peer-1", *lent, bootstrap=(first.address,))]
        await fleet.run(
            "serve", "serve", str(path), "--name", MODEL, "--stages", str(STAGES),
            "--home", str(fleet.root / "launcher"), "--peer", first.address,
        )  # fmt: skip
        site = Site(fleet, peers, questions, long)
        await site.held()  # what answers over HTTP is loaded with the first question
        yield site


def _make(path: Path) -> tuple[list[Question], Question]:
    torch.set_num_threads(1)  # others compute beside us
    llama = config("llama")
    llama.max_position_embeddings = POSITIONS
    model = build(llama)
    model.save_pretrained(path)
    random = Random(3)

    def question(length: int, tokens: int) -> Question:
        prompt = [random.randrange(VOCABULARY) for _ in range(length)]
        return Question(tuple(prompt), tuple(greedy(model, prompt, tokens)[0]))

    return [question(4 + 5 * i, ANSWER_TOKENS) for i in range(QUESTIONS)], question(LONG_PROMPT, LONG_TOKENS)


def _lent_bytes(path: Path, sessions: float) -> int:
    """The memory that any stage needs, with room for about so many long answers."""
    source = huggingface(HuggingFaceConfig(path=path), training=False)
    graph = serving_graph(source.inference, cache="kv", maximum_sequence=POSITIONS)
    serve = ServeConfig(cache="kv", max_sequence=POSITIONS, vocabulary=VOCABULARY)
    [needed] = as_requested(graph, serve, ()).memory_bytes
    llama = config("llama")
    width = 2 * llama.num_key_value_heads * llama.hidden_size // llama.num_attention_heads
    layers = -(-llama.num_hidden_layers // STAGES)
    return needed + int(sessions * 4 * width * layers * (LONG_PROMPT + LONG_TOKENS))
