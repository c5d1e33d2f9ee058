"""Which models the swarm serves, as a gateway sees it: the directory, remembered briefly. Who runs their stages is in
`fusion.runtime.serving.answers.routes`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cachetools import FIFOCache, LRUCache

from fusion.runtime.belief.naming import Known, SharedInspections, candidates, find
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.serving.answers.routes import SEEN_TIMES, Routes
from fusion.runtime.serving.answers.served_model import ModelLoader, ServedModel
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.errors import NotAdmitted, SwarmError
from fusion.swarm.transport import MAX_ASK, PeerId

__all__ = ["Catalog", "ServedModel"]

MAX_NAMES = 1024  # by which models were asked for
MAX_MODELS = 64  # whose manifests and tokenizers are kept in memory
MAX_MODEL_BYTES = 4 << 30  # that the tokenizers may take; one alone takes less
MAX_LISTED = 256  # models that a list shows whatever else is spoken of
# From one look at all jobs, or at one, to the next, where nobody is known to serve what is asked for: strangers may ask for any name.
REFRESH_SECONDS = 0.5
NAMED_SECONDS = 15.0  # for which a name means the same model without another look
LIVE = frozenset({"launching", "running"})


class Catalog:
    """Served models by name, and their `routes`. `fresh_seconds`: for how long a look into the directory is believed; `ours` as in
    `Routes`."""

    def __init__(
        self,
        context: Context,
        ours: Callable[[JobId], Mapping[tuple[int, PeerId], int]] = lambda job: {},
        *,
        fresh_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._context = context
        # Where a stage has no owner any more, the author may serve another model under the name.
        self.routes = Routes(context, ours, self._forget_names, fresh_seconds=fresh_seconds)
        self._fresh_seconds = fresh_seconds
        self._clock = context.clock.monotonic
        self._models: FIFOCache[JobId, ServedModel] = FIFOCache(MAX_MODEL_BYTES, _share)
        self._jobs: tuple[float, tuple[JobRecord, ...]] = (float("-inf"), ())  # and when we began to look
        self._reading = asyncio.Lock()
        self._judging = SharedInspections(context, REFRESH_SECONDS)
        self._loader = ModelLoader(context, self.check_admitted, REFRESH_SECONDS)
        self._meant: FIFOCache[str, tuple[JobId, float]] = FIFOCache(MAX_NAMES)  # and when we looked
        self._finding: dict[str, asyncio.Task[ServedModel]] = {}
        self._authors: FIFOCache[str, PeerId] = FIFOCache(MAX_NAMES)  # whose model a name meant
        self._listed: LRUCache[JobId, None] = LRUCache(MAX_LISTED)  # that were served when all were asked for

    async def aclose(self) -> None:
        for task in self._finding.values():
            task.cancel()
        await asyncio.gather(
            *self._finding.values(),
            self._judging.aclose(),
            self._loader.aclose(),
            self.routes.aclose(),
            return_exceptions=True,
        )

    async def find(self, name: str) -> ServedModel:
        """The model served under `name` (or `name@author`, or with that job id); "" where all that are served have one. A name means
        the model of the author that it meant first, as long as that is served: who uses the name later takes nobody over.
        A newer model that the author serves under the name is meant once all of its stages are held and loaded. As with routes, a
        name means what it did while we look again.
        JobError names what the swarm does serve, or which models have that name; BlobError where nobody has the model's
        manifest or tokenizer."""
        job, looked = self._meant.get(name, (None, 0.0))
        before = None if job is None else self._models.get(job)
        age = self._clock() - looked
        if before is not None and age < NAMED_SECONDS:
            return before
        if before is None:  # strangers may ask for any name: nobody looks for it when they are gone
            return await self._find_anew(name, None)
        if (finding := self._finding.get(name)) is None:
            finding = self._finding[name] = asyncio.create_task(self._find_anew(name, before))
            finding.add_done_callback(partial(self._found, name))
        if age < SEEN_TIMES * NAMED_SECONDS:
            return before
        return await asyncio.shield(finding)

    def _found(self, name: str, finding: asyncio.Task[ServedModel]) -> None:
        self._finding.pop(name, None)
        if not finding.cancelled():
            finding.exception()  # whoever waits for it has it

    async def _find_anew(self, name: str, before: ServedModel | None) -> ServedModel:
        try:
            found = await self._model(await self._choose(name))
            if before is not None and found.job != before.job and not await self.routes.is_held(found):
                found = before
        except (JobError, SwarmError):
            if before is None:
                raise
            found = before  # a session will tell whether it has ended
        self._models[found.job] = found
        self._meant[name] = found.job, self._clock()
        self._authors[name] = found.manifest.author
        return found

    async def _model(self, record: JobRecord) -> ServedModel:
        found = self._models.get(record.job)
        return await self._loader.load(record) if found is None else found

    async def served(self) -> tuple[Known, ...]:
        """What the swarm serves now, as far as it is known here. Raises SwarmError."""
        records, look = await self._served(), self._judging.since()
        seen = await candidates(self._context, records, look, known=frozenset(self._listed))
        going = tuple(each for each in seen if not each.belief.over)
        # Whoever speaks of thousands of jobs keeps none of these out.
        self._listed.update((each.record.job, None) for each in going if each.manifest is not None)
        return going

    async def check_asker(self, model: ServedModel, client: PeerId, grants: tuple[bytes, ...]) -> None:
        """NotAdmitted where the client, with what it shows, may not prompt the model; and as `check_admitted`."""
        access = self._context.access
        if client != self._context.peer_id or grants:
            refused = access.refusal(model.job, client, "ask", None, grants)
            if refused is not None:
                raise NotAdmitted(f"model: {model.manifest.name} is not for everybody: {refused}", model.job)
        await self.check_admitted(model.job, model.manifest)

    async def check_admitted(self, job: JobId, manifest: Manifest) -> None:
        """NotAdmitted, naming peers that own stages, where this peer may not prompt the model."""
        access = self._context.access
        refused = access.refusal(job, self._context.peer_id, "ask", None, access.chain(job))
        if refused is not None:
            stages = range(min(manifest.stages, MAX_ASK))
            owners = await asyncio.gather(*(self._context.leases.owner(job, stage) for stage in stages))
            named = tuple(dict.fromkeys(owner.peer for owner in owners if owner is not None))
            message = f"model: the peer that was asked may not prompt {manifest.name}: {refused}"
            raise NotAdmitted(message, job, named)

    async def _choose(self, name: str) -> JobRecord:
        asked = self._clock()
        served = await self._served()
        found = await self._named(served, name)
        if not found:  # it may have been launched since the last look
            served = await self._served(asked)
            found = await self._named(served, name, asked)
        if not found:
            raise JobError(_unknown(served, name))
        return found[0].record

    async def _named(self, served: Sequence[JobRecord], name: str, since: float = -math.inf) -> list[Known]:
        """The models that are meant, best first, as they were at `since` or later."""
        look = self._judging.since(since)
        authors = {self._authors[name]} if name in self._authors else set()
        if not name:
            if len({record.name for record in served}) != 1 and not authors:
                return []
            seen = await candidates(self._context, served, look)
            going = [each for each in seen if not each.belief.over]
            going = [each for each in going if not authors or each.named.author in authors]
            if len(going) == 1:
                return going
            names = {each.named.name for each in going}
            if len(names) != 1:
                return []
            (name,) = names  # a newer one in the place of another, say
        try:
            found = await find(self._context, name, authors, served, look)
        except ValueError as error:
            raise JobError(f"model: {error}") from None
        return [each for each in found if not each.belief.over]

    def _forget_names(self, job: JobId) -> None:
        """What was meant by a name is looked for anew."""
        for name in [name for name, (meant, _) in self._meant.items() if meant == job]:
            del self._meant[name]

    async def _served(self, since: float = -math.inf) -> tuple[JobRecord, ...]:
        """All that is said of jobs of which somebody says that they serve, by a look that began at `since` or later. However many
        ask, one at a time is under way, and there are REFRESH_SECONDS from one to the next."""

        def known() -> bool:
            return self._clock() - self._jobs[0] < self._fresh_seconds and self._jobs[0] >= since

        if known():
            return self._jobs[1]
        async with self._reading:
            if not known():  # nobody has looked meanwhile
                await asyncio.sleep(max(0.0, self._jobs[0] + REFRESH_SECONDS - self._clock()))
                began = self._clock()
                records = await self._context.directory.job_records()
                serving = {r.job for r in records if r.kind == "serve" and r.state in LIVE}
                self._jobs = (began, tuple(r for r in records if r.job in serving))
            return self._jobs[1]


def _unknown(records: Sequence[JobRecord], name: str) -> str:
    names = ", ".join(sorted({r.name for r in records})[:20])
    if not names:
        return "model: the swarm serves none now"
    return f"model: {'choose one' if not name else f'nobody serves {name[:100]!r}'}; there are: {names}"


def _share(model: ServedModel) -> int:
    """Of the memory for models."""
    return max(model.text.memory_bytes, MAX_MODEL_BYTES // MAX_MODELS)
