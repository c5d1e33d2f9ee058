"""A chat with 2 000 tokens of history over 2 stages on loopback: time to the first token of the turn that reads them, and of the
next turn, which adds 20 tokens."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from bench.baseline import say
from bench.decode import make_model

from fusion.cli.local.fleet import open_fleet
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import GenerateRequest, Piece

HISTORY, SAID, TOKENS = 2000, 20, 16
STAGES = 2
VOCABULARY = 8000


async def measure_prefix(rounds: int, device: str) -> dict[str, Any]:
    first: list[float] = []
    second: list[float] = []
    reused: list[int] = []
    async with open_fleet("fusion-prefix-") as fleet:
        path = str(fleet.root / "llama")
        make_model(path, positions=4096)
        gateway = await fleet.start_peer("peer-1", "--device", device)
        await fleet.start_peer("peer-2", "--device", device, bootstrap=(gateway.address,))
        home = fleet.root / "client"
        where = ("--home", str(home), "--peer", gateway.address)
        await fleet.run("serve", "serve", path, "--name", "llama", "--stages", str(STAGES), *where)
        async with open_client(ClientConfig(home=home, peer=gateway.address)) as client:
            await _turn(client, gateway, [1, 2, 3])
            for number in range(rounds):
                draw = random.Random(number)
                said = [draw.randrange(VOCABULARY) for _ in range(HISTORY)]
                seconds, answer = await _turn(client, gateway, said)
                first.append(seconds)
                said += [*answer.tokens, *(draw.randrange(VOCABULARY) for _ in range(SAID))]
                seconds, answer = await _turn(client, gateway, said)
                second.append(seconds)
                reused.append(answer.cached_tokens)
                say(
                    f"prefix, round {number + 1}: first token after {first[-1]:.3f} s, then {second[-1]:.3f} s with "
                    f"{reused[-1]} of {len(said)} tokens reused: {second[-1] / first[-1]:.3f}"
                )
    return {
        "history": HISTORY,
        "first_turn_seconds": first,
        "second_turn_seconds": second,
        "cached_tokens": reused,
        "ratio": statistics.median(b / a for a, b in zip(first, second, strict=True)),
    }


async def _turn(client: Any, gateway: Any, prompt: list[int]) -> tuple[float, Any]:
    """Seconds to the first token, and the answer."""
    request = GenerateRequest(model="llama", prompt_ids=tuple(prompt), max_tokens=TOKENS)
    began, seconds, last = time.perf_counter(), 0.0, None
    async for last in generate(client.transport, gateway.peer_id, request):
        if isinstance(last, Piece):
            seconds = seconds or time.perf_counter() - began
    return seconds, last
