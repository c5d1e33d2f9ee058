"""A training job's newest snapshot, served while the job goes on, and each newer one in its place.

Peers that hold a model are told of the next one under the same name; the one before ends once gateways mean the newer one and
answers under way have had a while.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fusion.dag.ir.errors import PlacementError
from fusion.runtime.belief.naming import Known
from fusion.runtime.belief.reading import look
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.launch.export import export_newest
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.snapshot_turns import LOOK_SECONDS, Seen, rest_until, turn
from fusion.swarm.authority.belief import Belief
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.errors import SwarmError

DRAIN_SECONDS = 60.0  # for which answers of the model before may go on
LAST_TRIES, LAST_PAUSE_SECONDS = 4, 30.0  # at the last snapshot of a job that is over
SILENCE_SECONDS = 120.0  # without a word on the job


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What the command does: `hand_over` gives the model in a directory, the snapshot of a step, to the swarm until that holds
    it; `stop` ends a job; `status` and `note` say how it goes, `replaced` which job has ended."""

    hand_over: Callable[[Path, int], Awaitable[Prepared]]
    stop: Callable[[JobRecord], Awaitable[object]]
    status: Callable[[str], None]
    note: Callable[[str], None]
    replaced: Callable[[JobId], None]


async def serve_snapshots(
    context: Context, known: Known, callbacks: Callbacks, *, once: bool = False
) -> None:
    """Until the job is over and its last snapshot served; `once`: until one is. The store of `context` keeps what is served
    and nothing else. ValueError where there is no snapshot and will be none; SwarmError, JobFailed, PlacementError where the
    first cannot be served, or nobody speaks for the job any more; JobFailed where the last cannot be, after a few tries."""
    name, clock = known.record.name, context.clock.monotonic
    served: int | None = None
    tried: int | None = None  # what could not be served in its place
    failures = 0  # since the job is over
    before: Prepared | None = None
    rested_at, heard_at = 0.0, clock()
    while True:
        record = known.record
        newest = None if record.snapshot is None else record.snapshot_step
        seen = Seen(snapshot_step=newest, over=known.belief.over)
        match turn(seen, served, clock(), rested_at, tried=tried):
            case "serve":
                began = clock()
                step, made = await _serve(context, known, callbacks, before)
                rested_at = rest_until(began, clock())
                if made is not before:
                    served, before = step, made
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
        if (belief := await _looked(context, known)) is not None:
            known, heard_at = replace(known, belief=belief), clock()
        elif clock() - heard_at > SILENCE_SECONDS:
            raise SwarmError(f"nobody speaks for the job {name} any more")


async def _looked(context: Context, known: Known) -> Belief | None:
    """What to believe of the job now; None where nobody can tell for the moment."""
    try:
        return await look(context, known.record.job, manifest=known.manifest)
    except SwarmError:
        return None


async def _serve(
    context: Context, known: Known, callbacks: Callbacks, before: Prepared | None
) -> tuple[int, Prepared]:
    """Serve the newest snapshot in the place of `before`, which stays where that cannot be: the step that was tried, and what
    is served now."""
    step = known.record.snapshot_step
    try:
        with tempfile.TemporaryDirectory(prefix="fusion-serve-") as folder:
            callbacks.status(f"fetching the newest snapshot of {known.record.name}")
            step = await export_newest(context, known, Path(folder) / "model")
            made = await callbacks.hand_over(Path(folder) / "model", step)
    except (PlacementError, JobError, JobFailed, SwarmError, OSError) as error:  # a full disk, for one
        if before is None:
            raise
        callbacks.note(f"the model before stays: {error}")
        await _keep_only(context, before)
        return step, before
    if before is not None:
        await _end(context, before, callbacks)
    await _keep_only(context, made)
    return step, made


async def _keep_only(context: Context, served: Prepared) -> None:
    """The store is for what is served: whatever else is there would add up, snapshot after snapshot."""
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
        belief = await look(context, before.job, manifest=before.manifest)
        if belief is not None and not belief.over:
            await callbacks.stop(belief.record)
    except SwarmError as error:
        callbacks.note(f"the model before goes on: {error}; {left}")
        return
    callbacks.replaced(before.job)
