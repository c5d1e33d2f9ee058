"""Times tokens around a ring of slow links, with and without guesses, against the ring's lower bound."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.baseline import baseline, say
from bench.decode import make_model
from bench.serving import code_model
from bench.serving.bounds import RingBound
from bench.serving.boxed_swarm import CLIENT, HAS_GUESSES, BoxedSwarm, boxed_swarm, network
from bench.serving.compute import compute_seconds
from bench.serving.copy_model import POSITIONS, STEPS, document, save_copy_model, share_copied
from box.network import Box

from fusion.runtime.serving.requests.sampling_params import Sampling

STAGES, DELAY_MS, RATE_MBPS = 4, 50.0, 100.0
TOKENS = 48
WORDS = 60  # of a document that is copied
PROMPT = [11, 7, 5, 3, 2, 19, 23]
SOURCE = b"import os\nimport sys\n\n\nclass Reader:\n    def read(self"
NOVEL, COPY, RENAME, CODE, DRAFTED = "novel", "copy", "rename", "code", "code (with a draft model)"
# Small models that say what is likeliest repeat themselves at once, which is guessed without a draft.
SAMPLINGS = {kind: Sampling(temperature=0.7, seed=2) for kind in (CODE, DRAFTED)}
MODELS = {NOVEL: "random", COPY: "copies", RENAME: "copies", CODE: "code", DRAFTED: "drafted"}
TARGETS = {"bound": 1.08, COPY: 4.0, RENAME: 4.0, NOVEL: 0.98, DRAFTED: 2.0}


def measure_wan(rounds: int, stages: int = STAGES, delay_ms: float = DELAY_MS) -> dict[str, Any]:
    with Box(network(stages, delay_ms, RATE_MBPS)) as box, box.entered(CLIENT):
        return asyncio.run(_measure(box, rounds, stages, delay_ms))


async def _measure(box: Box, rounds: int, stages: int, delay_ms: float) -> dict[str, Any]:
    async with boxed_swarm(box, stages) as swarm:
        random, copies = swarm.fleet.root / "random", cached_copy_model()
        await swarm.fleet.in_thread(make_model, str(random))
        await swarm.fleet.in_thread(save_copy_model, copies)
        code, draft = cached_code_model("code"), cached_code_model("draft")
        for path in (code, draft):
            await swarm.fleet.in_thread(code_model.save_code_model, path, path.name)
        paths = {"random": random, "copies": copies, "code": code}
        for name, path in paths.items():
            await swarm.serve(path, name)
        await swarm.serve(code, "drafted", draft)
        source = list(SOURCE)
        said = await swarm.ask("code", source, TOKENS, False, sampling=SAMPLINGS[CODE])
        coded = (source, said.timed.tokens)
        asked = {
            NOVEL: (PROMPT, await _expected(random, PROMPT)),
            **{
                kind: (prompt, await _expected(copies, prompt))
                for kind in (COPY, RENAME)
                for prompt, _ in [document(WORDS, 7, rename=kind == RENAME)]
            },
            CODE: coded,
            DRAFTED: coded,
        }
        found: dict[str, dict[str, list[float]]] = {kind: {"plain": [], "guessed": []} for kind in asked}
        for number in range(rounds):
            for kind, (prompt, expected) in asked.items():
                for how, samples in found[kind].items():
                    if how == "plain" or HAS_GUESSES:
                        samples.append(await _token_seconds(swarm, kind, prompt, expected, how == "guessed"))
            say(f"wan, round {number + 1}: ms a token {_shown(found)}")
        needed = await compute_seconds(random, len(PROMPT), 512)
        bound = RingBound(stages=stages, delay_ms=delay_ms, compute_seconds=needed["token_seconds"])
    return {
        "stages": stages,
        "delay_ms": delay_ms,
        "rate_mbps": RATE_MBPS,
        "compute_seconds": needed["token_seconds"],
        "bound_seconds": bound.seconds,
        "of_bound": statistics.median(found[NOVEL]["plain"]) / bound.seconds,
        "guesses": HAS_GUESSES,
        "speed_up": {
            kind: statistics.median(a / b for a, b in zip(each["plain"], each["guessed"], strict=True))
            for kind, each in found.items()
            if HAS_GUESSES
        },
        "copied": {
            kind: share_copied(asked[kind][1], document(WORDS, 7, rename=kind == RENAME)[1])
            for kind in (COPY, RENAME)
        },
        "token_seconds": found,
    }


def cached_copy_model() -> Path:
    """The model's folder, kept between runs on this machine, since the model is always the same."""
    return Path(tempfile.gettempdir()) / f"fusion-copy-model-{STEPS}-{POSITIONS}"


def cached_code_model(size: str) -> Path:
    """The folder of the served model or of its draft model, kept as in `cached_copy_model`."""
    sizes = "-".join(map(str, code_model.SIZES[size]))
    return Path(tempfile.gettempdir()) / f"fusion-code-model-{code_model.STEPS}-{sizes}" / size


async def _expected(path: Path, prompt: list[int]) -> list[int]:
    found = await baseline("decode", {"path": str(path), "prompt": prompt, "tokens": TOKENS})
    return list(found["ids"])


async def _token_seconds(
    swarm: BoxedSwarm, kind: str, prompt: list[int], expected: list[int], guesses: bool
) -> float:
    sampling = SAMPLINGS.get(kind, Sampling())
    timed = (await swarm.ask(MODELS[kind], prompt, TOKENS, guesses, sampling=sampling)).timed
    if timed.tokens != expected:
        raise RuntimeError(f"{kind}, guesses {guesses}: the answer differs from what is expected")
    return timed.token_seconds


def _shown(found: dict[str, dict[str, list[float]]]) -> str:
    return ", ".join(
        f"{kind} {'/'.join(f'{1e3 * samples[-1]:.0f}' for samples in each.values() if samples)}"
        for kind, each in found.items()
    )


def wan_rows(found: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """What, baseline, swarm, ratio, target."""
    where = f"{found['stages']} stages {found['delay_ms']:g} ms apart"
    plain = {kind: statistics.median(each["plain"]) for kind, each in found["token_seconds"].items()}
    bound = found["bound_seconds"]
    rows = [
        (
            f"{where}, no guesses, against delays and compute: ms a token",
            f"{1e3 * bound:.1f}", f"{1e3 * plain[NOVEL]:.1f}", f"{plain[NOVEL] / bound:.3f}", f"<= {TARGETS['bound']}",
        )
    ]  # fmt: skip
    for kind, samples in found["token_seconds"].items():
        guessed = samples["guessed"]
        rows.append(
            (
                f"  {kind} text, guesses against none: ms a token",
                f"{1e3 * plain[kind]:.1f}",
                f"{1e3 * statistics.median(guessed):.1f}" if guessed else "not built in",
                f"{found['speed_up'][kind]:.2f}" if guessed else "",
                f">= {TARGETS[kind]:.2f}" if kind in TARGETS else "",
            )
        )
    return rows
