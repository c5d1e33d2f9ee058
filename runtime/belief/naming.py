"""Which jobs somebody means by a name (`fusion.swarm.authority.names`): those that anybody calls so are looked into, since a
name is the manifest's and not the word of whoever speaks of the job."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from fusion.runtime.belief.reading import by_job, in_turn, manifest_of, weigh
from fusion.runtime.belief.shared_work import SharedWork
from fusion.runtime.device.accounts import launches_of
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.authority.belief import Belief
from fusion.swarm.authority.names import Named, may_mean, meant
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.transport import PeerId

LOOKS = 8  # at once
CANDIDATES = 64  # jobs that one name may mean
CHECKS = 256  # signatures of who is meant, of which strangers may show false ones, for one name


@dataclass(frozen=True)
class Known:
    """A job as this reader sees it; `manifest` None where nobody gave it to us."""

    belief: Belief
    manifest: Manifest | None

    @property
    def record(self) -> JobRecord:
        return self.belief.record

    @property
    def named(self) -> Named:
        made = self.manifest
        return Named(
            job=self.record.job,
            name=self.record.name if made is None else made.name,
            author=None if made is None else made.author,
            owned=self.belief.owned,
            launched_at=0 if made is None else made.launched_at,
        )


async def look_into(context: Context, job: JobId, said: Sequence[JobRecord]) -> Known:
    """The job that `said` speaks of, judged by its manifest and the claims of its stages. Raises SwarmError."""
    manifest = await manifest_of(context, job, said)
    belief = await weigh(context, job, said, manifest)
    assert belief is not None, "somebody speaks of the job"
    return Known(belief, manifest)


Look = Callable[[JobId, Sequence[JobRecord]], Awaitable[Known]]


class SharedLooks:
    """`look_into` for many that ask: strangers may ask for any name, and publish jobs of that name."""

    def __init__(self, context: Context, pause_seconds: float) -> None:
        self._context = context
        self._looks: SharedWork[JobId, Known] = SharedWork(context.clock.monotonic, pause_seconds)

    async def aclose(self) -> None:
        await self._looks.aclose()

    def since(self, moment: float = -math.inf) -> Look:
        """By looks that began then or later."""

        async def look(job: JobId, said: Sequence[JobRecord]) -> Known:
            return await self._looks.get(job, lambda: look_into(self._context, job, said), moment)

        return look


async def candidates(
    context: Context,
    records: Iterable[JobRecord],
    look: Look | None = None,
    known: Collection[JobId] = (),
) -> tuple[Known, ...]:
    """The jobs that `records` speak of, in the order of their ids, as `look` or else `look_into` judges each. Of more than
    CANDIDATES those of `known`, and so many others, one of everybody who speaks of some in turn. Raises SwarmError."""
    records = tuple(records)
    said = by_job(records)
    if len(said) > CANDIDATES:
        turns = dict.fromkeys(record.job for record in in_turn(context.random, records))
        others = (job for job in turns if job not in known)
        chosen = {*known, *islice(others, CANDIDATES)}
        said = {job: of_job for job, of_job in said.items() if job in chosen}
    busy = asyncio.Semaphore(LOOKS)

    async def one(job: JobId, said: Sequence[JobRecord]) -> Known:
        async with busy:
            return await (look_into(context, job, said) if look is None else look(job, said))

    return tuple(await asyncio.gather(*(one(job, of_job) for job, of_job in said.items())))


async def find(
    context: Context,
    wanted: str,
    known: Collection[PeerId] = (),
    records: Iterable[JobRecord] | None = None,
    look: Look | None = None,
) -> tuple[Known, ...]:
    """The jobs that are meant by a name or the beginning of an id, best first (`fusion.swarm.authority.names`), of all that
    `records` speak of, as `look` or else `look_into` judges each. Raises Ambiguous, SwarmError."""
    records = tuple(await context.directory.job_records() if records is None else records)
    jobs = {record.job for record in records if may_mean(wanted, record.name, record.job)}
    if len(jobs) > CANDIDATES:
        said = by_job(record for record in records if record.job in jobs)
        jobs = set(_likely(context, said, wanted, known)[:CANDIDATES])
    fitting = [record for record in records if record.job in jobs]
    found = {each.record.job: each for each in await candidates(context, fitting, look)}
    return tuple(found[each.job] for each in meant([each.named for each in found.values()], wanted, known))


def _likely(
    context: Context, said: Mapping[JobId, Sequence[JobRecord]], wanted: str, known: Collection[PeerId]
) -> list[JobId]:
    """These jobs, those first that an author launched whom `wanted` names or the reader knows, in each class one of everybody who
    speaks of some in turn: a stranger may call any number of jobs so, and chooses how their ids begin."""
    name, _, author = wanted.rpartition("@")
    turns = in_turn(context.random, (record for of_job in said.values() for record in of_job))
    checks = 0

    def is_meant(peer: PeerId) -> bool:
        return peer in known or bool(name and author and peer.startswith(author))

    def is_checked(signer: PeerId) -> bool:
        nonlocal checks
        checks += is_meant(signer)
        return is_meant(signer) and checks <= CHECKS

    first = [
        record.job
        for record in turns
        if is_meant(record.author) or launches_of(record, context.directory.verify, is_checked)
    ]
    return list(dict.fromkeys([*first, *(record.job for record in turns)]))
