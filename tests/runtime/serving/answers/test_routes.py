from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import settled

from fusion.runtime.serving.answers.routes import LINKED_SECONDS, MAX_LOOKS, STALE_TIMES, Routes
from fusion.swarm.claims.leases import Leases
from fusion.swarm.clock import Clock
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import SwarmError
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
            clock=Clock(), leases=SimpleNamespace(claims_of=claims_of, stale_claim=nobody)
        )
        routes = Routes(context)
        for number in range(3 * MAX_LOOKS):
            model: Any = SimpleNamespace(
                job=JobId(f"{number:064x}"), manifest=SimpleNamespace(name="m", stages=1)
            )
            await routes._claims_of(model)
        assert len(routes._cached_claims) == MAX_LOOKS
        assert routes.newer(JobId(f"{number:064x}"), 0, SimpleNamespace(term=0)) is not None  # type: ignore[arg-type]

    asyncio.run(main())


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

    def stale_claim(self, job: JobId, stage: int) -> None:
        """Nobody."""


def test_a_session_begins_by_what_was_seen_last_while_we_look_again() -> None:
    async def main() -> None:
        directory, now = _Directory(), [100.0]
        clock = SimpleNamespace(monotonic=lambda: now[0])
        context: Any = SimpleNamespace(clock=clock, leases=directory)
        routes = Routes(context, fresh_seconds=2.0)
        model: Any = SimpleNamespace(job=JobId("0" * 64), manifest=SimpleNamespace(name="m", stages=1))

        async def owner() -> str:
            look = await routes._claims_of(model)
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
        now[0] += 2.0 * STALE_TIMES
        assert await owner() == "three", "what was seen is too old"

        # What is learned while we look is newer than what the directory says then.
        now[0] += 3.0
        directory.peer = "four"
        directory.open.clear()
        assert await owner() == "three"
        await settled()
        routes.forget(model.job)
        directory.peer = "five"
        directory.open.set()
        await settled()
        assert await owner() == "five"
        await routes.aclose()

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
        look = await Routes(context)._claims_of(model)
        assert [held.peer for held in look.stages[0]] == [identities[0].peer_id]

    asyncio.run(main())


def test_no_look_outlives_the_routes() -> None:
    async def main() -> None:
        directory = _Directory()
        directory.open.clear()
        routes = Routes(SimpleNamespace(clock=Clock(), leases=directory))  # type: ignore[arg-type]
        model: Any = SimpleNamespace(job=JobId("0" * 64), manifest=SimpleNamespace(name="m", stages=1))
        waiting = []
        for _ in range(2):
            waiting.append(asyncio.create_task(routes._claims_of(model)))
            await settled()
            routes.forget(model.job)  # and look anew
        await routes.aclose()
        await asyncio.wait(waiting, timeout=5)
        assert all(each.cancelled() for each in waiting) and not routes._invalidated
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
            leases=SimpleNamespace(claims_of=claims_of, stale_claim=nobody),
        )
        routes = Routes(context, fresh_seconds=2.0)
        model: Any = SimpleNamespace(job=JobId("0" * 64), manifest=SimpleNamespace(name="m", stages=1))
        await routes._claims_of(model)
        now[0] += 3.0
        fails[0] = True
        await routes._claims_of(model)
        await settled()
        with pytest.raises(SwarmError):
            await routes._claims_of(model)

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
        routes = Routes(SimpleNamespace(clock=clock, links=links), fresh_seconds=2.0)  # type: ignore[arg-type]
        choice: Any = [["one", "two"]]

        async def known(seconds: float) -> Any:
            return await asyncio.wait_for(routes._links(choice, seconds), 5)

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
        assert routes._reading_links is None
        await routes.aclose()

    asyncio.run(main())
