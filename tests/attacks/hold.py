"""An attack held: quiet seconds, the attack by a process of its own, quiet seconds, while honest users go on."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks import honest_training
from attacks.ground import Ground
from attacks.processor import hold_to_share, spent_seconds
from attacks.stranger import Stranger
from attacks.verdict import Rates, Verdict

HERE = Path(__file__).parent
QUIET_SECONDS = 8.0
SETTLE_SECONDS = 3.0  # after an attack, before its end counts as quiet
PAUSE_SECONDS = 0.4  # between operations of the directory's honest users
LATE_SECONDS = 60.0  # an attacker that is held back may end so long after its time

Span = tuple[float, float]  # of time.time()


@dataclass(frozen=True)
class Attack:
    """`run` gets a stranger in a process of its own and goes on while `stranger.time_left`; what it returns goes into
    `Verdict.notes`. `check` looks afterwards, in our process, at what this attack alone is about, and notes what should not
    be as "fault: ..."."""

    run: Callable[[Stranger], Awaitable[dict[str, Any] | None]]
    seconds: float = 8.0  # it goes on for, once prepared
    identities: int = 1  # of the stranger: `stranger.others` are the rest
    check: Callable[[Ground, Verdict], Awaitable[None]] | None = None
    # It leaves jobs behind that peers go on with, or its check ends peers: it gets peers of its own, watched until the check.
    alone: bool = False
    closed: bool = False  # against a closed swarm, whose key the stranger does not have


async def hold(
    ground: Ground,
    name: str,
    attack: Attack,
    *,
    quiet_seconds: float = QUIET_SECONDS,
    quiet_before: Span | None = None,
    seconds: float | None = None,
    settle_seconds: float = SETTLE_SECONDS,
) -> tuple[Verdict, Span]:
    """Run `attack` (of that name in `attacks.catalog`) against the ground; the quiet seconds after it come back with the
    verdict. They may be the `quiet_before` of the next attack, which then begins at once. `seconds`: instead of the attack's. `settle_seconds`: 0
    where nobody judges what was got afterwards."""
    verdict, seconds = Verdict(attack=name), seconds or attack.seconds
    await ground.look()
    async with _honest(ground, verdict):
        if quiet_before is None:
            began = time.time()
            await asyncio.sleep(quiet_seconds)
            quiet_before = began, time.time()
        quiet_from, quiet = quiet_before[0], ground.reports()
        verdict.before = _rates(ground, *quiet_before)
        async with _attacker(ground, name, seconds) as process:
            began = time.time()
            await _struck(process, seconds, verdict)
        ended = time.time()
        verdict.seconds = ended - began
        verdict.during = _rates(ground, began, ended)
        await asyncio.sleep(settle_seconds)
        settled = time.time()
        await asyncio.sleep(quiet_seconds)
        quiet_after = settled, time.time()
        verdict.after = _rates(ground, *quiet_after)
    watched_until = time.time() if attack.alone else math.inf
    if attack.check is not None and "fault: attack" not in verdict.notes:
        await attack.check(ground, verdict)
    verdict.lived = all(peer.process.returncode is None for peer in ground.living)
    verdict.quiet_block_seconds = max(
        line["block"] for lines in quiet for line in lines if line["at"] > quiet_from
    )
    verdict.quiet_cores, verdict.cores = _cores(ground, *quiet_before), _cores(ground, began, ended)
    _watched(ground, verdict, quiet, began, watched_until)
    await _judge_honest(ground, verdict, quiet_from)
    return verdict, quiet_after


def _rates(ground: Ground, since: float, until: float) -> Rates:
    return Rates(steps=ground.committed.rate(since, until), tokens=ground.answers.rate(since, until))


def _cores(ground: Ground, since: float, until: float) -> float:
    """That the peers used, all together."""
    total = 0.0
    for lines in ground.reports():
        seen = [line for line in lines if since - 1.0 <= line["at"] <= until]
        if len(seen) > 1:
            total += (seen[-1]["spent"] - seen[0]["spent"]) / (seen[-1]["at"] - seen[0]["at"])
    return total


def _watched(
    ground: Ground, verdict: Verdict, quiet: list[list[dict[str, Any]]], since: float, until: float
) -> None:
    for before, lines in zip(quiet, ground.reports(), strict=True):
        later = [line for line in lines if since < line["at"] <= until]
        for line in later:
            if line["block"] > verdict.block_seconds:
                verdict.block_seconds, verdict.blocked_at = line["block"], line["where"]
            verdict.growth_bytes = max(verdict.growth_bytes, int(line["rss"] - before[-1]["rss"]))
            verdict.lent_bytes = max(verdict.lent_bytes, int(line["set_aside"] - before[-1]["set_aside"]))
            verdict.files = max(verdict.files, int(line["files"] - max(each["files"] for each in before)))


async def _judge_honest(ground: Ground, verdict: Verdict, since: float) -> None:
    answers = ground.answers
    verdict.honest_faults += answers.wrong[:1] + [text for at, text in answers.errors if at > since][:1]
    verdict.honest_faults += await asyncio.to_thread(honest_training.faults, ground.committed, ground.truth)


@asynccontextmanager
async def _honest(ground: Ground, verdict: Verdict) -> AsyncIterator[None]:
    """The users who go on whatever happens: of the model, and of the directory."""
    tasks = [
        asyncio.create_task(ground.answers.run()),
        asyncio.create_task(_use_directory(ground, verdict)),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def _use_directory(ground: Ground, verdict: Verdict) -> None:
    while True:
        began = time.monotonic()
        went_through = await ground.operation(verdict.operations)
        verdict.honest += went_through
        verdict.operations += 1
        verdict.slowest_seconds = max(verdict.slowest_seconds, time.monotonic() - began)
        await asyncio.sleep(PAUSE_SECONDS)


# --- The attacker's process


@asynccontextmanager
async def _attacker(ground: Ground, name: str, seconds: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ready to begin: it waits for a line. It is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE), "--attack", name, "--seconds", str(seconds)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        limit=1 << 24,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(ground.scene.to_json().encode() + b"\n")
        await process.stdout.readline()
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _struck(process: asyncio.subprocess.Process, seconds: float, verdict: Verdict) -> None:
    assert process.stdin is not None and process.stdout is not None
    before, began = spent_seconds(process.pid), time.monotonic()
    held = asyncio.create_task(hold_to_share(process.pid))
    spent = 0.0
    try:
        process.stdin.write(b"go\n")
        async with asyncio.timeout(seconds + LATE_SECONDS):
            word = await process.stdout.readline()
        spent = spent_seconds(process.pid) - before
    finally:
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
    verdict.share = spent / (time.monotonic() - began)
    if word:
        verdict.notes |= json.loads(word)
    else:
        verdict.notes["fault: attack"] = f"the attacker itself ended with {await process.wait()}"
