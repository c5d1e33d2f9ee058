from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run, settled

from fusion.runtime.belief.naming import CANDIDATES
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.text import NoText
from fusion.runtime.serving.answers.catalog import NAMED_SECONDS, Catalog
from fusion.runtime.serving.answers.routes import STALE_TIMES
from fusion.swarm.clock import Clock
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.errors import BlobError, SwarmError
from fusion.swarm.transport import PeerId


def test_however_many_ask_for_unknown_names_there_is_one_look_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusion.runtime.serving.answers.catalog.REFRESH_SECONDS", 0.1)

    async def main() -> None:
        looks = 0

        async def job_records() -> tuple[JobRecord, ...]:
            nonlocal looks
            looks += 1
            await asyncio.sleep(0.001)
            return ()

        context: Any = SimpleNamespace(clock=Clock(), directory=SimpleNamespace(job_records=job_records))
        catalog = Catalog(context)

        async def ask(name: str) -> None:
            for _ in range(3):
                with pytest.raises(JobError, match="the swarm serves none now"):
                    await catalog.find(name)

        began = catalog._clock()
        await asyncio.gather(*(ask(f"stranger {number}") for number in range(20)))
        assert 3 <= looks <= 2 + (catalog._clock() - began) / 0.1

    asyncio.run(main())


class _Published:
    """`count` jobs of one name, each with an author of its own, and how often each was looked into."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks: Counter[JobId] = Counter()
        self.jobs = [JobId(f"{number:064x}") for number in range(count)]
        self.given = {*self.jobs}  # whose manifests can be had
        self.under_way = 0
        clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        context: Any = SimpleNamespace(
            clock=clock, directory=SimpleNamespace(job_records=self._job_records), random=Random(7)
        )
        monkeypatch.setattr("fusion.runtime.serving.answers.catalog.REFRESH_SECONDS", 0.1)
        monkeypatch.setattr("fusion.runtime.belief.naming.manifest_of", self._manifest)
        monkeypatch.setattr("fusion.runtime.belief.naming.judge_by_claims", self._judge_by_claims)
        self.catalog = Catalog(context)
        self.catalog._model = self._model  # type: ignore[method-assign]

    async def _job_records(self) -> Any:
        return tuple(
            SimpleNamespace(job=job, kind="serve", state="running", name="n", author="launcher")
            for job in self.jobs
        )

    async def _manifest(self, context: Any, job: JobId, said: Any) -> Any:
        manifest = SimpleNamespace(name="n", author=PeerId(f"author {job}"), launched_at=0)
        return manifest if job in self.given else None

    async def _judge_by_claims(self, context: Any, job: JobId, said: Any, manifest: Any) -> Any:
        self.looks[job] += 1
        self.under_way += 1
        try:
            await asyncio.sleep(0.005)
        finally:
            self.under_way -= 1
        return SimpleNamespace(record=said[0], owned=True, over=False)

    async def _model(self, record: JobRecord) -> Any:
        return SimpleNamespace(
            job=record.job, manifest=SimpleNamespace(author=PeerId(f"author {record.job}")), text=NoText()
        )


def test_however_many_ask_for_an_ambiguous_name_its_jobs_are_looked_into_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        published = _Published(CANDIDATES, monkeypatch)
        catalog, clock = published.catalog, asyncio.get_running_loop()
        began = clock.time()

        async def ask(name: str) -> None:
            for _ in range(10):
                with pytest.raises(JobError, match="names jobs of 64 authors"):
                    await catalog.find(name)

        # A part of an author's id makes another name of the same jobs.
        await asyncio.gather(*(ask(name) for name in ("n", "n@author", "n@a", "n@au") for _ in range(5)))
        assert max(published.looks.values()) <= 2 + (clock.time() - began) / 0.1
        await catalog.aclose()

    run(main())


def test_who_asks_for_a_model_that_was_launched_a_moment_ago_gets_it_however_many_asked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        published = _Published(1, monkeypatch)
        published.given.clear()
        catalog, [job] = published.catalog, published.jobs

        async def keep_asking() -> None:
            while True:
                with suppress(JobError):
                    await catalog.find("n")
                await asyncio.sleep(0.001)

        strangers = [asyncio.create_task(keep_asking()) for _ in range(20)]
        await asyncio.sleep(0.25)
        published.given.add(job)  # just after somebody has looked, or while somebody does
        async with asyncio.timeout(5):
            assert (await catalog.find("n")).job == job
        assert published.looks[job] <= 6
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        await catalog.aclose()

    run(main())


def test_nobody_goes_on_looking_for_those_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        published = _Published(1, monkeypatch)
        gone, stays = (asyncio.create_task(published.catalog.find("n")) for _ in range(2))
        await settled()
        gone.cancel()
        await settled()
        assert published.under_way == 1 and (await stays).job == published.jobs[0]
        last = asyncio.create_task(published.catalog.find(published.jobs[0]))
        await asyncio.sleep(0.2)
        await last
        gone = asyncio.create_task(published.catalog.find(published.jobs[0][:60]))
        await settled()
        assert published.under_way == 1
        gone.cancel()
        await settled()
        assert published.under_way == 0
        assert (await published.catalog.find(published.jobs[0][:60])).job == published.jobs[0]
        await published.catalog.aclose()

    run(main())


@pytest.mark.parametrize("error", [JobError("its tokenizer cannot be read"), BlobError("nobody has it")])
def test_however_many_ask_for_a_model_that_cannot_be_loaded_it_is_tried_now_and_then(
    error: JobError | BlobError,
) -> None:
    async def main() -> None:
        context: Any = SimpleNamespace(clock=SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        catalog, tried = Catalog(context), 0

        async def load(record: JobRecord) -> Any:
            nonlocal tried
            tried += 1
            await asyncio.sleep(0.1)
            raise type(error)(str(error))

        catalog._loader._load = load  # type: ignore[method-assign]
        record: Any = SimpleNamespace(job=JobId("0" * 64))

        async def ask() -> None:
            with pytest.raises(type(error), match=str(error)):
                await catalog._model(record)

        await asyncio.gather(*(ask() for _ in range(20)))
        for _ in range(20):
            await ask()
        assert tried == 1
        await asyncio.sleep(1.0)
        await ask()
        # Whether a blob can be had may change; what is in it does not.
        assert tried == (1 if isinstance(error, JobError) else 2)
        await catalog.aclose()

    run(main())


def test_a_name_means_what_it_did_while_we_look_again() -> None:
    async def main() -> None:
        now, meant, fails = [100.0], ["one"], [False]
        open_, looks = asyncio.Event(), [0]
        open_.set()
        catalog = Catalog(SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: now[0])))  # type: ignore[arg-type]

        async def choose(name: str) -> Any:
            looks[0] += 1
            await open_.wait()
            if fails[0]:
                raise SwarmError("no answer")
            return meant[0]

        async def model(job: str) -> Any:
            return SimpleNamespace(
                job=JobId(job), manifest=SimpleNamespace(author=PeerId("a")), text=NoText()
            )

        async def held(model: Any) -> bool:
            return True

        catalog._choose, catalog._model, catalog.routes.is_held = choose, model, held  # type: ignore[method-assign]

        async def found() -> str:
            return str((await catalog.find("name")).job)

        assert await found() == "one"
        meant[0] = "two"
        now[0] += NAMED_SECONDS - 1
        assert await found() == "one" and looks == [1]
        now[0] += 2
        open_.clear()
        assert [await found() for _ in range(3)] == ["one"] * 3
        await settled()
        assert looks == [2], "one look for all"
        open_.set()
        await settled()
        assert await found() == "two" and looks == [2]
        meant[0] = "three"
        now[0] += STALE_TIMES * NAMED_SECONDS
        assert await found() == "three", "what was meant is too old"
        fails[0] = True
        now[0] += NAMED_SECONDS
        assert await found() == "three"
        await settled()
        assert await found() == "three", "a session will tell"
        await catalog.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["n", ""])
def test_a_model_in_the_place_of_another_needs_no_name_either(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        published = _Published(2, monkeypatch)

        async def manifest(context: Any, job: JobId, said: Any) -> Any:
            return SimpleNamespace(name="n", author=PeerId("a"), launched_at=published.jobs.index(job))

        monkeypatch.setattr("fusion.runtime.belief.naming.manifest_of", manifest)
        assert (await published.catalog.find(name)).job == published.jobs[1], "the newer one"
        await published.catalog.aclose()

    asyncio.run(main())


def test_models_of_two_authors_need_to_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        published = _Published(2, monkeypatch)
        with pytest.raises(JobError, match="names jobs of 2 authors; say which"):
            await published.catalog.find("")
        await published.catalog.aclose()

    asyncio.run(main())


def test_a_list_of_all_models_keeps_those_that_it_had_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        published = _Published(2 * CANDIDATES, monkeypatch)
        catalog = published.catalog
        honest = {*published.jobs}
        strangers = [JobId(f"{number:063x}-") for number in range(3 * CANDIDATES)]
        shown = list[int]()
        for _ in range(2):
            await asyncio.sleep(60.0)
            shown.append(len(await catalog.served()))
        published.jobs = [*strangers, *published.jobs]
        await asyncio.sleep(60.0)
        found = {each.record.job for each in await catalog.served() if each.manifest is not None}
        assert shown == [CANDIDATES, 2 * CANDIDATES] and found == honest
        await catalog.aclose()

    run(main())
