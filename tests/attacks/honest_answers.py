"""The honest user of the ground's served model, who sends one request after the other and knows every token of the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import torch

from fusion.runtime.capture.capture import capture_language_model, variables_from_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId, Transport

NAME = "answers"
MODEL = GPTConfig(vocabulary=256, blocks=2, width=32, heads=2, sequence=64)
SPREAD = 4.0  # scale of the weights: at the usual scale an untrained GPT repeats one token
PROMPTS = ((1, 2, 3), (7, 11), (200, 4, 4, 90))
NEW_TOKENS = 16
ANSWER_SECONDS = 20.0  # timeout of an answer
RETRY_SECONDS = 0.2
TROUBLE = (SwarmError, JobError, JobFailed, TimeoutError)


def served_model(store: BlobStore, author: Identity, owners: Sequence[PeerId]) -> Prepared:
    """A GPT of two stages with a cache. Blocking, for seconds."""
    torch.manual_seed(3)
    module = GPT(MODEL)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(SPREAD if parameter.dim() > 1 else 1.0)
    captured = capture_language_model(module, training=False, maximum_sequence=MODEL.sequence)
    graph = serving_graph(captured, cache="kv", maximum_sequence=MODEL.sequence)
    config = ServeConfig(cache="kv", max_sequence=MODEL.sequence, vocabulary=MODEL.vocabulary)
    variables = variables_from_module(module)
    job = GraphJob(name=NAME, graph=graph, variables=variables, byte_level=True, author=author)
    return prepare_graph(job, as_requested(graph, config, (len(graph.nodes) // 2,), owners), store)


@dataclass
class Answers:
    """Requests answers of `model` (the name or id of a job) from `gateway` until cancelled."""

    transport: Transport
    gateway: PeerId
    model: str
    truth: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # unix seconds of each token
    errors: list[tuple[float, str]] = field(default_factory=list)  # time and error of failed requests
    wrong: list[str] = field(default_factory=list)

    async def learn(self) -> None:
        """Store the answers in quiet, retrying while the stages still load."""
        for prompt in PROMPTS:
            while prompt not in self.truth:
                try:
                    self.truth[prompt] = await self.ask(prompt)
                except TROUBLE:
                    await asyncio.sleep(RETRY_SECONDS)

    async def ask(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        request = GenerateRequest(model=self.model, prompt_ids=prompt, max_tokens=NEW_TOKENS)
        tokens: tuple[int, ...] = ()
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            aclosing(generate(self.transport, self.gateway, request)) as pieces,
        ):
            async for piece in pieces:
                if isinstance(piece, Answer):
                    tokens = piece.tokens
                else:
                    self.times.append(time.time())
        return tokens

    async def run(self) -> None:
        number = 0
        while True:
            prompt = PROMPTS[number % len(PROMPTS)]
            number += 1
            try:
                tokens = await self.ask(prompt)
            except TROUBLE as error:
                self.errors.append((time.time(), f"{type(error).__name__}: {error}"))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if tokens != self.truth[prompt]:
                self.wrong.append(
                    f"{list(prompt)} was answered {list(tokens)}, not {list(self.truth[prompt])}"
                )

    def rate(self, since: float, until: float) -> float:
        """Tokens a second."""
        return sum(since < at <= until for at in self.times) / (until - since)
