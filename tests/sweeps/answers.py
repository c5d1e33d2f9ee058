"""The answer kill sweep: kills owners of stages at random moments of greedy answers, of which no token may change.

    python tests/sweeps/answers.py [--kills 100] [--together-kills 20] [--sessions 4] [--seed 1] [--stages 3]
        [--json FILE]

A GPT with random weights is served in so many stages, with one standby for each; the gateway runs none of them. `--kills`
times the owner of a stage is killed at a random token of one answer, and `--together-kills` times during `--sessions`
answers at once. A round without a kill is reported and repeated, up to a limit. Exit 0 if all those kills took place and
every answer had the tokens of the undisturbed one, 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from reports import say, tell
from safetensors.torch import save_file
from support.endings import interruptible
from sweeps.rounds import Row, summary, until_killed

from fusion.cli.local.chaos import last_lines
from fusion.cli.local.chaos_job import STORE_BYTES, ChaosJob, invented, launched
from fusion.cli.local.chaos_swarm import Swarm
from fusion.cli.local.fleet import FleetError, LocalPeer, open_fleet
from fusion.dag.ir import serialise
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job import model_files
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.launch.prepare_serving import prepare_serving
from fusion.runtime.launch.serving_spec import ServingSpec
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

MODEL = GPTConfig(blocks=6, width=128, heads=4, sequence=512)
SPREAD = 4.0  # of the weights: at the usual size a GPT without training says the same token for ever
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 24, 160
HELD_SECONDS = 180.0
STANDBY_SECONDS = 30.0
ANSWER_SECONDS = 120.0


@dataclass
class Told:
    """One answer as its user receives it."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # unix seconds, of the request and of each token
    error: str = ""

    def stall(self, at: float) -> float:
        """The longest wait for a token that ended after `at`."""
        gaps = [b - a for a, b in zip(self.times, self.times[1:], strict=False) if b >= at]
        return max(gaps, default=0.0)


@dataclass
class Stage:
    """The served model, and a client that requests answers."""

    swarm: Swarm
    client: Context
    gateway: LocalPeer
    job: JobId
    stages: int
    name: str
    truth: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    async def owners(self) -> list[ClaimRecord | None]:
        return [winner(await self._claims(stage)) for stage in range(self.stages)]

    async def standbys(self) -> int:
        """How many stages have an owner and a standby that live and are ready; claims of killed peers stay for a while."""
        living, count = {peer.peer_id for peer in self.swarm.peers}, 0
        for stage in range(self.stages):
            claims = await self._claims(stage)
            owner = winner(claims)
            ready = [claim for claim in claims if claim.ready and claim.peer in living]
            standby = any(claim.role in ("standby", "replica") for claim in ready)
            count += owner in ready and standby
        return count

    async def _claims(self, stage: int) -> tuple[ClaimRecord, ...]:
        with contextlib.suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(3.0):
                found: tuple[ClaimRecord, ...] = await self.client.directory.claims(self.job, stage)
                return found
        return ()

    async def ask(self, prompt: tuple[int, ...], heard: Callable[[int], Awaitable[None] | None]) -> Told:
        """Request one answer, and call `heard(n)` after the n-th token."""
        told = Told(times=[time.time()])
        request = GenerateRequest(model=self.name, prompt_ids=prompt, max_tokens=NEW_TOKENS)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async with aclosing(
                    generate(self.client.transport, PeerId(self.gateway.peer_id), request)
                ) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Answer):
                            break
                        told.tokens.append(piece.id)
                        told.times.append(time.time())
                        heard(len(told.tokens))
        except (SwarmError, JobError, JobFailed, TimeoutError) as error:
            told.error = f"{type(error).__name__}: {error}"
            told.times.append(time.time())
        return told


def write_model(directory: Path) -> None:
    """Save a model in the form of `jobs export`, with weights that make answers vary."""
    model = sources.builtin(MODEL, 1, byte_level=True, tokenizer=None)
    graph = clean(model.inference)
    directory.mkdir(parents=True)
    values = model.read(graph.variables)
    spread = {n: (v * SPREAD if v.is_floating_point() and v.dim() > 1 else v) for n, v in values.items()}
    exported = {n: v.clone().contiguous() for n, v in spread.items() if sources.is_exported(n)}
    constants = {n: v.clone().contiguous() for n, v in values.items() if not sources.is_exported(n)}
    save_file(exported, directory / model_files.WEIGHTS_FILE)
    if constants:
        save_file(constants, directory / sources.CONSTANTS_FILE)
    (directory / model_files.GRAPH_FILE).write_bytes(serialise.encode(graph))
    (directory / model_files.ABOUT_FILE).write_bytes(model.about.to_json())


def prepare(root: Path, stages: int, owners: list[str]) -> ChaosJob:
    """Place the model in so many even stages on these peers."""
    write_model(root / "model")
    store = BlobStore(root / "plan", STORE_BYTES)
    spec = ServingSpec(path=root / "model", name="answers", stages=stages)
    prepared = prepare_serving(spec, [invented(i) for i in range(stages)], store)
    manifest = replace(prepared.manifest, proposed=tuple(PeerId(owner) for owner in owners))
    job = JobId(store.put(manifests.encode(manifest)))
    blobs = (Digest(job), *prepared.blobs[1:])
    return ChaosJob(root / "plan", replace(prepared, job=job, manifest=manifest, blobs=blobs))


async def sweep(options: argparse.Namespace) -> dict[str, Any]:
    chance = random.Random(options.seed)
    began = time.monotonic()
    alone: list[Row] = []
    together: list[Row] = []
    problems: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet("fusion-answers-"))
        swarm = Swarm(fleet, replace_seconds=0.5)
        stack.push_async_callback(swarm.aclose)
        gateway = await swarm.start_one("--memory", "1KiB")
        await swarm.start(2 * options.stages)
        owners = [peer.peer_id for peer in swarm.peers if peer is not gateway][: options.stages]
        plan = await fleet.in_thread(prepare, fleet.root, options.stages, owners)
        async with launched(plan, fleet.root / "launcher", gateway.address) as holding:
            async with asyncio.timeout(HELD_SECONDS):
                await holding
        client = await stack.enter_async_context(
            open_client(ClientConfig(home=fleet.root / "user", peer=gateway.address))
        )
        served = Stage(swarm, client, gateway, plan.prepared.job, options.stages, plan.prepared.manifest.name)
        prompts = [
            tuple(chance.randrange(MODEL.vocabulary) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)
        ]
        await _in_peace(served, prompts)
        try:
            for rows, kills, sessions in (
                (alone, options.kills, 1), (together, options.together_kills, options.sessions),
            ):  # fmt: skip
                one_round = partial(_round, served, prompts, sessions, chance)
                async for row in until_killed(kills, one_round):
                    rows.append(row)
                    say(_line(len(alone) + len(together), row))
        except (FleetError, SwarmError, TimeoutError) as error:
            problems.append(str(error) or "timed out")
        if problems or not all(row["identical"] for row in alone + together):
            for peer, words in last_lines(swarm).items():
                for line in words.splitlines():
                    say(f"    {peer}: {line}")
    return _report(options, alone, together, problems, time.monotonic() - began)


async def _in_peace(served: Stage, prompts: list[tuple[int, ...]]) -> None:
    seconds = []
    for prompt in prompts:
        told = await served.ask(prompt, lambda _: None)
        if told.error or len(told.tokens) != NEW_TOKENS:
            raise FleetError(f"no answer in peace: {told.error or len(told.tokens)}")
        served.truth[prompt] = told.tokens
        seconds.append(told.times[-1] - told.times[0])
    kinds = len({token for tokens in served.truth.values() for token in tokens})
    say(f"{PROMPTS} answers of {NEW_TOKENS} tokens in {sum(seconds):.1f} s, {kinds} different tokens")


async def _round(served: Stage, prompts: list[tuple[int, ...]], sessions: int, chance: random.Random) -> Row:
    """Kill one owner, if there is one, during so many answers at once."""
    ready = await _until_ready(served)
    stage, at_token = chance.randrange(served.stages), chance.randint(1, NEW_TOKENS - 8)
    chosen = [chance.choice(prompts) for _ in range(sessions)]
    found = await served.owners()
    owner = found[stage]
    peer = next((p for p in served.swarm.peers if owner is not None and p.peer_id == owner.peer), None)
    killed: list[float] = []

    def heard(tokens: int) -> None:
        if tokens == at_token and not killed and peer is not None and peer.process.returncode is None:
            killed.append(time.time())
            peer.process.kill()

    asked = [
        asyncio.create_task(served.ask(prompt, heard if i == 0 else lambda _: None))
        for i, prompt in enumerate(chosen)
    ]
    answers = await asyncio.gather(*asked)
    if peer is not None and killed:
        served.swarm.fleet.forget(peer)
        served.swarm.replace_soon()
    at = killed[0] if killed else time.time()
    identical = [told.tokens == served.truth[prompt] for told, prompt in zip(answers, chosen, strict=True)]
    return {
        "stage": stage,
        "token": at_token,
        "sessions": sessions,
        "killed": bool(killed),
        "ready_standbys": ready,
        "identical": all(identical),
        "stall_seconds": [
            round(told.stall(at), 3) if same else ANSWER_SECONDS  # an answer that is lost is no short pause
            for told, same in zip(answers, identical, strict=True)
        ],
        "errors": [told.error for told in answers if told.error],
        "tokens": [len(told.tokens) for told in answers],
    }


async def _until_ready(served: Stage) -> int:
    """Wait until all stages have a ready owner and standby or the time is up, and return how many have."""
    until = time.monotonic() + STANDBY_SECONDS
    await served.swarm.settle()
    while (ready := await served.standbys()) < served.stages and time.monotonic() < until:
        await asyncio.sleep(0.25)
    return ready


def _line(number: int, row: Row) -> str:
    verdict = ("identical" if row["identical"] else "DIFFERENT") + (
        "" if row["killed"] else ", nobody killed"
    )
    stall = ", ".join(f"{seconds:.2f}" for seconds in row["stall_seconds"])
    errors = "; ".join(row["errors"])[:200]
    return (
        f"{number:>4}. stage {row['stage']} at token {row['token']:>3} of {row['sessions']}: {verdict}, "
        f"stall {stall} s  ({row['ready_standbys']} standbys ready) {errors}"
    )


def _report(
    options: argparse.Namespace, alone: list[Row], together: list[Row], problems: list[str], seconds: float
) -> dict[str, Any]:
    parts = {
        "alone": summary(alone, options.kills),
        "together": summary(together, options.together_kills),
    }
    return {
        "ok": not problems and all(part["ok"] for part in parts.values()),
        "problems": problems,
        **parts,
        "sessions": options.sessions,
        "stages": options.stages,
        "seed": options.seed,
        "command": "python " + " ".join(sys.argv),
        "rows": alone + together,
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--together-kills", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=4, help="at once, for the kills together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the report, every kill in it, to this file")
    options = parser.parse_args()
    return tell(asyncio.run(sweep(options)), options.json, left_out="rows")


if __name__ == "__main__":
    sys.exit(interruptible(main))
