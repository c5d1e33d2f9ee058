"""Checks that the job and the model go on when an owner is killed after or during an attack."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from attacks.ground import Ground
from attacks.honest_answers import PROMPTS, TROUBLE
from attacks.verdict import Verdict

KILLED = 1  # the index of a peer of the ground that owns a stage of the job and one of the model
RECOVERY_SECONDS = 90.0  # for both, including the replay of steps since the last snapshot
MORE_STEPS = 5


async def goes_on_without_an_owner(ground: Ground, verdict: Verdict) -> None:
    """Kill an owner, and check that others take its stages over, the job commits new steps and the model answers."""
    peer = ground.peers[KILLED]
    reached = max(step for _, step in ground.committed.steps)
    ground.ended.append(peer)
    began = time.monotonic()
    await ground.fleet.kill(peer)

    async def timed(what: str, wait: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                await wait
            verdict.notes[f"{what}_after_seconds"] = round(time.monotonic() - began, 1)
        except TimeoutError:
            verdict.notes[f"fault: {what}"] = f"none in {RECOVERY_SECONDS:.0f} s after an owner was killed"

    await asyncio.gather(
        timed("steps", _further_steps(ground, reached + MORE_STEPS)),
        timed("answer", _an_answer(ground, verdict)),
    )


async def _further_steps(ground: Ground, step: int) -> None:
    while max(step for _, step in ground.committed.steps) < step:
        await asyncio.sleep(0.1)


async def _an_answer(ground: Ground, verdict: Verdict) -> None:
    while True:
        try:
            tokens = await ground.answers.ask(PROMPTS[0])
        except TROUBLE:
            await asyncio.sleep(0.5)
            continue
        if tokens != ground.answers.truth[PROMPTS[0]]:
            verdict.notes["fault: tokens"] = f"{list(tokens)} after an owner was killed"
        return
