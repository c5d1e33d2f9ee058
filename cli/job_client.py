"""The questions that commands ask about jobs: which one is meant, how does it stand, please stop."""

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
ANSWER_SECONDS = 3.0  # for a lead that is there to say how its job stands
QUIET_SECONDS = 30.0  # without news of a job it is looked anew who leads it: a step may take longer, or the lead be frozen
ASKED_STAGES = 16  # whose owners are asked how a job ended whose lead is gone


async def find_job(context: Context, wanted: str) -> JobRecord:
    """As `find_known`: what to believe of the job."""
    return (await find_known(context, wanted)).record


async def find_led(context: Context, wanted: str) -> JobRecord:
    """As `find_job`, for whoever has something to say to the lead: a job that was just launched, or whose peers have just come back, has
    none for a moment."""
    clock = asyncio.get_running_loop().time
    record, until = await find_job(context, wanted), clock() + LEAD_SECONDS
    while record.lead is None and record.state not in ENDED and clock() < until:
        await asyncio.sleep(RETRY_SECONDS)
        with suppress(ValueError):  # nobody speaks of it now
            record = await find_job(context, wanted)
    return record


async def find_known(context: Context, wanted: str) -> Known:
    """The one job of this name (`name` or `name@author`), or whose id starts like this; looks twice, since a new client may
    know too little yet. ValueError where there is none or more than one."""
    from fusion.runtime.belief.naming import find

    words = await context.directory.words()
    found = await find(context, wanted, own_authors(context), words)
    if not found:
        await asyncio.sleep(RETRY_SECONDS)
        words = await context.directory.words()
        found = await find(context, wanted, own_authors(context), words)
    return pick(found, words, wanted)


async def find_current(context: Context, wanted: str) -> Known:
    """As `find_known`, for whoever needs the newest snapshot. What we see of a job may be the claim and the record of a lead that has
    died, which hide those of its successors: of one that has not ended and whose lead does not answer it is looked
    again until they have expired."""
    clock = asyncio.get_running_loop().time
    found, until = await find_known(context, wanted), clock() + JOB_TTL_SECONDS
    while not found.belief.over and clock() < until and not await _answers(context, found.record):
        await asyncio.sleep(RETRY_SECONDS)
        with suppress(ValueError):  # nobody speaks of it now
            found = await find_known(context, wanted)
    return found


async def _answers(context: Context, record: JobRecord) -> bool:
    """Whether the lead of the job says how it stands."""
    if record.lead is None:
        return False
    with suppress(SwarmError, TimeoutError):
        async with asyncio.timeout(ANSWER_SECONDS), aclosing(_ask(context, record.lead, record.job)) as told:
            async for _ in told:
                return True
    return False


def pick(found: Sequence[Known], words: Sequence[JobRecord], wanted: str) -> Known:
    """The only one. ValueError, naming jobs of `words`, where there is none or more than one."""
    if not found:
        known = ", ".join(sorted({job.name for job in words})[:10]) or "there are none"
        raise ValueError(f"no job is called {wanted!r} (jobs: {known})")
    if len(found) > 1:
        ids = ", ".join(each.record.job[:12] for each in found[:5])
        raise ValueError(f"{wanted!r} names {len(found)} jobs; say which: {ids}")
    return found[0]


def own_authors(context: Context) -> frozenset[PeerId]:
    """Whose names mean our own jobs: the key that this user launches jobs with, if there is one."""
    from fusion.runtime.peer.keys import TRAINER_FILE
    from fusion.swarm.identity import Identity

    path = context.home / TRAINER_FILE
    return frozenset({Identity.load_or_create(path).peer_id}) if path.exists() else frozenset()


def unproven(known: Known) -> str | None:
    """What a user should know of a job that nobody who owns, or owned, a part of it speaks for."""
    if known.belief.vouched:
        return None
    return (
        f"nobody who owns {known.record.name} vouches for what is said of it: this may be a stranger's word"
    )


async def find_model(context: Context, name: str, option: str = "--model") -> None:
    """ValueError, naming what is served, where `name` is not; "" is fine where one model is served. `option`: what gave the
    name."""
    for last in (False, True):  # a client that has just joined may know too little yet
        served = [
            job for job in await context.directory.words() if job.kind == "serve" and job.state not in ENDED
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
    words = await context.directory.words()
    serving = {job.job for job in words if job.kind == "serve" and job.state not in ENDED}
    told = [job for job in words if job.job in serving]
    names = {job.name for job in told}
    if not name and len(serving) > 1 and len(names) == 1:
        (name,) = names  # a newer model in the place of another, say
    seen = await find(context, name, own_authors(context), told) if name else await candidates(context, told)
    going = [each for each in seen if not each.belief.over]
    if not going or (not name and len(going) > 1):
        raise ValueError(f"{option}: say which model, by its name and author or by its id")
    manifest = going[0].manifest
    if manifest is None:
        raise SwarmError(f"nobody gives us the manifest of {going[0].record.name}; try again in a moment")
    return going[0].record.job, manifest


async def watch(context: Context, job: JobId) -> AsyncIterator[Progress]:
    """How the job stands, each time it changes, from whichever peer leads it, or can tell how it ended. SwarmError when
    nobody speaks for it any more."""
    from fusion.runtime.belief.reading import manifest_of, weigh
    from fusion.runtime.job.progress import Progress

    heard = time.monotonic()
    last = Progress(job=job, state="launching")
    manifest: Manifest | None = None
    while True:
        words = await context.directory.words(job)
        if words and manifest is None:
            manifest = await manifest_of(context, job, words)
        belief = await weigh(context, job, words, manifest)
        record = None if belief is None else belief.record
        if record is not None:  # one that nobody renews runs out
            async with aclosing(_news(context, record)) as news:
                async for progress in news:
                    if progress != last:
                        yield progress
                    last = progress
                    if progress.finished:
                        return
            if record.state in ENDED:
                yield replace(last, state=record.state, step=record.step, message=record.message)
                return
            # Waiting for news of one that has none takes its time, and is no silence.
            heard = time.monotonic()
        elif time.monotonic() - heard > SILENCE_SECONDS:
            raise SwarmError(f"nobody speaks for the job {job[:12]} any more")
        await asyncio.sleep(RETRY_SECONDS)


async def _news(context: Context, record: JobRecord) -> AsyncGenerator[Progress, None]:
    """What those say of the job who can tell, one after the other."""
    async for peer in _peers_to_ask(context, record):
        with suppress(TransportError):  # it is gone, or the lead has moved: another will tell
            async with aclosing(_ask(context, peer, record.job)) as told:
                async for progress in told:
                    yield progress


async def _peers_to_ask(context: Context, record: JobRecord) -> AsyncIterator[PeerId]:
    """Who can say how a job stands, best first: whoever leads it, and of one that has ended also those who ran its
    other stages to the end."""
    if record.lead is not None:
        yield record.lead
    if record.state in ENDED:
        stages = range(min(record.stages, ASKED_STAGES))
        held = await asyncio.gather(*(context.directory.claims(record.job, stage) for stage in stages))
        ran = {claim.peer for claims in held for claim in claims if claim.role in ("owner", "released")}
        for peer in sorted(ran - {record.lead}):
            yield peer


async def _ask(context: Context, peer: PeerId, job: JobId) -> AsyncGenerator[Progress, None]:
    """What the peer says of the job, until it has nothing more to say, or says nothing. SwarmError for nonsense."""
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
    """How a job has ended that was to stop: after which step, and of which one its last snapshot is (-1: it has none)."""

    state: Literal["done", "stopped"]
    step: int
    saved: int


async def stop(context: Context, record: JobRecord, author: Identity, *, save: bool = False) -> Ending:
    """Ask the lead to end the job, signed with the key that launched it; `save`: with a snapshot of where it is, which may take
    SAVE_SECONDS once the lead has said that it takes one. SwarmError if it refuses or is gone."""
    from fusion.runtime.job.protocol import JOB, SAVE_SECONDS
    from fusion.swarm.authority.statements import seal_statement, stop_statement
    from fusion.swarm.transport import checked

    if record.lead is None and record.state in ENDED:
        raise SwarmError(f"the job {record.name} is {record.state} already")
    if record.lead is None:
        raise SwarmError(f"the job {record.name} has no lead yet; try again in a moment")
    said = stop_statement(record.job, author.peer_id, time.time())
    save = save and record.kind == "train"
    header = {"job": record.job, "statement": seal_statement(said, author.sign), "save": save}
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
    """The key that signs what this user launches: only it may stop those jobs."""
    from fusion.runtime.peer.keys import TRAINER_FILE
    from fusion.swarm.identity import Identity

    return Identity.load_or_create(home_folder(home) / TRAINER_FILE)
