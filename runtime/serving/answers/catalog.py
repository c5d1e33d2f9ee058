"""Which models the swarm serves: a cache of the directory at a gateway. Which peers run their stages is in
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
from fusion.runtime.serving.answers.routes import STALE_TIMES, Routes
from fusion.runtime.serving.answers.served_model import ModelLoader, ServedModel
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.errors import NotAdmitted, SwarmError
from fusion.swarm.transport import MAX_ASK, PeerId

__all__ = ["Catalog", "ServedModel"]

MAX_NAMES = 1024  # names that clients used
MAX_MODELS = 64  # whose manifests and tokenizers are kept in memory
MAX_MODEL_BYTES = 4 << 30  # that the tokenizers may take; one alone takes less
MAX_LISTED = 256  # models that stay listed however many jobs others publish
# Least time between two reads of all jobs, or of one, where no peer is known to serve the name: strangers may request any name.
REFRESH_SECONDS = 0.5
NAMED_SECONDS = 15.0  # for which a name stays resolved without another read
LIVE = frozenset({"launching", "running"})


class Catalog:
    """Served models by name, and their `routes`. `fresh_seconds`: for how long records are used before they are read again;
    `own_sessions` as in `Routes`."""

    def __init__(
        self,
        context: Context,
        own_sessions: Callable[[JobId], Mapping[tuple[int, PeerId], int]] = lambda job: {},
        *,
        fresh_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._context = context
        # If a stage has lost its owner, the author may serve another model under the name.
        self.routes = Routes(context, own_sessions, self._forget_names, fresh_seconds=fresh_seconds)
        self._fresh_seconds = fresh_seconds
        self._clock = context.clock.monotonic
        self._models: FIFOCache[JobId, ServedModel] = FIFOCache(MAX_MODEL_BYTES, _share)
        self._jobs: tuple[float, tuple[JobRecord, ...]] = (float("-inf"), ())  # and when their read began
        self._reading = asyncio.Lock()
        self._judging = SharedInspections(context, REFRESH_SECONDS)
        self._loader = ModelLoader(context, self.check_admitted, REFRESH_SECONDS)
        self._resolved: FIFOCache[str, tuple[JobId, float]] = FIFOCache(MAX_NAMES)  # and when it was resolved
        self._resolving: dict[str, asyncio.Task[ServedModel]] = {}
        self._authors: FIFOCache[str, PeerId] = FIFOCache(MAX_NAMES)  # whose model a name resolved to
        self._listed: LRUCache[JobId, None] = LRUCache(MAX_LISTED)  # served when all were last listed

    async def aclose(self) -> None:
        for task in self._resolving.values():
            task.cancel()
        await asyncio.gather(
            *self._resolving.values(),
            self._judging.aclose(),
            self._loader.aclose(),
            self.routes.aclose(),
            return_exceptions=True,
        )

    async def find(self, name: str) -> ServedModel:
        """The model served under `name` (or `name@author`, or with that job id); "" where only one name is served. A name stays with
        the author that it first resolved to, as long as that author serves it: a later author cannot take it over. A newer model of
        the same author replaces the older one once all of its stages are held and loaded. Stale entries are used while they are
        resolved again, as with routes.

        JobError names what the swarm does serve, or which models have that name; BlobError where no peer has the model's manifest
        or tokenizer."""
        job, looked = self._resolved.get(name, (None, 0.0))
        before = None if job is None else self._models.get(job)
        age = self._clock() - looked
        if before is not None and age < NAMED_SECONDS:
            return before
        if before is None:  # strangers may request any name: the search must end with the request
            return await self._resolve(name, None)
        if (resolving := self._resolving.get(name)) is None:
            resolving = self._resolving[name] = asyncio.create_task(self._resolve(name, before))
            resolving.add_done_callback(partial(self._resolution_done, name))
        if age < STALE_TIMES * NAMED_SECONDS:
            return before
        return await asyncio.shield(resolving)

    def _resolution_done(self, name: str, resolving: asyncio.Task[ServedModel]) -> None:
        self._resolving.pop(name, None)
        if not resolving.cancelled():
            resolving.exception()  # raised to those that wait for it

    async def _resolve(self, name: str, before: ServedModel | None) -> ServedModel:
        try:
            model = await self._model(await self._choose(name))
            if before is not None and model.job != before.job and not await self.routes.is_held(model):
                model = before
        except (JobError, SwarmError):
            if before is None:
                raise
            model = before  # a session will find out whether it has ended
        self._models[model.job] = model
        self._resolved[name] = model.job, self._clock()
        self._authors[name] = model.manifest.author
        return model

    async def _model(self, record: JobRecord) -> ServedModel:
        model = self._models.get(record.job)
        return await self._loader.load(record) if model is None else model

    async def served(self) -> tuple[Known, ...]:
        """The models that the swarm serves now, as far as this peer knows. Raises SwarmError."""
        records, judgements = await self._served(), self._judging.since()
        seen = await candidates(self._context, records, judgements, known=frozenset(self._listed))
        going = tuple(each for each in seen if not each.belief.over)
        # A peer that publishes thousands of jobs must not crowd these out.
        self._listed.update((each.record.job, None) for each in going if each.manifest is not None)
        return going

    async def check_client(self, model: ServedModel, client: PeerId, grants: tuple[bytes, ...]) -> None:
        """NotAdmitted where the client, with these grants, may not prompt the model; and as `check_admitted`."""
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
        requested_at = self._clock()
        served = await self._served()
        models = await self._named(served, name)
        if not models:  # it may have been launched since the last read
            served = await self._served(requested_at)
            models = await self._named(served, name, requested_at)
        if not models:
            raise JobError(_unknown(served, name))
        return models[0].record

    async def _named(self, served: Sequence[JobRecord], name: str, since: float = -math.inf) -> list[Known]:
        """The models that the name may resolve to, best first, by records read at `since` or later."""
        judgements = self._judging.since(since)
        authors = {self._authors[name]} if name in self._authors else set()
        if not name:
            if len({record.name for record in served}) != 1 and not authors:
                return []
            seen = await candidates(self._context, served, judgements)
            going = [each for each in seen if not each.belief.over]
            going = [each for each in going if not authors or each.named.author in authors]
            if len(going) == 1:
                return going
            names = {each.named.name for each in going}
            if len(names) != 1:
                return []
            (name,) = names  # of the same name, such as an older and a newer one
        try:
            models = await find(self._context, name, authors, served, judgements)
        except ValueError as error:
            raise JobError(f"model: {error}") from None
        return [each for each in models if not each.belief.over]

    def _forget_names(self, job: JobId) -> None:
        """Resolve the names of this model again."""
        for name in [name for name, (resolved, _) in self._resolved.items() if resolved == job]:
            del self._resolved[name]

    async def _served(self, since: float = -math.inf) -> tuple[JobRecord, ...]:
        """All records of jobs that are reported to serve, by a read that began at `since` or later. One read at a time, however many
        callers, and REFRESH_SECONDS between them."""

        def known() -> bool:
            return self._clock() - self._jobs[0] < self._fresh_seconds and self._jobs[0] >= since

        if known():
            return self._jobs[1]
        async with self._reading:
            if not known():  # no other caller has read them meanwhile
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
    """Bytes that a model takes of the memory for models."""
    return max(model.text.memory_bytes, MAX_MODEL_BYTES // MAX_MODELS)
