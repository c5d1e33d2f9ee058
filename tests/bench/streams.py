"""Concurrent answers: tokens a second of 1, 8 and 32 streams over 1 and 2 stages on loopback, and the time between two tokens
for a user, against local `generate()` with one thread, alone and with a batch of 8."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from bench.baseline import baseline, peak_bytes, say
from bench.decode import PROMPT, TOKENS, served_llama

from fusion.cli.local.fleet import open_fleet
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import GenerateRequest, Piece

STREAMS = (1, 8, 32)
STAGES = (1, 2)
VARIED = 24  # how much longer the prompts of streams are, one after the other: sessions are unlike


async def measure_streams(rounds: int, device: str) -> dict[str, Any]:
    own: list[float] = []
    batched: list[float] = []
    found: dict[tuple[int, int], list[dict[str, float]]] = {(n, s): [] for s in STAGES for n in STREAMS}
    async with open_fleet("fusion-streams-") as fleet:
        path, home, peers = await served_llama(fleet, 2, STAGES, device)
        alone = {"path": path, "prompt": PROMPT, "tokens": TOKENS, "repeats": 2, "device": device}
        first = peers[0]
        async with open_client(ClientConfig(home=home, peer=first.address)) as client:
            expected: dict[int, list[int]] = {}
            for number in range(rounds):
                own.append(max((await baseline("decode", alone))["tokens_per_second"]))
                batched.append(max((await baseline("decode", {**alone, "batch": 8}))["tokens_per_second"]))
                for (streams, stages), samples in found.items():
                    samples.append(await answers_at_once(client, first, stages, streams, expected))
                shown = ", ".join(f"{n}x{s} {v[-1]['tokens_per_second']:.0f}" for (n, s), v in found.items())
                say(
                    f"round {number + 1}: generate() {own[-1]:.0f}, batch of 8 {batched[-1]:.0f}; streams x stages: {shown}"
                )
        peaks = [peak_bytes(peer) for peer in peers]
    return {
        "generate_tokens_per_second": own,
        "generate_batch_8_tokens_per_second": batched,
        "streams": [
            {
                "streams": streams,
                "stages": stages,
                **{
                    key: statistics.median(sample[key] for sample in samples)
                    for key in ("tokens_per_second", "between_p50", "between_p95")
                },
                "samples": samples,
            }
            for (streams, stages), samples in found.items()
        ],
        "peer_peak_bytes": peaks,
    }


async def answers_at_once(
    client: Any, gateway: Any, stages: int, streams: int, expected: dict[int, list[int]]
) -> dict[str, float]:
    """Request so many answers at once, each to a prompt of its own. RuntimeError if one differs from the answer alone."""
    between: list[float] = []

    async def answer(number: int) -> None:
        prompt = tuple(PROMPT[i % len(PROMPT)] + number for i in range(len(PROMPT) + number * VARIED // 8))
        request = GenerateRequest(model=f"llama-{stages}", prompt_ids=prompt, max_tokens=TOKENS)
        tokens, last = list[int](), 0.0
        async for piece in generate(client.transport, gateway.peer_id, request):
            if isinstance(piece, Piece):
                now = time.perf_counter()
                if tokens:
                    between.append(now - last)
                last = now
                tokens.append(piece.id)
        if expected.setdefault(number, tokens) != tokens:
            raise RuntimeError(
                f"stream {number} of {streams} over {stages} stages has other tokens than before"
            )

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(answer(number))
    seconds = time.perf_counter() - started
    between.sort()
    return {
        "tokens_per_second": streams * TOKENS / seconds,
        "between_p50": statistics.median(between),
        "between_p95": between[int(0.95 * len(between))],
    }


def stream_rows(found: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    rows = []
    one = {each["stages"]: each for each in found["streams"] if each["streams"] == 1}
    for each in found["streams"]:
        streams, stages = each["streams"], each["stages"]
        rate, alone = each["tokens_per_second"], one[stages]["tokens_per_second"]
        rows.append(
            (
                f"{streams} stream(s) over {stages} stage(s) against one: tokens/s",
                f"{alone:.1f}",
                f"{rate:.1f}",
                f"{rate / alone:.2f}",
                ">= 3.50" if (streams, stages) == (8, 2) else "",
            )
        )
        p95, quiet = each["between_p95"], one[stages]["between_p95"]
        rows.append(
            ("  p95 between tokens: ms", f"{1e3 * quiet:.1f}", f"{1e3 * p95:.1f}", f"{p95 / quiet:.2f}", "")
        )
    rate = statistics.median(found["generate_batch_8_tokens_per_second"])
    own = statistics.median(found["generate_tokens_per_second"])
    rows.append(
        (
            "generate(), a batch of 8 against one: tokens/s",
            f"{own:.1f}",
            f"{rate:.1f}",
            f"{rate / own:.2f}",
            "",
        )
    )
    return rows
