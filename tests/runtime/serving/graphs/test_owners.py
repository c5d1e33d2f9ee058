"""A stage is asked for at its owner as long as that is there, and at the next one where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.runtime.device.overrun import LONGEST_SECONDS
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.protocol import RUN, STATUS
from fusion.runtime.serving.graphs.arrays import Array, described
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.identity import friendly_name
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream

X = TensorType((symbol("batch"), 1), "float32")
STAGE = Stage(
    0, Graph((Input("x", X),), (), (Node("y", "aten.relu", (Ref("x"),), (X,)),), (Ref("y"),)), (), (), (0,)
)
GIVEN = Array("x", "float32", (2, 1), bytes(8))
JOB = JobId("a" * 64)
NEVER = 3000.0


def _claim(peer: str, term: int) -> ClaimRecord:
    return ClaimRecord(
        job=JOB, stage=0, peer=PeerId(peer), role="owner", term=term, score=1.0, step=0, load=0.0, ready=True
    )


class Owners:
    """A gateway of one stage, and peers that own it as `who` says at each second; None: nobody."""

    def __init__(self, who: Callable[[float], tuple[str, int] | None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.network = MemoryNetwork()
        self.asked: list[str] = []
        self.behind: ClaimRecord | None = None  # who claims the stage all the same
        transport = MemoryTransport(self.network, PeerId("gateway"))

        async def owner(job: JobId, stage: int) -> ClaimRecord | None:
            found = who(self.loop.time())
            return found and _claim(*found)

        async def nothing(*_: object) -> None: ...

        async def find(name: str) -> Any:
            serve = SimpleNamespace(outputs=("y",), sizes={"batch": 4})
            return SimpleNamespace(job=JOB, manifest=SimpleNamespace(name="m", stages=1), serve=serve)

        async def graphs_of(*_: object) -> Any:
            return (STAGE,), None

        context: Any = SimpleNamespace(
            peer_id=transport.peer_id,
            transport=transport,
            leases=SimpleNamespace(owner=owner, stale_claim=lambda job, stage: self.behind),
            clock=SimpleNamespace(monotonic=self.loop.time),
            access=SimpleNamespace(chain=lambda job: (), refusal=lambda *_: None),
        )
        catalog: Any = SimpleNamespace(
            find=find,
            check_client=nothing,
            check_admitted=nothing,
            routes=SimpleNamespace(forget=lambda job: None),
        )
        graphs: Any = SimpleNamespace(of=graphs_of)
        stages: Any = SimpleNamespace(held=lambda *_: None)
        self._gateway = GraphGateway(context, stages, graphs, catalog)

    async def peer(self, name: str, seconds: float, *, frozen: bool = False) -> None:
        """One that answers after so long, and says that it is there unless it is frozen."""
        transport = MemoryTransport(self.network, PeerId(name))

        async def stage(stream: Stream) -> None:
            await stream.receive()
            self.asked.append(name)
            await asyncio.sleep(seconds)
            made = Array("result/0", "float32", (2, 1), name.encode().ljust(8))
            await stream.send("made", described([made]), [made.data])

        async def status(stream: Stream) -> None:
            await stream.receive()
            if frozen:
                await asyncio.sleep(NEVER)
            await stream.send("status")

        await transport.serve(RUN.name, stage)
        await transport.serve(STATUS.name, status)

    async def run(self) -> list[PeerId]:
        _, route = await self._gateway.run("m", [GIVEN], PeerId("gateway"))
        return route


def test_a_stage_that_takes_its_time_is_waited_for() -> None:
    async def main() -> None:
        owners = Owners(lambda now: ("slow", 1))
        await owners.peer("slow", LONGEST_SECONDS - 1.0)
        assert await owners.run() == ["slow"] and owners.asked == ["slow"]

    run(main())


def test_one_that_takes_longer_than_any_may_is_given_up() -> None:
    async def main() -> None:
        owners = Owners(lambda now: ("slow", 1))
        await owners.peer("slow", NEVER)
        with pytest.raises(JobFailed, match=f"stage 0 at {friendly_name('slow')} takes longer than any may"):
            await owners.run()
        assert owners.asked == ["slow"]

    run(main())


def test_a_frozen_owner_is_left_as_soon_as_another_owns_the_stage() -> None:
    async def main() -> None:
        owners = Owners(lambda now: ("frozen", 1) if now < 4.0 else None if now < 6.0 else ("next", 2))
        await owners.peer("frozen", NEVER, frozen=True)
        await owners.peer("next", 1.0)
        assert await owners.run() == ["next"] and owners.asked == ["frozen", "next"]
        assert owners.loop.time() < 10.0

    run(main())


def test_where_nobody_owns_the_stage_by_right_whoever_claims_it_is_asked() -> None:
    async def main() -> None:
        owners = Owners(lambda now: None)
        owners.behind = _claim("late", 1)
        await owners.peer("late", 1.0)
        assert await owners.run() == ["late"]

    run(main())


def test_an_owner_under_another_term_is_asked_anew() -> None:
    async def main() -> None:
        owners = Owners(lambda now: ("peer", 1 if now < 30.0 else 2))
        await owners.peer("peer", 40.0)
        assert await owners.run() == ["peer"] and owners.asked == ["peer", "peer"]

    run(main())


def test_what_is_wrong_names_who_did_not_answer() -> None:
    async def main() -> None:
        owners = Owners(lambda now: ("frozen", 1))
        await owners.peer("frozen", NEVER, frozen=True)
        with pytest.raises(JobFailed, match=f"stage 0 of m at {friendly_name('frozen')}: .* is silent"):
            await owners.run()
        assert owners.loop.time() < 90.0
        nobody = Owners(lambda now: None)
        with pytest.raises(JobFailed, match="no answer in 60 s: nobody has stage 0 of m"):
            await nobody.run()

    run(main())


def test_the_time_that_an_owner_was_at_work_is_not_taken_off_its_successors() -> None:
    async def main() -> None:
        owners = Owners(lambda now: ("slow", 1) if now < 300.0 else None if now < 330.0 else ("next", 2))
        await owners.peer("slow", NEVER)
        await owners.peer("next", 1.0)
        owners.loop.call_at(299.0, owners.network.kill, PeerId("slow"))
        assert await owners.run() == ["next"]

    run(main())
