"""Tokens a second through 1, 2 and 3 stages on loopback against local `generate()` with one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.baseline import baseline, peak_bytes, say

from fusion.cli.local.fleet import Fleet, LocalPeer, open_fleet
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import GenerateRequest

PROMPT = [1, 2, 3, 4, 5, 6, 7]
TOKENS = 128
TARGETS = {1: 1.15, 2: 1.10, 3: 1.00}


SMALL = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 8000, "initializer_range": 0.08,
}  # fmt: skip


def make_model(
    path: str, positions: int = 1024, shape: Mapping[str, Any] = SMALL, dtype: str = "float32"
) -> None:
    """Save a llama with random weights whose answers vary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, max_position_embeddings=positions, bos_token_id=None, eos_token_id=None, dtype=dtype
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(path)


async def served_llama(
    fleet: Fleet,
    count: int,
    stages: Sequence[int],
    device: str,
    make: Callable[[str], None] = make_model,
) -> tuple[str, Path, list[LocalPeer]]:
    """So many peers that serve the model over each number of stages, as "llama-<stages>". Yields the model's folder, the home
    from which it is served, and the peers; the first one is the others' bootstrap peer."""
    path, home = str(fleet.root / "llama"), fleet.root / "client"
    make(path)
    peers = [await fleet.start_peer("peer-1", "--device", device)]
    for number in range(2, count + 1):
        joins = (peers[0].address,)
        peers.append(await fleet.start_peer(f"peer-{number}", "--device", device, bootstrap=joins))
    where = ("--home", str(home), "--peer", peers[0].address)
    for each in stages:
        await fleet.run("serve", "serve", path, "--name", f"llama-{each}", "--stages", str(each), *where)
    return path, home, peers


async def measure_decode(rounds: int, device: str) -> dict[str, Any]:
    own: list[float] = []
    swarm: dict[int, list[float]] = {stages: [] for stages in TARGETS}
    async with open_fleet("fusion-bench-") as fleet:
        path, home, peers = await served_llama(fleet, 3, tuple(TARGETS), device)
        request = {"path": path, "prompt": PROMPT, "tokens": TOKENS, "repeats": 2, "device": device}
        first = peers[0]
        async with open_client(ClientConfig(home=home, peer=first.address)) as client:
            for number in range(rounds):
                answer = await baseline("decode", request)
                own.append(max(answer["tokens_per_second"]))
                for stages, rates in swarm.items():
                    rates.append(max([await _rate(client, first, stages, answer["ids"]) for _ in range(2)]))
                shown = ", ".join(f"{rates[-1]:.1f}" for rates in swarm.values())
                say(f"decode, round {number + 1}: {own[-1]:.1f} tokens/s alone, {shown} over 1, 2, 3 stages")
        peaks = [peak_bytes(peer) for peer in peers]
    per_token = {stages: 1 / statistics.median(rates) for stages, rates in swarm.items()}
    return {
        "stages": [
            {
                "stages": stages,
                "target": TARGETS[stages],
                "baseline_tokens_per_second": own,
                "swarm_tokens_per_second": rates,
                "ratio": statistics.median(a / b for a, b in zip(rates, own, strict=True)),
            }
            for stages, rates in swarm.items()
        ],
        # From one stage to three a token crosses three links more: two between stages and the one back to the first.
        "hop_seconds": (per_token[3] - per_token[1]) / 3,
        "baseline_peak_bytes": answer["peak_bytes"],
        "peer_peak_bytes": peaks,
    }


async def _rate(client: Any, gateway: Any, stages: int, expected: list[int]) -> float:
    """Tokens a second as a user measures them: from the request to the last token, prompt included."""
    request = GenerateRequest(model=f"llama-{stages}", prompt_ids=tuple(PROMPT), max_tokens=TOKENS)
    started = time.perf_counter()
    answer = await complete(client.transport, gateway.peer_id, request)
    seconds = time.perf_counter() - started
    if list(answer.tokens) != expected:
        raise RuntimeError(f"over {stages} stages the answer differs from generate()'s")
    return TOKENS / seconds
