"""Runs one attack: quiet seconds, the attack from a process of its own, quiet seconds, with honest users all the time."""

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
SETTLE_SECONDS = 3.0  # between an attack and the quiet seconds after it
PAUSE_SECONDS = 0.4  # between operations of the directory's honest users
LATE_SECONDS = 60.0  # a throttled attacker may end this long after its time

Span = tuple[float, float]  # of time.time()


@dataclass(frozen=True)
class Attack:
    """An attack and the check of its own effects.

    `run` gets a stranger in a process of its own and goes on while `stranger.time_left`; its result goes into
    `Verdict.notes`. `check` runs afterwards in the test's process and notes each fault that it finds as "fault: ...".
    """

    run: Callable[[Stranger], Awaitable[dict[str, Any] | None]]
    seconds: float = 8.0  # duration, without the preparation
    identities: int = 1  # the stranger's identities: itself and `stranger.others`
    check: Callable[[Ground, Verdict], Awaitable[None]] | None = None
    # The attack leaves jobs running, or its check kills peers: it gets peers of its own, watched until the check.
    alone: bool = False
    closed: bool = False  # the swarm is closed, and the stranger does not have its key


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
    """Run the attack `name` of `attacks.catalog` against the ground. Returns the verdict and the quiet seconds after it.

    Those may be the `quiet_before` of the next attack, which then begins at once. `seconds` replaces the attack's duration.
    `settle_seconds` may be 0 if the rates after the attack are not judged.
    """
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
            await _run_attack(process, seconds, verdict)
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
    _judge_peers(ground, verdict, quiet, began, watched_until)
    await _judge_honest(ground, verdict, quiet_from)
    return verdict, quiet_after


def _rates(ground: Ground, since: float, until: float) -> Rates:
    return Rates(steps=ground.committed.rate(since, until), tokens=ground.answers.rate(since, until))


def _cores(ground: Ground, since: float, until: float) -> float:
    """How many cores all peers together used."""
    total = 0.0
    for lines in ground.reports():
        span = [line for line in lines if since - 1.0 <= line["at"] <= until]
        if len(span) > 1:
            total += (span[-1]["spent"] - span[0]["spent"]) / (span[-1]["at"] - span[0]["at"])
    return total


def _judge_peers(
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
    """The honest users of the model and of the directory, while the block runs."""
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
        succeeded = await ground.operation(verdict.operations)
        verdict.honest += succeeded
        verdict.operations += 1
        verdict.slowest_seconds = max(verdict.slowest_seconds, time.monotonic() - began)
        await asyncio.sleep(PAUSE_SECONDS)


# --- The attacker's process


@asynccontextmanager
async def _attacker(ground: Ground, name: str, seconds: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """The attacker's process, which waits for a line to begin. It is terminated after the block."""
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


async def _run_attack(process: asyncio.subprocess.Process, seconds: float, verdict: Verdict) -> None:
    assert process.stdin is not None and process.stdout is not None
    before, began = spent_seconds(process.pid), time.monotonic()
    throttle = asyncio.create_task(hold_to_share(process.pid))
    spent = 0.0
    try:
        process.stdin.write(b"go\n")
        async with asyncio.timeout(seconds + LATE_SECONDS):
            result = await process.stdout.readline()
        spent = spent_seconds(process.pid) - before
    finally:
        throttle.cancel()
        await asyncio.gather(throttle, return_exceptions=True)
    verdict.share = spent / (time.monotonic() - began)
    if result:
        verdict.notes |= json.loads(result)
    else:
        verdict.notes["fault: attack"] = f"the attacker itself ended with {await process.wait()}"
