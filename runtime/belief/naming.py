"""Which jobs somebody means by a name (`fusion.swarm.authority.names`): those that anybody calls so are looked into, since a
name is the manifest's and not the word of whoever speaks of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fusion.runtime.belief.reading import by_job, manifest_of, weigh
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.authority.belief import Belief
from fusion.swarm.authority.names import Named, may_mean, meant
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.transport import PeerId

LOOKS = 8  # at once
CANDIDATES = 64  # jobs that one name may mean


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


async def candidates(context: Context, words: Iterable[JobRecord]) -> tuple[Known, ...]:
    """The jobs that `words` speak of, each judged by its manifest and the claims of its stages. Raises SwarmError."""
    busy = asyncio.Semaphore(LOOKS)

    async def one(job: JobId, said: Sequence[JobRecord]) -> Known:
        async with busy:
            manifest = await manifest_of(context, job, said)
            belief = await weigh(context, job, said, manifest)
        assert belief is not None, "somebody speaks of the job"
        return Known(belief, manifest)

    return tuple(
        await asyncio.gather(*(one(job, said) for job, said in [*by_job(words).items()][:CANDIDATES]))
    )


async def find(
    context: Context, wanted: str, known: Collection[PeerId] = (), words: Iterable[JobRecord] | None = None
) -> tuple[Known, ...]:
    """The jobs that are meant by a name or the beginning of an id, best first (`fusion.swarm.authority.names`), of all that
    `words` speak of. Raises Ambiguous, SwarmError."""
    told = tuple(await context.directory.words() if words is None else words)
    jobs = {record.job for record in told if may_mean(wanted, record.name, record.job)}
    fitting = [record for record in told if record.job in jobs]
    found = {each.record.job: each for each in await candidates(context, fitting)}
    return tuple(found[each.job] for each in meant([each.named for each in found.values()], wanted, known))
