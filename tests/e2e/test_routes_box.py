"""A link becomes ten times slower in the middle of an answer: it goes on over the replica of a stage, and so do others.

Real peers in a box: `a` owns stage 0 and is the gateway, `b` owns stage 1, `c` is its replica. What crosses between the
stages is 4 KiB for each token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers
from box import kernel
from box.network import Box
from box.spec import Host, Link, NetworkSpec
from support.families import COMMON, build

from fusion.cli.local.fleet import Fleet, open_fleet
from fusion.dag.cutting.cuts import legal_cuts
from fusion.runtime.capture.capture import capture_language_model, variables_from_module
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.transport import PeerId

REASON = kernel.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.skipif(bool(REASON), reason=REASON)]

WIDTH, POSITIONS, VOCABULARY = 1024, 512, 256
PROMPT = [(7 * i) % VOCABULARY for i in range(16)]
TOKENS = 450
HOP_BYTES = 4 * WIDTH  # of a token, from stage to stage
MBPS, CUT = 8.0, 0.1
STARTED_TOKENS = 40  # before anything happens
SETTLE_SECONDS = 60.0
PUBLISH_SECONDS = 3.0  # until everybody knows that a session is over


@dataclass
class Swarm:
    box: Box
    fleet: Fleet
    context: Context  # of a client on a host of its own
    prepared: Prepared
    names: dict[PeerId, str]

    @property
    def ids(self) -> dict[str, PeerId]:
        return {name: peer for peer, name in self.names.items()}

    async def ask(self, tokens: int, gateway: str = "a", seen: Callable[[int], Any] = lambda i: None) -> Told:
        request = GenerateRequest(model="wide", prompt_ids=tuple(PROMPT), max_tokens=tokens)
        told = Told()
        async for piece in generate(self.context.transport, self.ids[gateway], request):
            if isinstance(piece, Answer):
                told.tokens, told.route = list(piece.tokens), [self.names[peer] for peer in piece.route]
            elif isinstance(piece, Piece):
                told.times.append(time.monotonic())
                seen(piece.index)
        return told


@dataclass
class Told:
    tokens: list[int] = field(default_factory=list)
    route: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


@asynccontextmanager
async def serving(tmp_path: Path, box: Box, fleet: Fleet) -> AsyncIterator[Swarm]:
    module = build(
        transformers.LlamaConfig(
            **{**COMMON, "initializer_range": 0.1}, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=8, max_position_embeddings=POSITIONS,
        )
    )  # fmt: skip
    graph = serving_graph(
        capture_language_model(module, training=False, maximum_sequence=POSITIONS),
        cache="kv",
        maximum_sequence=POSITIONS,
    )
    legal = legal_cuts(graph)
    cut = min(legal, key=lambda i: abs(i - len(graph.nodes) // 2))
    config = ServeConfig(cache="kv", max_sequence=POSITIONS, vocabulary=VOCABULARY)

    def prepare(store: BlobStore, proposed: tuple[PeerId, ...], replicas: tuple[Any, ...]) -> Prepared:
        job = GraphJob(name="wide", graph=graph, variables=variables_from_module(module))
        return prepare_graph(job, as_requested(graph, config, (cut,), proposed, replicas=replicas), store)

    needed = prepare(BlobStore(tmp_path / "scratch", 1 << 30), (), ()).manifest.memory_bytes
    room = str(sum(needed) - min(needed) // 2)  # for one stage, not for two
    first = await fleet.start_peer("a", listen=box.listen("a"), prefix=box.prefix("a"))
    joins: dict[str, Any] = {"bootstrap": [first.address]}
    others = await asyncio.gather(
        fleet.start_peer("b", listen=box.listen("b"), prefix=box.prefix("b"), **joins),
        fleet.start_peer("c", "--memory", room, listen=box.listen("c"), prefix=box.prefix("c"), **joins),
    )
    names = {PeerId(peer.peer_id): peer.name for peer in (first, *others)}
    a, b, c = names
    async with open_client(ClientConfig(home=tmp_path / "client", peer=first.address)) as context:
        prepared = await asyncio.to_thread(prepare, context.blobs.store, (a, b), ((), (c,)))
        await launch(context, prepared)
        await wait_until_held(context, prepared)
        yield Swarm(box, fleet, context, prepared, names)


async def until_replicated(swarm: Swarm) -> None:
    async with asyncio.timeout(SETTLE_SECONDS):
        while True:
            claims = await swarm.context.directory.claims(swarm.prepared.job, 1)
            if [swarm.names[c.peer] for c in claims if c.role == "replica" and c.ready] == ["c"]:
                return
            await asyncio.sleep(0.2)


async def until_known(swarm: Swarm, *pairs: str) -> None:
    """The rates of these links have been measured."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while not all([await mbps(swarm, pair[0], pair[1]) for pair in pairs]):
            await asyncio.sleep(0.2)


async def mbps(swarm: Swarm, one: str, two: str) -> float:
    """What the first says of its link to the second; 0 while it says nothing."""
    for record in await swarm.context.directory.links():
        for pair in record.pairs:
            if (record.peer, pair.peer) == (swarm.ids[one], swarm.ids[two]):
                return pair.mbps
    return 0.0


def expected(tokens: int) -> list[int]:
    config = transformers.LlamaConfig(
        **{**COMMON, "initializer_range": 0.1}, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=8, max_position_embeddings=POSITIONS,
    )  # fmt: skip
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        whole = build(config).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return [int(token) for token in whole[0, len(PROMPT) :]]


def network() -> NetworkSpec:
    slow = Link(rate_mbps=MBPS, delay_ms=4.0)
    longer = Link(rate_mbps=MBPS, delay_ms=7.0)  # so that the owner is the better one at first
    links = {(x, y): slow for x in "abc" for y in "abc" if x != y}
    links |= {("a", "c"): longer, ("c", "a"): longer}
    launcher = Link(rate_mbps=200.0, delay_ms=4.0)  # the weights are not what is to be seen here
    return NetworkSpec(hosts=tuple(Host(name=name) for name in "abcd"), links=links, default=launcher)


def in_the_box(tmp_path: Path, scenario: Callable[[Swarm], Any]) -> None:
    async def main(box: Box) -> None:
        async with open_fleet("routes-") as fleet, serving(tmp_path, box, fleet) as swarm:
            await until_replicated(swarm)
            await scenario(swarm)

    with Box(network()) as box, box.entered("d"):
        asyncio.run(main(box))


def test_traffic_leaves_a_link_that_was_cut_to_a_tenth(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        box = swarm.box
        await until_known(swarm, "ab", "ac")
        under_way = asyncio.Event()
        when: dict[str, float] = {}

        async def watch_link() -> None:
            while await mbps(swarm, "a", "b") > MBPS / 3:
                await asyncio.sleep(0.1)
            when["noticed"] = time.monotonic()

        async def watch_traffic() -> None:
            flows = 0  # quarters of a second in a row in which activations go to c
            while flows < 4:
                at, before = time.monotonic(), box.carried("a", "c").bytes
                await asyncio.sleep(0.25)
                flows = flows + 1 if box.carried("a", "c").bytes - before > 2 * HOP_BYTES else 0
                when["moved"] = when["moved"] if flows > 1 else at

        long = asyncio.create_task(swarm.ask(TOKENS, seen=lambda i: i < STARTED_TOKENS or under_way.set()))
        await under_way.wait()
        believed = await mbps(swarm, "a", "b")
        box.set_pair("a", "b", rate_mbps=MBPS * CUT)
        cut = time.monotonic()
        watchers = [asyncio.create_task(work()) for work in (watch_link, watch_traffic)]
        async with asyncio.timeout(SETTLE_SECONDS):
            await asyncio.gather(*watchers)
        answer = await long
        await asyncio.sleep(PUBLISH_SECONDS)
        fresh = await swarm.ask(3)
        gaps = [b - a for a, b in zip(answer.times, answer.times[1:], strict=False)]
        before = [gap for gap, at in zip(gaps, answer.times, strict=False) if at < cut]
        said = {what: round(at - cut, 1) for what, at in when.items()}
        print(f"{believed:.1f} Mbps cut to a tenth; seconds after the cut: {said}")
        print(f"tokens every {1e3 * median(before):.0f} ms before, {1e3 * median(gaps[-30:]):.0f} ms at last")
        print(
            f"longest pause {max(gaps):.2f} s; the answer ended {answer.times[-1] - cut:.1f} s after the cut"
        )
        assert answer.tokens == expected(TOKENS)
        assert answer.route == fresh.route == ["a", "c"]

    in_the_box(tmp_path, scenario)
