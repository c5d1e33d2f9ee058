"""A job of three stages, one owned by a peer that lies about its steps or does nothing: another peer has to get that stage."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from attacks import honest_training
from attacks.ground import HERE, Ground
from attacks.honest_training import Committed, training_job
from attacks.verdict import Verdict

from fusion.cli import job_client
from fusion.runtime.belief.reading import read_belief
from fusion.runtime.job.protocol import HOLD
from fusion.runtime.launch.launch import launch
from fusion.swarm.directory.records import Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId, call

LIED_SECONDS = 60.0  # within which the liar must own the stage
MOVED_SECONDS = 150.0  # within which the job must go on without the liar
STEPS = 20  # steps that the job must commit without the liar
LIED_ABOUT = 2  # the liar's stage, the last one


async def goes_on_with_a_lying_owner(
    ground: Ground,
    verdict: Verdict,
    kind: str,
    *,
    stage: int = LIED_ABOUT,
    moved_seconds: float = MOVED_SECONDS,
    beside: Callable[[Place], AbstractAsyncContextManager[object]] = nullcontext,
) -> None:
    """Start a liar of `kind` (see `attacks.liar`) that owns `stage` from the first step on, before any peer stands by for it.

    `beside` is a further attack on that stage, which runs at the same time.
    """
    liar = await ground.fleet.start_peer(
        f"liar-{len(ground.hearers)}-{kind}-{stage}",
        bootstrap=(ground.peers[0].address,),
        command=(sys.executable, str(HERE / "liar.py"), kind),
    )
    owners = [PeerId(peer.peer_id) for peer in ground.peers[:2]]
    owners.insert(stage, PeerId(liar.peer_id))
    store = ground.user.blobs.store
    author = Identity.generate()
    prepared = await ground.fleet.in_thread(training_job, store, author, owners, name=f"lied-to-{liar.name}")
    committed = Committed(job=prepared.job)
    ground.hearers.append(committed.hear)
    async with beside((prepared.job, stage)):
        await launch(ground.user, prepared)
        fault = await _twentieth_step(ground, verdict, PeerId(liar.peer_id), committed, stage, moved_seconds)
    if fault:
        verdict.notes["fault: lied to"] = fault
        return
    if await _holds(ground, PeerId(liar.peer_id), prepared.job, stage):
        verdict.notes["fault: liar"] = "it still has its stage"
    await ground.fleet.kill(liar)  # what comes after it is about another one
    found = await asyncio.to_thread(
        honest_training.faults, committed, honest_training.TrueLosses(store, prepared)
    )
    if found:
        verdict.notes["fault: lied to"] = found[0]
    # This job must not slow the next one down.
    try:
        belief = await read_belief(ground.user, prepared.job)
        assert belief is not None, "its owners speak of it"
        await job_client.stop(ground.user, belief.record, author)
    except SwarmError as error:
        verdict.notes["fault: not stopped"] = str(error)


async def _twentieth_step(
    ground: Ground, verdict: Verdict, liar: PeerId, committed: Committed, stage: int, seconds: float
) -> str:
    """Why the job does not commit STEPS steps without the liar in `seconds`, or an empty text."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(LIED_SECONDS):
            while not await _holds(ground, liar, committed.job, stage):
                await asyncio.sleep(0.02)
    except TimeoutError:
        return "the liar did not get its stage"
    try:
        async with asyncio.timeout(seconds):
            await committed.begun(STEPS)
    except TimeoutError:
        steps = len(committed.steps)
        return f"{steps} steps in {seconds:.0f} s of a job whose stage {stage} a liar owned; {committed.ends}"
    took = verdict.notes.setdefault("lied_to_steps_after_seconds", [])
    took.append(round(time.monotonic() - began, 1))
    return ""


async def _holds(ground: Ground, peer: PeerId, job: str, stage: int) -> bool:
    try:
        reply = await call(ground.user.transport, peer, HOLD.name, "holds", {"job": job, "stage": stage})
    except SwarmError:
        return False
    return bool(reply.header["term"])
