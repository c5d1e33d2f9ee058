"""The time to the first token of a long prompt over slow links: against its bound, its effect on other answers, and the second
turn of a chat."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil
from bench.baseline import say
from bench.serving.answer_times import percentile
from bench.serving.bounds import FirstTokenBound
from bench.serving.boxed_swarm import CLIENT, BoxedSwarm, boxed_swarm, network
from bench.serving.compute import compute_seconds
from box.network import Box

STAGES, DELAY_MS, RATE_MBPS = 4, 20.0, 100.0
PROMPT_TOKENS = 1000
HISTORY_TOKENS, TURN_TOKENS, SAID_TOKENS = 2000, 16, 24
POSITIONS = 4096
WIDTH, VOCABULARY = 512, 8000
OTHERS, QUIET_TOKENS = 2, 48
FIRST_TARGET, OTHERS_TARGET, SECOND_TARGET = 1.25, 2.0, 0.15
NAME = "long"


def measure_first_token(
    rounds: int, prompt_tokens: int = PROMPT_TOKENS, history_tokens: int = HISTORY_TOKENS
) -> dict[str, Any]:
    with Box(network(STAGES, DELAY_MS, RATE_MBPS)) as box, box.entered(CLIENT):
        return asyncio.run(_measure(box, rounds, prompt_tokens, history_tokens))


async def _measure(box: Box, rounds: int, prompt_tokens: int, history_tokens: int) -> dict[str, Any]:
    async with boxed_swarm(box, STAGES) as swarm:
        path = swarm.fleet.root / "long"
        await swarm.fleet.in_thread(make_long_model, path)
        await swarm.serve(path, NAME)
        random = Random(5)
        alone, quiet, beside, turns = list[float](), list[float](), list[float](), list[tuple[float, float]]()
        bounds, carrying = list[FirstTokenBound](), list[float]()
        for number in range(rounds):
            before = _router_seconds(box)
            alone.append((await swarm.ask(NAME, _prompt(random, prompt_tokens), 1)).timed.first_seconds)
            carrying.append(_router_seconds(box) - before)
            # In each round: this machine is not as fast in one minute as in the next.
            needed = await compute_seconds(path, prompt_tokens, POSITIONS)
            bounds.append(_bound(prompt_tokens, needed["prompt_seconds"]))
            one, two = await _beside(swarm, random, prompt_tokens)
            quiet += one
            beside += two
            turns.append(await _two_turns(swarm, random, history_tokens))
            say(
                f"first token, round {number + 1}: {alone[-1]:.2f} s; others' tokens every {1e3 * statistics.median(one):.0f} ms, "
                f"p95 {1e3 * percentile(two, 0.95):.0f} meanwhile; turns {turns[-1][0]:.2f} and {turns[-1][1]:.2f} s"
            )
    bound = sorted(bounds, key=lambda each: each.seconds)[len(bounds) // 2]
    return {
        "prompt_tokens": prompt_tokens,
        "history_tokens": history_tokens,
        "bound_seconds": bound.seconds,
        "bound": str(bound),
        "first_seconds": alone,
        "of_bound": statistics.median(a / b.seconds for a, b in zip(alone, bounds, strict=True)),
        "bounds": [each.seconds for each in bounds],
        "carrying_seconds": carrying,
        "of_bound_carried": statistics.median(
            a / _bound(prompt_tokens, b.compute_seconds + c).seconds
            for a, b, c in zip(alone, bounds, carrying, strict=True)
        ),
        "others_quiet_median": statistics.median(quiet),
        "others_p95": percentile(beside, 0.95),
        "others_ratio": percentile(beside, 0.95) / statistics.median(quiet),
        "turns": turns,
        "second_of_first": statistics.median(second / first for first, second in turns),
    }


def _bound(prompt_tokens: int, busy_seconds: float) -> FirstTokenBound:
    return FirstTokenBound(
        stages=STAGES, delay_ms=DELAY_MS, rate_mbps=RATE_MBPS, prompt_tokens=prompt_tokens, position_bytes=4 * WIDTH,
        compute_seconds=busy_seconds, cores=os.cpu_count() or 1,
    )  # fmt: skip


def _router_seconds(box: Box) -> float:
    """The processor time that the box has used to carry packets; a real network would use none of these cores."""
    times = psutil.Process(box.router_pid).cpu_times()
    return float(times.user + times.system)


async def _beside(swarm: BoxedSwarm, random: Random, prompt_tokens: int) -> tuple[list[float], list[float]]:
    """The seconds between tokens of other answers: alone, and during the prefill of a long prompt."""
    ready, stop = [asyncio.Event() for _ in range(OTHERS)], asyncio.Event()
    tasks = [
        asyncio.create_task(_stream(swarm, _prompt(random, 12 + 5 * i), ready[i], stop))
        for i in range(OTHERS)
    ]
    try:
        for event in ready:
            await event.wait()
        began = time.perf_counter()
        await swarm.ask(NAME, _prompt(random, prompt_tokens), 1)
        ended = time.perf_counter()
    finally:
        stop.set()
        streams = await asyncio.gather(*tasks)
    quiet = [gap for at in streams for gap in _gaps(at, at[0], began)]
    return quiet, [gap for at in streams for gap in _gaps(at, began, ended)]


async def _stream(
    swarm: BoxedSwarm, prompt: list[int], ready: asyncio.Event, stop: asyncio.Event
) -> list[float]:
    """When each token of an answer came that goes on until `stop`; `ready` once it runs evenly."""
    at: list[float] = []

    def seen(now: float) -> None:
        at.append(now)
        if len(at) == QUIET_TOKENS:
            ready.set()

    asking = asyncio.create_task(swarm.ask(NAME, prompt, POSITIONS // 2, seen=seen))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
    ready.set()
    if asking.done():
        asking.result()
    for task in (asking, stopping):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return at


def _gaps(at: list[float], began: float, ended: float) -> list[float]:
    """Of tokens that came, and were waited for, between the two."""
    return [b - a for a, b in pairwise(at) if b > began and a < ended]


async def _two_turns(swarm: BoxedSwarm, random: Random, history_tokens: int) -> tuple[float, float]:
    """Seconds to the first token of a chat's first turn with that history, and of the next."""
    history = _prompt(random, history_tokens)
    first = (await swarm.ask(NAME, history, TURN_TOKENS)).timed
    said = [*history, *first.tokens, *_prompt(random, SAID_TOKENS)]
    second = (await swarm.ask(NAME, said, 1)).timed
    return first.first_seconds, second.first_seconds


def make_long_model(path: Path) -> None:
    """That of `make bench`, for longer prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, initializer_range=0.08, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


def _prompt(random: Random, tokens: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(tokens)]


def first_token_rows(found: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """What, baseline, swarm, ratio, target."""
    first, second = (statistics.median(turn[i] for turn in found["turns"]) for i in (0, 1))
    return [
        (
            f"first token of {found['prompt_tokens']}, {STAGES} stages {DELAY_MS:g} ms apart, against its bound: s",
            f"{found['bound_seconds']:.2f}", f"{statistics.median(found['first_seconds']):.2f}",
            f"{found['of_bound']:.2f}", f"<= {FIRST_TARGET}",
        ),
        (
            "  the same, where the box's carrying of packets counts as the cores' work",
            f"{statistics.median(found['carrying_seconds']):.2f}", "", f"{found['of_bound_carried']:.2f}", "",
        ),
        (
            "  others' p95 between tokens meanwhile against their quiet median: ms",
            f"{1e3 * found['others_quiet_median']:.0f}", f"{1e3 * found['others_p95']:.0f}",
            f"{found['others_ratio']:.2f}", f"<= {OTHERS_TARGET}",
        ),
        (
            f"  second turn of a chat of {found['history_tokens']} tokens against the first: s to its first token",
            f"{first:.2f}", f"{second:.2f}", f"{found['second_of_first']:.3f}", f"<= {SECOND_TARGET}",
        ),
    ]  # fmt: skip
