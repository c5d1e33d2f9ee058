"""Serves a training job's newest snapshot while the job goes on, and replaces it with each newer one.

Each is a serving job of its own under the same name; the previous one is stopped DRAIN_SECONDS after the newer one is held, when
gateways resolve the name to the newer one and most answers under way have ended.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fusion.dag.ir.errors import PlacementError
from fusion.runtime.belief.naming import Known
from fusion.runtime.belief.reading import read_belief
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.launch.export import export_newest
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.snapshot_turns import LOOK_SECONDS, Seen, rest_until, turn
from fusion.swarm.authority.belief import Belief
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.errors import SwarmError

DRAIN_SECONDS = 60.0  # for which answers of the previous model may go on
LAST_TRIES, LAST_PAUSE_SECONDS = 4, 30.0  # at the last snapshot of a job that is over
SILENCE_SECONDS = 120.0  # without a record of the job


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Of the command: `hand_over` launches the model in a directory, the snapshot of a step, and waits until the swarm holds it;
    `stop` ends a job; `status` and `note` take lines for the user, `replaced` the job that has ended."""

    hand_over: Callable[[Path, int], Awaitable[Prepared]]
    stop: Callable[[JobRecord], Awaitable[object]]
    status: Callable[[str], None]
    note: Callable[[str], None]
    replaced: Callable[[JobId], None]


async def serve_snapshots(
    context: Context, known: Known, callbacks: Callbacks, *, once: bool = False
) -> None:
    """Until the job is over and its last snapshot served; `once`: until one is. The store of `context` keeps what is served and
    nothing else. ValueError where there is no snapshot and will be none; SwarmError, JobFailed, PlacementError where the first
    cannot be served, or there is no record of the job for SILENCE_SECONDS; JobFailed where the last cannot be, after LAST_TRIES."""
    name, clock = known.record.name, context.clock.monotonic
    served: int | None = None
    tried: int | None = None  # the snapshot that could not replace it
    failures = 0  # since the job is over
    before: Prepared | None = None
    rested_at, seen_at = 0.0, clock()
    while True:
        record = known.record
        newest = None if record.snapshot is None else record.snapshot_step
        seen = Seen(snapshot_step=newest, over=known.belief.over)
        match turn(seen, served, clock(), rested_at, tried=tried):
            case "serve":
                began = clock()
                step, after = await _serve(context, known, callbacks, before)
                rested_at = rest_until(began, clock())
                if after is not before:
                    served, before = step, after
                elif not seen.over:
                    tried = step
                else:
                    failures += 1
                    what = f"the last snapshot of {name}, of step {step}"
                    if failures == LAST_TRIES:
                        raise JobFailed(f"{what}, cannot be served; that of step {served} stays")
                    callbacks.status(f"{what}, is tried again in {LAST_PAUSE_SECONDS:.0f} s")
                    await asyncio.sleep(LAST_PAUSE_SECONDS)
                if once:
                    return
            case "end":
                if served is None:
                    raise ValueError(f"{name} is {record.state} and has no snapshot to serve")
                return
            case "wait":
                if served is None and once:
                    raise ValueError(f"{name} has no snapshot yet; try again in a while, or without --once")
                waits = "the first snapshot" if served is None else f"a snapshot after step {served}"
                callbacks.status(f"waiting for {waits} of {name}; Ctrl-C ends that, and what is served stays")
                await asyncio.sleep(LOOK_SECONDS)
        if (belief := await _read(context, known)) is not None:
            known, seen_at = replace(known, belief=belief), clock()
        elif clock() - seen_at > SILENCE_SECONDS:
            raise SwarmError(f"nobody speaks for the job {name} any more")


async def _read(context: Context, known: Known) -> Belief | None:
    """What to believe of the job now; None where there is no record, or the directory cannot be read."""
    try:
        return await read_belief(context, known.record.job, manifest=known.manifest)
    except SwarmError:
        return None


async def _serve(
    context: Context, known: Known, callbacks: Callbacks, before: Prepared | None
) -> tuple[int, Prepared]:
    """Replace `before` with the newest snapshot, or keep it where that fails. Gives the step that was tried, and the job that is
    served now."""
    step = known.record.snapshot_step
    try:
        with tempfile.TemporaryDirectory(prefix="fusion-serve-") as folder:
            callbacks.status(f"fetching the newest snapshot of {known.record.name}")
            step = await export_newest(context, known, Path(folder) / "model")
            after = await callbacks.hand_over(Path(folder) / "model", step)
    except (PlacementError, JobError, JobFailed, SwarmError, OSError) as error:  # a full disk, for one
        if before is None:
            raise
        callbacks.note(f"the model before stays: {error}")
        await _keep_only(context, before)
        return step, before
    if before is not None:
        await _end(context, before, callbacks)
    await _keep_only(context, after)
    return step, after


async def _keep_only(context: Context, served: Prepared) -> None:
    """Delete all other blobs from the store, which would fill up snapshot by snapshot."""
    store = context.blobs.store
    for digest in set(store.held()) - {*served.blobs}:
        await asyncio.to_thread(store.delete, digest)


async def _end(context: Context, before: Prepared, callbacks: Callbacks) -> None:
    callbacks.status(f"the model before answers for {DRAIN_SECONDS:.0f} s more")
    left = f"fusion-peer jobs stop {before.job[:12]} ends it"
    try:
        await asyncio.sleep(DRAIN_SECONDS)
    except asyncio.CancelledError:
        callbacks.note(f"the model before goes on as well; {left}")
        raise
    try:
        belief = await read_belief(context, before.job, manifest=before.manifest)
        if belief is not None and not belief.over:
            await callbacks.stop(belief.record)
    except SwarmError as error:
        callbacks.note(f"the model before goes on: {error}; {left}")
        return
    callbacks.replaced(before.job)
