from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.runtime.belief.naming import CANDIDATES
from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.answers.catalog import (
    LINKED_SECONDS,
    MAX_LOOKS,
    NAMED_SECONDS,
    SEEN_TIMES,
    Catalog,
)
from fusion.swarm.claims.leases import Leases
from fusion.swarm.clock import Clock
from fusion.swarm.directory.records import ClaimRecord, JobId, JobRecord
from fusion.swarm.errors import BlobError, SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.transport import PeerId


def nobody(job: JobId, stage: int) -> None:
    """Nobody claims a stage without a right to it."""


def test_a_gateway_remembers_the_holders_of_so_many_models_and_no_more() -> None:
    async def main() -> None:
        async def claims_of(job: JobId, stages: range) -> tuple[tuple[ClaimRecord, ...], ...]:
            held = ClaimRecord(
                job=job, stage=0, peer=PeerId("p"), role="owner", term=1, score=1.0, step=0, load=0.0, ready=True
            )  # fmt: skip
            return ((held,),)

        context: Any = SimpleNamespace(
            clock=Clock(), leases=SimpleNamespace(claims_of=claims_of, behind=nobody)
        )
        catalog = Catalog(context)
        for number in range(3 * MAX_LOOKS):
            model: Any = SimpleNamespace(
                job=JobId(f"{number:064x}"), manifest=SimpleNamespace(name="m", stages=1)
            )
            await catalog._look(model)
        assert len(catalog._looks) == MAX_LOOKS
        assert catalog.newer(JobId(f"{number:064x}"), 0, SimpleNamespace(term=0)) is not None  # type: ignore[arg-type]

    asyncio.run(main())


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_however_many_ask_for_unknown_names_there_is_one_look_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusion.runtime.serving.answers.catalog.REFRESH_SECONDS", 0.1)

    async def main() -> None:
        looks = 0

        async def words() -> tuple[JobRecord, ...]:
            nonlocal looks
            looks += 1
            await asyncio.sleep(0.001)
            return ()

        context: Any = SimpleNamespace(clock=Clock(), directory=SimpleNamespace(words=words))
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
            clock=clock, directory=SimpleNamespace(words=self._words), random=Random(7)
        )
        monkeypatch.setattr("fusion.runtime.serving.answers.catalog.REFRESH_SECONDS", 0.1)
        monkeypatch.setattr("fusion.runtime.belief.naming.manifest_of", self._manifest)
        monkeypatch.setattr("fusion.runtime.belief.naming.weigh", self._weigh)
        self.catalog = Catalog(context)
        self.catalog._model = self._model  # type: ignore[method-assign]

    async def _words(self) -> Any:
        return tuple(
            SimpleNamespace(job=job, kind="serve", state="running", name="n", author="launcher")
            for job in self.jobs
        )

    async def _manifest(self, context: Any, job: JobId, said: Any) -> Any:
        manifest = SimpleNamespace(name="n", author=PeerId(f"author {job}"), launched_at=0)
        return manifest if job in self.given else None

    async def _weigh(self, context: Any, job: JobId, said: Any, manifest: Any) -> Any:
        self.looks[job] += 1
        self.under_way += 1
        try:
            await asyncio.sleep(0.005)
        finally:
            self.under_way -= 1
        return SimpleNamespace(record=said[0], owned=True, over=False)

    async def _model(self, record: JobRecord) -> Any:
        return SimpleNamespace(
            job=record.job, manifest=SimpleNamespace(author=PeerId(f"author {record.job}"))
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


class _Directory:
    """Of one model with one stage. `peer` owns it; who asks waits for `open`."""

    def __init__(self) -> None:
        self.peer, self.reads = "one", 0
        self.open = asyncio.Event()
        self.open.set()

    async def claims_of(self, job: JobId, stages: range) -> tuple[tuple[ClaimRecord, ...], ...]:
        self.reads += 1
        peer = PeerId(self.peer)
        await self.open.wait()
        owned = ClaimRecord(
            job=job, stage=0, peer=peer, role="owner", term=1, score=1.0, step=0, load=0.0, ready=True
        )
        return ((owned,),)

    def behind(self, job: JobId, stage: int) -> None:
        """Nobody."""


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


def test_a_session_begins_by_what_was_seen_last_while_we_look_again() -> None:
    async def main() -> None:
        directory, now = _Directory(), [100.0]
        clock = SimpleNamespace(monotonic=lambda: now[0])
        context: Any = SimpleNamespace(clock=clock, leases=directory)
        catalog = Catalog(context, fresh_seconds=2.0)
        model: Any = SimpleNamespace(job=JobId("0" * 64), manifest=SimpleNamespace(name="m", stages=1))

        async def owner() -> str:
            look = await catalog._look(model)
            return str(look.stages[0][0].peer)

        assert await owner() == "one" and directory.reads == 1
        directory.peer = "two"
        now[0] += 1.0
        assert await owner() == "one" and directory.reads == 1, "it is fresh"
        now[0] += 2.0
        directory.open.clear()
        assert [await owner() for _ in range(3)] == ["one"] * 3
        await settled()
        assert directory.reads == 2, "one look for all"
        directory.open.set()
        await settled()
        assert await owner() == "two" and directory.reads == 2
        directory.peer = "three"
        now[0] += 2.0 * SEEN_TIMES
        assert await owner() == "three", "what was seen is too old"

        # What is learned while we look is newer than what the directory says then.
        now[0] += 3.0
        directory.peer = "four"
        directory.open.clear()
        assert await owner() == "three"
        await settled()
        catalog.forget_route(model.job)
        directory.peer = "five"
        directory.open.set()
        await settled()
        assert await owner() == "five"
        await catalog.aclose()

    asyncio.run(main())


def test_a_gateway_that_went_by_a_rival_finds_the_owner_that_the_rival_gave_way_to() -> None:
    """It saw the higher of two claims for a moment; the lower one is void for it from then on."""

    async def main() -> None:
        clock, network = ManualClock(), MemoryNetwork()
        identities = [Identity.generate() for _ in range(3)]
        owner, rival, reader = (MemoryDirectory(network, each, clock) for each in identities)
        leases = Leases(identities[2].peer_id, reader)
        job = JobId("0" * 64)
        claim = ClaimRecord(
            job=job, stage=0, peer=identities[0].peer_id, role="owner", term=11, score=1.0, step=0, load=0.0, ready=True
        )  # fmt: skip
        higher = replace(claim, peer=identities[1].peer_id, term=12)
        await rival.publish(higher)
        ((read,),) = await leases.claims_of(job, [0])
        assert (read.peer, read.term) == (higher.peer, 12)
        await rival.publish(replace(higher, role="standby"))
        await owner.publish(claim)
        context: Any = SimpleNamespace(clock=Clock(), leases=leases)
        model: Any = SimpleNamespace(job=job, manifest=SimpleNamespace(name="m", stages=1))
        look = await Catalog(context)._look(model)
        assert [held.peer for held in look.stages[0]] == [identities[0].peer_id]

    asyncio.run(main())


def test_no_look_outlives_the_catalog() -> None:
    async def main() -> None:
        directory = _Directory()
        directory.open.clear()
        catalog = Catalog(SimpleNamespace(clock=Clock(), leases=directory))  # type: ignore[arg-type]
        model: Any = SimpleNamespace(job=JobId("0" * 64), manifest=SimpleNamespace(name="m", stages=1))
        waiting = []
        for _ in range(2):
            waiting.append(asyncio.create_task(catalog._look(model)))
            await settled()
            catalog.forget_route(model.job)  # and look anew
        await catalog.aclose()
        await asyncio.wait(waiting, timeout=5)
        assert all(each.cancelled() for each in waiting) and not catalog._forgotten
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_where_a_look_fails_the_next_session_waits_for_its_own() -> None:
    async def main() -> None:
        now, fails = [100.0], [False]
        directory = _Directory()

        async def claims_of(job: JobId, stages: range) -> tuple[tuple[ClaimRecord, ...], ...]:
            if fails[0]:
                raise SwarmError("no answer")
            return await directory.claims_of(job, stages)

        context: Any = SimpleNamespace(
            clock=SimpleNamespace(monotonic=lambda: now[0]),
            leases=SimpleNamespace(claims_of=claims_of, behind=nobody),
        )
        catalog = Catalog(context, fresh_seconds=2.0)
        model: Any = SimpleNamespace(job=JobId("0" * 64), manifest=SimpleNamespace(name="m", stages=1))
        await catalog._look(model)
        now[0] += 3.0
        fails[0] = True
        await catalog._look(model)
        await settled()
        with pytest.raises(SwarmError):
            await catalog._look(model)

    asyncio.run(main())


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
            return SimpleNamespace(job=JobId(job), manifest=SimpleNamespace(author=PeerId("a")))

        async def held(model: Any) -> bool:
            return True

        catalog._choose, catalog._model, catalog._is_held = choose, model, held  # type: ignore[method-assign]

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
        now[0] += SEEN_TIMES * NAMED_SECONDS
        assert await found() == "three", "what was meant is too old"
        fails[0] = True
        now[0] += NAMED_SECONDS
        assert await found() == "three"
        await settled()
        assert await found() == "three", "a session will tell"
        await catalog.aclose()

    asyncio.run(main())


def test_a_session_begins_by_what_was_known_of_links_and_a_move_does_not() -> None:
    async def main() -> None:
        now, reads, fails = [100.0], [0], [False]
        open_ = asyncio.Event()
        open_.set()

        async def refresh(max_age_seconds: float) -> None:
            await open_.wait()
            reads[0] += 1
            if fails[0]:
                raise SwarmError("no answer")

        links = SimpleNamespace(refresh=refresh, snapshot=lambda: reads[0])
        clock = SimpleNamespace(monotonic=lambda: now[0])
        catalog = Catalog(SimpleNamespace(clock=clock, links=links), fresh_seconds=2.0)  # type: ignore[arg-type]
        choice: Any = [["one", "two"]]

        async def known(seconds: float) -> Any:
            return await asyncio.wait_for(catalog._links(choice, seconds), 5)

        assert await known(LINKED_SECONDS) == 1, "nothing was known"
        now[0] += 1.0
        assert await known(2.0) == 1, "it is fresh"
        now[0] += 2.0
        open_.clear()
        assert [await known(LINKED_SECONDS) for _ in range(3)] == [1] * 3
        open_.set()
        await settled()
        assert reads == [2] and await known(LINKED_SECONDS) == 2
        now[0] += 3.0
        assert await known(2.0) == 3, "a move waits"
        fails[0] = True
        now[0] += LINKED_SECONDS
        assert await known(LINKED_SECONDS) == 4, "as good as is known"
        assert catalog._linking is None
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
