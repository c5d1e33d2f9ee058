"""Attacks by jobs of the stranger's own: volunteers read every manifest."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from attacks.ground import Ground
from attacks.hold import Attack
from attacks.honest_answers import NEW_TOKENS, PROMPTS, served_model
from attacks.scripts.offers import Counter, open_counter
from attacks.stranger import Stranger
from attacks.verdict import Verdict
from safetensors.torch import save
from support.instances import Builder

from fusion.dag.ir import serialise
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, TensorType
from fusion.runtime.job.manifest import DataConfig, Manifest, OptimizerConfig, ServeConfig, TrainConfig
from fusion.runtime.job.manifest_wire import MAX_STEP_SAMPLES
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId

STAGES = 4096
GIB = 1 << 30
MOST_FETCHED = 64 << 20
SAMPLES = save({"x": torch.zeros(64, 4)})
WEIGHTS = save({"w0": torch.zeros(4, 4)})  # of `deep_training`
NOTHING = struct.pack("<Q", 2) + b"{}"  # safetensors of no tensors
PLACED_SECONDS = 60.0
LEFT_SECONDS = 90.0  # after which no file of an ended job is on a disk, where a day lasts 24 s
LONG_SAMPLES = 8192
ENDLESS_BYTES = 320 << 20  # the peers' estimates for `_endless` jobs are 240 and 312 MiB
SEATS_OF_ONE = 60  # stages that a greedy author offers to each peer


def deep_graph(nodes: int) -> Graph:
    built = Builder(4)
    for _ in range(nodes):
        built.at = built.add("aten.tanh", built.at)
    return built.graph()


def deep_training(nodes: int) -> Graph:
    """A loss of `nodes` operators in a chain, each with an activation that is kept for its gradient."""
    built = Builder(4)
    built.block(4, 4)
    for _ in range(nodes):
        built.at = built.add("aten.tanh", built.at)
    built.at = built.add("aten.mean", built.at, None)
    return built.graph()


def deep_model(nodes: int) -> Graph:
    """Logits of four tokens for each position, after `nodes` useless operators."""
    built = Builder(4, Input("input_ids", TensorType((symbol("batch"), symbol("sequence")), "int64")))
    built.at = built.add("aten.embedding", built.weight(4, 4), built.at, -1, False)
    for _ in range(nodes - 1):
        built.at = built.add("aten.tanh", built.at)
    return replace(built.graph(), symbols=("batch", "sequence"))


def wide_graph(width: int) -> Graph:
    """Two layers, each with a float32 matrix of `width` by `width`."""
    built = Builder(width)
    for _ in range(2):
        built.block(width, width)
    return built.graph()


async def stages_4096(one: Stranger) -> dict[str, Any]:
    """Jobs of 4 096 stages, all proposed to the three peers, with graphs of as many nodes: two that cannot run and two that
    can."""
    counter = await open_counter(one)
    cuts = tuple(range(1, STAGES))
    embedding = counter.put(save({"w0": torch.randn(4, 4)}))
    weights = (embedding, *(counter.put(NOTHING),) * (STAGES - 1))
    for graph in (deep_graph(STAGES), deep_model(STAGES)):
        data = counter.put(serialise.encode(graph))
        for _ in range(2):
            counter.offer(serving(counter, data, STAGES, cuts, weights=weights))
    await counter.keep_published()
    return counter.notes


async def understated_memory(one: Stranger) -> dict[str, Any]:
    """Manifests that declare one byte where the graph needs gigabytes, of weights or of activations."""
    counter = await open_counter(one)
    wide = counter.put(serialise.encode(wide_graph(1 << 14)))  # 1 GiB a layer
    deep = counter.put(serialise.encode(deep_training(4096)))  # 16 KiB a node for each thousand of samples
    heavy = counter.put_zeros(2 * GIB)
    for peer in one.peers:
        counter.offer(serving(counter, wide, 1, (), weights=(heavy,), proposed=(peer,), memory_bytes=(1,)))
        counter.offer(training(counter, deep, peer, microbatch_size=MAX_STEP_SAMPLES, memory_bytes=(1,)))
    await counter.keep_published()
    return counter.notes


async def understated_disk(one: Stranger) -> dict[str, Any]:
    """Small graphs with gigabytes of weights, tokenizers and graphs of gigabytes."""
    counter = await open_counter(one)
    small = counter.put(serialise.encode(deep_graph(2)))
    trained = counter.put(serialise.encode(deep_training(2)))
    heavy = counter.put_zeros(4 * GIB)
    for peer in one.peers:
        counter.offer(serving(counter, small, 1, (), weights=(heavy,), proposed=(peer,)))
        counter.offer(serving(counter, small, 1, (), tokenizer=heavy, proposed=(peer,)))
        counter.offer(serving(counter, heavy, 1, (), proposed=(peer,)))
        counter.offer(training(counter, trained, peer, weights=(heavy,)))
    await counter.keep_published()
    return counter.notes


async def huge_batches(one: Stranger) -> dict[str, Any]:
    """Steps of a million samples, and again and again new jobs with the most samples a step that a manifest may have."""
    counter = await open_counter(one)
    graph = counter.put(serialise.encode(deep_training(2)))
    for peer in one.peers:
        counter.offer(training(counter, graph, peer, microbatch_size=1 << 20))
        counter.offer(training(counter, graph, peer, microbatch_size=1, microbatches=1 << 20))
    renewing = asyncio.create_task(counter.keep_published())
    try:
        while one.time_left:
            peer = one.peers[len(counter.jobs) % len(one.peers)]
            counter.offer(training(counter, graph, peer, microbatch_size=MAX_STEP_SAMPLES))
            counter.offer(
                training(counter, graph, peer, microbatch_size=8, microbatches=MAX_STEP_SAMPLES // 8)
            )
            await asyncio.sleep(3.0)
    finally:
        renewing.cancel()
    await counter.stop()
    return counter.notes


async def long_calls(one: Stranger) -> dict[str, Any]:
    """An endless job whose every call has some fifty operators and takes seconds, on the peer that hosts the most stages."""
    return await _endless(one, width=256, blocks=24)


async def long_operators(one: Stranger) -> dict[str, Any]:
    """The same with a few operators, each of which takes about a second."""
    return await _endless(one, width=1536, blocks=2)


async def _endless(one: Stranger, width: int, blocks: int) -> dict[str, Any]:
    """Only one peer gets the job: its calls really compute (they are not delayed), on cores that all peers share."""
    counter = await open_counter(one)
    built = Builder(width)
    for _ in range(blocks):
        built.block(width, width)
    built.at = built.add("aten.mean", built.at, None)
    weights = save({f"w{n}": torch.zeros(width, width) for n in range(blocks)})
    samples = save({"x": torch.zeros(64, width)})
    counter.offer(
        training(
            counter,
            counter.put(serialise.encode(built.graph())),
            one.peers[1],
            microbatch_size=LONG_SAMPLES,
            steps=10**6,
            data=samples,
            weights=(counter.put(weights),),
            memory_bytes=(ENDLESS_BYTES,),
        )
    )
    await counter.keep_published()
    await counter.stop()
    return counter.notes


async def seat_grab(one: Stranger) -> dict[str, Any]:
    """Sixty jobs for every peer, all of one author: two thirds of them run, the others fail to load."""
    return await _grab_seats(one, lambda: one.identity)


async def seat_grab_many_authors(one: Stranger) -> dict[str, Any]:
    """The same with a new key for each job."""
    return await _grab_seats(one, Identity.generate)


async def seat_grab_forged_author(one: Stranger) -> dict[str, Any]:
    """The same in the name of the honest trainer, who has signed none of them."""
    return await _grab_seats(one, lambda: one.identity, one.scene.trainer)


async def _grab_seats(
    one: Stranger, author: Callable[[], Identity], named: PeerId | None = None
) -> dict[str, Any]:
    counter = await open_counter(one)
    weights = counter.put(save({"w0": torch.randn(4, 4)})), counter.put(NOTHING)
    runs, fails = zip(
        map(counter.put, map(serialise.encode, (deep_model(2), deep_graph(2)))), weights, strict=True
    )
    for peer in one.peers:
        for number in range(SEATS_OF_ONE):
            graph, held = runs if number % 3 else fails
            manifest = serving(counter, graph, 1, (), proposed=(peer,), weights=(held,))
            counter.offer(manifest, author(), named)
    await counter.keep_published()
    return counter.notes


def serving(counter: Counter, graph: Digest, stages: int, cuts: tuple[int, ...], **changes: Any) -> Manifest:
    """The manifest of a served model without weights, with its stages proposed to all peers in turn."""
    peers = counter.one.peers
    manifest = Manifest(
        name="hostile", kind="serve", graph=graph, cuts=cuts, weights=(counter.put(NOTHING),) * stages,
        proposed=tuple(peers[n % len(peers)] for n in range(stages)), author=PeerId(""),
        serve=ServeConfig(cache="recompute", max_sequence=64, vocabulary=4),
    )  # fmt: skip
    return replace(manifest, **changes)


def training(
    counter: Counter,
    graph: Digest,
    peer: PeerId,
    microbatches: int = 1,
    microbatch_size: int = 4,
    steps: int = 1,
    data: bytes = SAMPLES,
    **changes: Any,
) -> Manifest:
    """The manifest of a training job of one stage."""
    config = TrainConfig(
        steps=steps, microbatches=microbatches, microbatch_size=microbatch_size, sequence=0, seed=1,
        evaluate_batches=1, optimizer=OptimizerConfig(), data=DataConfig(kind="arrays", train=counter.put(data)),
    )  # fmt: skip
    manifest = Manifest(
        name="hostile", kind="train", graph=graph, cuts=(), weights=(counter.put(WEIGHTS),), proposed=(peer,),
        author=PeerId(""), train=config,
    )  # fmt: skip
    return replace(manifest, **changes)


# --- Checks


async def little_was_fetched(ground: Ground, verdict: Verdict) -> None:
    """Check that the peers read the manifests but little of the gigabytes, and that their homes have not grown once a day of
    their disks is over, for which snapshots of ended jobs may stay."""
    if not verdict.notes["manifests_read"]:
        verdict.notes["fault: reach"] = "no peer looked at the jobs"
    if verdict.notes["sent_bytes"] > MOST_FETCHED:
        verdict.notes["fault: fetched"] = f"{verdict.notes['sent_bytes'] >> 20} MiB were fetched"
    for peer in ground.peers:
        until = time.monotonic() + LEFT_SECONDS
        while (size := disk_bytes(peer.home)) > MOST_FETCHED and time.monotonic() < until:
            await asyncio.sleep(1.0)
        if size > MOST_FETCHED:
            verdict.notes["fault: disk"] = f"{peer.name} has {size >> 20} MiB on its disk"


def disk_bytes(home: Path) -> int:
    """The bytes of the files under `home`, some of which may vanish meanwhile."""
    total = 0
    for path in home.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            total += status.st_size if S_ISREG(status.st_mode) else 0
    return total


async def others_find_room(ground: Ground, verdict: Verdict) -> None:
    """Check that a new author's job is placed and answers while the stranger's jobs occupy seats."""
    await _finds_room(ground, verdict, Identity.generate())


async def the_trainer_finds_room(ground: Ground, verdict: Verdict) -> None:
    """Check that another job of the author whom the stranger's manifests name is placed and answers."""
    await _finds_room(ground, verdict, ground.trainer)


async def _finds_room(ground: Ground, verdict: Verdict, author: Identity) -> None:
    owners = [PeerId(peer.peer_id) for peer in ground.peers[:2]]
    prepared = await ground.fleet.in_thread(served_model, ground.user.blobs.store, author, owners)
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(PLACED_SECONDS):
            await launch(ground.user, prepared)
            await wait_until_held(ground.user, prepared)
            request = GenerateRequest(model=prepared.job, prompt_ids=PROMPTS[0], max_tokens=NEW_TOKENS)
            answer = await complete(ground.user.transport, PeerId(ground.peers[2].peer_id), request)
    except (SwarmError, TimeoutError) as error:
        verdict.notes["fault: placed"] = f"the author's job found no place: {error!r}"
        return
    verdict.notes["placed_seconds"] = round(asyncio.get_running_loop().time() - began, 1)
    if answer.tokens != ground.answers.truth[PROMPTS[0]]:
        verdict.notes["fault: tokens"] = f"its answer is {answer.tokens}"


ATTACKS = {
    "stages_4096": Attack(stages_4096, seconds=25.0, check=little_was_fetched, alone=True),
    "understated_memory": Attack(understated_memory, seconds=15.0, check=little_was_fetched, alone=True),
    "understated_disk": Attack(understated_disk, seconds=15.0, check=little_was_fetched, alone=True),
    "huge_batches": Attack(huge_batches, seconds=20.0, check=little_was_fetched, alone=True),
    "long_calls": Attack(long_calls, seconds=20.0, check=little_was_fetched, alone=True),
    "long_operators": Attack(long_operators, seconds=20.0, check=little_was_fetched, alone=True),
    "seat_grab": Attack(seat_grab, seconds=30.0, check=others_find_room, alone=True),
    "seat_grab_many_authors": Attack(
        seat_grab_many_authors, seconds=30.0, check=others_find_room, alone=True
    ),
    "seat_grab_forged_author": Attack(
        seat_grab_forged_author, seconds=30.0, check=the_trainer_finds_room, alone=True
    ),
}
