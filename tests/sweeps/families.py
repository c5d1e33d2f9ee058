"""The sweep of families: three real peers serve each on one kind of device, and it must answer as `generate()` does there.

    python tests/sweeps/families.py [--device cuda] [--dtype bfloat16] [--only llama,mixtral] [--kill] [--json FILE]

The families are those of which the tests have a small model with random weights (tests/support). Each is saved, and served in
three stages as a user's directory is, with prompts of 1, 7 and 100 tokens. With --kill an owner of each model is killed in the
middle of a fourth answer, and another peer replaces it. If the directory still lists a killed peer, the next model may get two
stages on one peer; the report says how many models were over three. In float32 every token must be `generate()`'s. In half
precision answers may diverge where two tokens are a few units of rounding apart, which is reported. Exit 0 if that is so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from reports import say, tell
from support import encoder_decoders, families
from support.endings import interruptible
from sweeps.rounds import Row

from fusion.cli.local.chaos_swarm import Swarm
from fusion.cli.local.fleet import Fleet, FleetError, LocalPeer, open_fleet
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

STAGES = 3
LENGTHS = (1, 7, 100)  # of prompts, in tokens
NEW = 32
KILLED, KILLED_AFTER, LONGER = 24, 20, 96  # the fourth prompt, the tokens before the kill, those asked for
ANSWER_SECONDS = 180.0
# Between two logits that are one but for rounding: this many units in the last place of the larger.
UNITS = 8
CAUSAL = (
    "llama", "qwen3", "gpt2", "mistral", "mistral-windowed", "phi", "neox", "llama-yarn", "llama-dynamic", "mixtral", "qwen3-moe",
    "qwen2-moe", "olmoe", "granite-moe", "deepseek-v3", "gpt-oss", "gemma2", "gemma3", "cohere2", "bloom", "mpt", "falcon",
    "falcon-alibi", "gptj", "codegen", "gptneo", "opt", "xglm", "qwen3-next", "kimi-linear", "mamba", "mamba2",
)  # fmt: skip
READERS = ("t5", "bart", "whisper")


@dataclass(frozen=True)
class Case:
    """One request, the answer of `generate()`, and the logits (new, vocabulary) of its tokens."""

    request: GenerateRequest
    tokens: list[int]
    logits: torch.Tensor


def causal(
    family: str, directory: Path, dtype: str, device: str, lengths: list[tuple[int, int]]
) -> list[Case]:
    """The saved model's cases: prompts of so many tokens, with so many new ones."""
    configuration = families.config(family)
    if dtype != "float32":
        configuration.dtype = dtype
    families.build(configuration).to(getattr(torch, dtype)).save_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval().to(device)
    chance = random.Random(1)
    cases = []
    for length, new in lengths:
        prompt = [chance.randrange(families.VOCABULARY) for _ in range(length)]
        request = GenerateRequest(model=family, prompt_ids=tuple(prompt), max_tokens=new)
        cases.append(Case(request, *families.greedy(model, prompt, new)))
    return cases


def reader(
    family: str, directory: Path, dtype: str, device: str, lengths: list[tuple[int, int]]
) -> list[Case]:
    """The cases of an encoder-decoder; Whisper's, whose sources have one length, differ in their sounds."""
    encoder_decoders.build(family).to(getattr(torch, dtype)).save_pretrained(directory)
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(directory).architectures[0])
    model = kind.from_pretrained(directory, dtype="auto").eval().to(device)
    cases = []
    for seed, (length, new) in enumerate(lengths):
        given = encoder_decoders.source(family, length, seed)
        asked: dict[str, Any] = {"prompt_ids": tuple(given[0].tolist())}
        if given.is_floating_point():
            asked = {"features": given.numpy().astype("<f4").tobytes()}
            given = given.to(getattr(torch, dtype))
        request = GenerateRequest(model=family, max_tokens=new, **asked)
        tokens = encoder_decoders.generated(model, given.to(device), new)
        if encoder_decoders.END in tokens:
            tokens = tokens[: tokens.index(encoder_decoders.END) + 1]
        begun = [encoder_decoders.START, *tokens[:-1]]
        cases.append(Case(request, tokens, encoder_decoders.logits(model, given.to(device), begun).cpu()))
    return cases


@dataclass
class Served:
    """Peers that serve, and a client of the first one."""

    fleet: Fleet
    client: Context
    gateway: LocalPeer
    swarm: Swarm

    async def ask(self, request: GenerateRequest, heard: Callable[[list[int]], None]) -> Answer:
        tokens: list[int] = []
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            aclosing(generate(self.client.transport, PeerId(self.gateway.peer_id), request)) as pieces,
        ):
            async for piece in pieces:
                if isinstance(piece, Answer):
                    return piece
                if isinstance(piece, Piece):
                    tokens.append(piece.id)
                    heard(tokens)
        raise JobFailed("the gateway ended without an answer")


def parted(case: Case, tokens: list[int], dtype: str) -> float | None:
    """None if the answer is `generate()`'s; otherwise the difference of the two logits at the first other token, in units in
    the last place."""
    for at, (ours, theirs) in enumerate(zip(tokens, case.tokens, strict=False)):
        if ours != theirs:
            row = case.logits[at].float()
            unit = torch.finfo(getattr(torch, dtype)).eps * float(row[theirs].abs())
            return float(row[theirs] - row[ours]) / unit
    return None if len(tokens) == len(case.tokens) else float("inf")


async def one(served: Served, family: str, options: argparse.Namespace) -> Row:
    began = time.monotonic()
    directory = served.fleet.root / f"model-{family}"
    lengths = [(length, NEW) for length in LENGTHS] + ([(KILLED, LONGER)] if options.kill else [])
    make = reader if family in READERS else causal
    cases = await served.fleet.in_thread(make, family, directory, options.dtype, options.device, lengths)
    where = ("--home", str(served.fleet.root / "client"), "--peer", served.gateway.address)
    name = f"serve-{family}"
    await served.fleet.run(name, "serve", str(directory), "--name", family, "--stages", str(STAGES), *where)
    row: Row = {"family": family, "parted": [], "route": 0, "killed": False, "kinds": 0}
    for case in cases:
        killing = options.kill and case is cases[-1]
        victims = (
            [peer for peer in served.fleet.peers if peer is not served.gateway and peer.peer_id in row["on"]]
            if killing
            else []
        )

        def heard(tokens: list[int], victims: list[LocalPeer] = victims) -> None:
            if victims and len(tokens) == KILLED_AFTER:
                victims[0].process.kill()

        answer = await served.ask(case.request, heard)
        row["on"] = answer.route
        row["route"] = max(row["route"], len(set(answer.route)))
        row["kinds"] = max(row["kinds"], len(set(answer.tokens)))
        row["parted"].append(parted(case, list(answer.tokens), options.dtype))
        if victims and len(case.tokens) > KILLED_AFTER:
            await served.fleet.kill(victims[0])
            await served.swarm.start_one()
            row["killed"] = victims[0].peer_id not in answer.route
    del row["on"]
    tolerated = 0.0 if options.dtype == "float32" else UNITS
    row["ok"] = (
        all(units is None or units <= tolerated for units in row["parted"])
        and row["route"] > 1
        and row["killed"] == options.kill
    )
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


async def sweep(options: argparse.Namespace) -> dict[str, Any]:
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    chosen = [name for name in options.only.split(",") if name] or [*CAUSAL, *READERS]
    rows: list[Row] = []
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet("fusion-families-"))
        swarm = Swarm(fleet, arguments=("--device", options.device))
        await swarm.start(STAGES + options.kill)
        first = swarm.peers[0]
        client = await stack.enter_async_context(
            open_client(ClientConfig(home=fleet.root / "user", peer=first.address))
        )
        served = Served(fleet, client, first, swarm)
        for family in chosen:
            try:
                row = await one(served, family, options)
            except (FleetError, SwarmError, JobError, JobFailed, TimeoutError) as error:
                row = {"family": family, "ok": False, "error": f"{type(error).__name__}: {error}"}
            rows.append(row)
            say(f"{family}: {row}")
    answers = [units for row in rows for units in row.get("parted", ())]
    return {
        "ok": all(row["ok"] for row in rows),
        "device": options.device,
        "dtype": options.dtype,
        "families": len(rows),
        "failed": [row["family"] for row in rows if not row["ok"]],
        "over_three_peers": sum(row.get("route") == STAGES for row in rows),
        "answers": len(answers),
        "identical": sum(units is None for units in answers),
        "killed": sum(row.get("killed", False) for row in rows),
        "most_units_apart": max((units for units in answers if units is not None), default=0.0),
        "command": "python " + " ".join(sys.argv),
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--only", default="", help="families, a comma between them")
    parser.add_argument(
        "--kill", action="store_true", help="an owner of each model, in the middle of an answer"
    )
    parser.add_argument("--json", type=Path, help="write the report, every family in it, to this file")
    options = parser.parse_args()
    return tell(asyncio.run(sweep(options)), options.json, left_out="rows")


if __name__ == "__main__":
    sys.exit(interruptible(main))
