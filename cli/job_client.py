"""What commands ask about jobs: find one by name, follow its progress, stop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fusion.cli.client import RETRY_SECONDS
from fusion.cli.terminal.options import home_folder
from fusion.swarm.directory.job_order import ENDED, JOB_TTL_SECONDS
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.errors import FrameError, SwarmError, TransportError
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import PeerId

if TYPE_CHECKING:
    from fusion.runtime.belief.naming import Known
    from fusion.runtime.job.context import Context
    from fusion.runtime.job.manifest import Manifest
    from fusion.runtime.job.progress import Progress
    from fusion.swarm.identity import Identity

# A lead that vanished is replaced within a lease and an election; its job's record lives a little longer.
SILENCE_SECONDS = 30.0
STOP_SECONDS = 10.0
LEAD_SECONDS = 10.0  # for a job that has no lead to have one
ANSWER_SECONDS = 3.0  # for a live lead to report progress
QUIET_SECONDS = (
    30.0  # without progress before the lead is looked up again: a step may take longer, or the lead be frozen
)
ASKED_STAGES = 16  # whose owners are asked how a job ended that has no lead any more


async def find_job(context: Context, wanted: str) -> JobRecord:
    """The record that `find_known` believes."""
    return (await find_known(context, wanted)).record


async def find_led(context: Context, wanted: str) -> JobRecord:
    """As `find_job`, but waits up to LEAD_SECONDS for a lead: a job that was just launched, or whose peers have just returned, has
    none for a moment."""
    clock = asyncio.get_running_loop().time
    record, until = await find_job(context, wanted), clock() + LEAD_SECONDS
    while record.lead is None and record.state not in ENDED and clock() < until:
        await asyncio.sleep(RETRY_SECONDS)
        with suppress(ValueError):  # no record of it right now
            record = await find_job(context, wanted)
    return record


async def find_known(context: Context, wanted: str) -> Known:
    """The one job of this name (`name` or `name@author`), or whose id starts like this; looks twice, since a new client may
    know too little yet. ValueError where there is none or more than one."""
    from fusion.runtime.belief.naming import find

    records = await context.directory.job_records()
    found = await find(context, wanted, own_authors(context), records)
    if not found:
        await asyncio.sleep(RETRY_SECONDS)
        records = await context.directory.job_records()
        found = await find(context, wanted, own_authors(context), records)
    return pick(found, records, wanted)


async def find_current(context: Context, wanted: str) -> Known:
    """As `find_known`, for callers that need the newest snapshot. The claim and record of a dead lead may hide those of its
    successor, so a job that has not ended and whose lead does not answer is looked up again until they expire."""
    clock = asyncio.get_running_loop().time
    found, until = await find_known(context, wanted), clock() + JOB_TTL_SECONDS
    while not found.belief.over and clock() < until and not await _lead_answers(context, found.record):
        await asyncio.sleep(RETRY_SECONDS)
        with suppress(ValueError):  # no record of it right now
            found = await find_known(context, wanted)
    return found


async def _lead_answers(context: Context, record: JobRecord) -> bool:
    if record.lead is None:
        return False
    with suppress(SwarmError, TimeoutError):
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            aclosing(_progress(context, record.lead, record.job)) as reports,
        ):
            async for _ in reports:
                return True
    return False


def pick(found: Sequence[Known], records: Sequence[JobRecord], wanted: str) -> Known:
    """The only job in `found`. ValueError, which lists some jobs of `records`, where there is none or more than one."""
    if not found:
        known = ", ".join(sorted({job.name for job in records})[:10]) or "there are none"
        raise ValueError(f"no job is called {wanted!r} (jobs: {known})")
    if len(found) > 1:
        ids = ", ".join(each.record.job[:12] for each in found[:5])
        raise ValueError(f"{wanted!r} names {len(found)} jobs; say which: {ids}")
    return found[0]


def own_authors(context: Context) -> frozenset[PeerId]:
    """The authors whose job names need no `@author`: the key with which this user launches jobs, if there is one."""
    from fusion.runtime.peer.keys import TRAINER_FILE
    from fusion.swarm.identity import Identity

    path = context.home / TRAINER_FILE
    return frozenset({Identity.load_or_create(path).peer_id}) if path.exists() else frozenset()


def unproven(known: Known) -> str | None:
    """A warning about a job that no current or former owner of a stage vouches for; None where one does."""
    if known.belief.vouched:
        return None
    return (
        f"nobody who owns {known.record.name} vouches for what is said of it: this may be a stranger's word"
    )


async def find_model(context: Context, name: str, option: str = "--model") -> None:
    """ValueError, which lists the served models, where `name` is not served; "" is allowed where exactly one is. `option`: the
    command-line option that gave the name."""
    for last in (False, True):  # a client that has just joined may know too little yet
        served = [
            job
            for job in await context.directory.job_records()
            if job.kind == "serve" and job.state not in ENDED
        ]
        names = sorted({job.name for job in served})
        bare = name.rpartition("@")[0] or name
        if bare in names or (not name and len(names) == 1) or any(job.job == name for job in served):
            return
        if not last:
            await asyncio.sleep(RETRY_SECONDS)
    listed = ", ".join(names[:10]) or "none"
    raise ValueError(f"{option}: {name!r} is not served (models: {listed})" if name else
                     f"{option}: say which model (models: {listed})")  # fmt: skip


async def find_served(context: Context, name: str, option: str) -> tuple[JobId, Manifest]:
    """The served model of this name (`name`, `name@author` or an id), "" where all have one name. ValueError as
    `find_model`, or where it is not clear which model is meant."""
    from fusion.runtime.belief.naming import candidates, find

    await find_model(context, name, option)
    records = await context.directory.job_records()
    serving = {job.job for job in records if job.kind == "serve" and job.state not in ENDED}
    served = [job for job in records if job.job in serving]
    names = {job.name for job in served}
    if not name and len(serving) > 1 and len(names) == 1:
        (name,) = names  # a newer model in the place of another, say
    seen = (
        await find(context, name, own_authors(context), served) if name else await candidates(context, served)
    )
    live = [each for each in seen if not each.belief.over]
    if not live or (not name and len(live) > 1):
        raise ValueError(f"{option}: say which model, by its name and author or by its id")
    manifest = live[0].manifest
    if manifest is None:
        raise SwarmError(f"nobody gives us the manifest of {live[0].record.name}; try again in a moment")
    return live[0].record.job, manifest


async def watch(context: Context, job: JobId) -> AsyncIterator[Progress]:
    """The job's progress, whenever it changes, from its lead, or from a peer that knows how it ended. SwarmError once no peer has
    reported it for SILENCE_SECONDS."""
    from fusion.runtime.belief.reading import judge_by_claims, manifest_of
    from fusion.runtime.job.progress import Progress

    last_seen = time.monotonic()
    last = Progress(job=job, state="launching")
    manifest: Manifest | None = None
    while True:
        records = await context.directory.job_records(job)
        if records and manifest is None:
            manifest = await manifest_of(context, job, records)
        belief = await judge_by_claims(context, job, records, manifest)
        record = None if belief is None else belief.record
        if record is not None:  # one that is not renewed expires
            async with aclosing(_reports(context, record)) as reports:
                async for progress in reports:
                    if progress != last:
                        yield progress
                    last = progress
                    if progress.finished:
                        return
            if record.state in ENDED:
                yield replace(last, state=record.state, step=record.step, message=record.message)
                return
            # Time spent waiting for a report does not count as silence.
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen > SILENCE_SECONDS:
            raise SwarmError(f"nobody speaks for the job {job[:12]} any more")
        await asyncio.sleep(RETRY_SECONDS)


async def _reports(context: Context, record: JobRecord) -> AsyncGenerator[Progress, None]:
    """Progress of the job from each peer that can report it, one peer after the other."""
    async for peer in _peers_to_ask(context, record):
        with suppress(TransportError):  # it is gone, or the lead has moved: another peer will report
            async with aclosing(_progress(context, peer, record.job)) as reports:
                async for progress in reports:
                    yield progress


async def _peers_to_ask(context: Context, record: JobRecord) -> AsyncIterator[PeerId]:
    """Peers that can report the job's progress, best first: its lead and, once it has ended, the peers that owned its other
    stages."""
    if record.lead is not None:
        yield record.lead
    if record.state in ENDED:
        stages = range(min(record.stages, ASKED_STAGES))
        held = await asyncio.gather(*(context.directory.claims(record.job, stage) for stage in stages))
        ran = {claim.peer for claims in held for claim in claims if claim.role in ("owner", "released")}
        for peer in sorted(ran - {record.lead}):
            yield peer


async def _progress(context: Context, peer: PeerId, job: JobId) -> AsyncGenerator[Progress, None]:
    """The job's progress as the peer reports it, until the peer ends the stream or is silent. FrameError for malformed reports."""
    from fusion.runtime.job.progress import Progress
    from fusion.runtime.job.protocol import JOB
    from fusion.swarm.transport import checked

    stream, patience_seconds = await context.transport.open(peer, JOB.name), ANSWER_SECONDS
    try:
        await stream.send("watch", {"job": job})
        while True:
            try:
                async with asyncio.timeout(patience_seconds):
                    frame = checked(await stream.receive())
            except TimeoutError:
                return
            if frame.kind != "progress":
                return
            try:
                progress = Progress.from_header(frame.header)
            except ValueError as error:
                raise FrameError(
                    f"{friendly_name(peer)} says of the job what makes no sense: {error}"
                ) from None
            patience_seconds = QUIET_SECONDS
            yield progress
    finally:
        stream.abort()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a job that was asked to stop has ended: its last step, and the step of its last snapshot (-1: it has none)."""

    state: Literal["done", "stopped"]
    step: int
    saved: int


async def stop(context: Context, record: JobRecord, author: Identity, *, save: bool = False) -> Ending:
    """Ask the lead to end the job, signed with the key that launched it. `save`: take a snapshot first, which may take SAVE_SECONDS
    once the lead has announced it. SwarmError if the lead refuses or is gone."""
    from fusion.runtime.job.protocol import JOB, SAVE_SECONDS
    from fusion.swarm.authority.statements import seal_statement, stop_statement
    from fusion.swarm.transport import checked

    if record.lead is None and record.state in ENDED:
        raise SwarmError(f"the job {record.name} is {record.state} already")
    if record.lead is None:
        raise SwarmError(f"the job {record.name} has no lead yet; try again in a moment")
    statement = stop_statement(record.job, author.peer_id, time.time())
    save = save and record.kind == "train"
    header = {"job": record.job, "statement": seal_statement(statement, author.sign), "save": save}
    seconds = STOP_SECONDS
    try:
        async with asyncio.timeout(seconds) as patience:
            stream = await context.transport.open(record.lead, JOB.name)
            try:
                await stream.send("stop", header)
                answer = checked(await stream.receive())
                if answer.kind == "saving":
                    seconds += SAVE_SECONDS
                    patience.reschedule(asyncio.get_running_loop().time() + seconds)
                    answer = checked(await stream.receive())
            finally:
                stream.abort()
    except TimeoutError:
        raise SwarmError(f"the lead of {record.name} did not answer within {seconds:.0f} s") from None
    state, step = answer.header.get("state"), answer.header.get("step")
    saved = answer.header.get("snapshot_step")
    return Ending(
        state="done" if state == "done" else "stopped",
        step=step if isinstance(step, int) else record.step,
        saved=saved if isinstance(saved, int) else record.snapshot_step,
    )


def trainer_identity(home: Path) -> Identity:
    """The key that signs the jobs of this user, and alone may stop them."""
    from fusion.runtime.peer.keys import TRAINER_FILE
    from fusion.swarm.identity import Identity

    return Identity.load_or_create(home_folder(home) / TRAINER_FILE)
