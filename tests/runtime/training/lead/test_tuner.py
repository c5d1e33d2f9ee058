"""What the lead makes of the links that it sees: another table, or a stage elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.instant_loop import run

from fusion.compression.adaptive import CodecSpeed
from fusion.compression.reference_speeds import REFERENCE
from fusion.dag.cutting.stage import Edge
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Ref, TensorType
from fusion.runtime.job.manifest import (
    CompressionConfig,
    DataConfig,
    EdgeCodecs,
    OptimizerConfig,
    TrainConfig,
)
from fusion.runtime.training.lead import tuner
from fusion.runtime.training.lead.codec_speeds import needed_families
from fusion.runtime.training.lead.step_times import Pace
from fusion.runtime.training.lead.tuner import Tuner
from fusion.runtime.training.lead.tuning import Job
from fusion.swarm.directory.records import Digest, Pair, PeerRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.links.view import LinkView
from fusion.swarm.transport import PeerId

OWNERS = {stage: PeerId(f"peer-{stage}") for stage in range(3)}
IDLE = PeerId("idle")
PACE = Pace(step_seconds=5.0, compute_seconds=(0.001, 0.001, 0.001), steps_left=1000)


class FakeLinks:
    """Everybody has measured everybody: 100 Mbit/s, less from and to some."""

    def __init__(self, *peers: PeerId, slow: PeerId | None = None, mbps: float = 100.0) -> None:
        self.failures = 0
        self.mbps = dict.fromkeys(peers, 100.0)
        if slow is not None:
            self.mbps[slow] = mbps
        self.peers = tuple(record(peer, owns=peer in OWNERS.values()) for peer in peers)

    async def refresh(self, max_age_seconds: float) -> LinkView:
        if self.failures:
            self.failures -= 1
            raise SwarmError("nobody answers")
        pairs = {
            (a, b): Pair(b, 4.0, min(self.mbps[a], self.mbps[b]), 0.0)
            for a in self.mbps
            for b in self.mbps
            if a != b
        }
        return LinkView(pairs=pairs)


class ReferenceCodecs:
    """A worker that times codecs on the machine of reference, for a loop that waits for nothing."""

    async def run(self, function: object, families: tuple[str, ...]) -> Mapping[str, CodecSpeed]:
        return {family: REFERENCE[family] for family in families}


class FakeLead:
    def __init__(self, pace: Pace | None = PACE) -> None:
        self.pace = pace
        self.codecs: EdgeCodecs = ()
        self.moves: list[tuple[int, str]] = []
        self.changes = 0
        self.progress = SimpleNamespace(job="job")

    def change_codecs(self, codecs: EdgeCodecs) -> None:
        self.codecs, self.changes = codecs, self.changes + 1

    def move(self, stage: int, peer: PeerId) -> None:
        self.moves.append((stage, peer))


def record(peer: PeerId, *, owns: bool) -> PeerRecord:
    return PeerRecord(
        peer=peer, name="", addresses=(), role="peer", device="cpu", flops_per_second=1e9, memory_bytes=2000,
        free_memory_bytes=1000 if owns else 2000, software="0", opset=1, started_at=0.0,
    )  # fmt: skip


def job(kind: str) -> Job:
    value = TensorType((symbol("batch"), symbol("sequence"), 128), "float32")
    return Job(
        config=TrainConfig(
            steps=1000, microbatches=4, microbatch_size=4, sequence=128, seed=0, optimizer=OptimizerConfig(),
            data=DataConfig(kind="tokens", train=Digest("")),
            compression=CompressionConfig(kind=kind, families=("int8",)),  # type: ignore[arg-type]
        ),
        edges=tuple(Edge(f"x{s}/0", Ref(f"x{s}"), value, s, (s + 1,), True) for s in range(2)),
        ties=(),
        memory_bytes=(1000,) * 3,
        state_bytes=(10_000,) * 3,
    )  # fmt: skip


def looks(links: FakeLinks, lead: FakeLead, work: Job, seconds: float = 0.3, **how: Any) -> None:
    async def main() -> None:
        context: Any = SimpleNamespace(links=links, codec_worker=ReferenceCodecs())
        clock = asyncio.get_running_loop().time
        task = asyncio.create_task(
            Tuner(context, work, lead, how.pop("owners", lambda: OWNERS), clock, **how).run()  # type: ignore[arg-type]
        )
        await asyncio.sleep(seconds)
        assert task.done() != work.config.compression.live
        task.cancel()

    run(main())


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "LIVE_SECONDS", 0.01)
    monkeypatch.setattr(tuner, "CALM_SECONDS", 0.01)


def test_codecs_are_chosen_for_a_slow_link_once() -> None:
    links, lead = FakeLinks(*OWNERS.values(), slow=OWNERS[1], mbps=5.0), FakeLead()
    links.failures = 2  # nobody minds
    looks(links, lead, job("adaptive"), seconds=1.0)
    assert {name: there for name, there, _ in lead.codecs} == {"x0/0": "int8", "x1/0": "int8"}
    assert lead.changes == 1 and lead.moves == []


@pytest.mark.parametrize("kind", ["none", "uniform"])
def test_only_a_job_whose_codecs_follow_its_links_gets_others(kind: str) -> None:
    lead = FakeLead()
    looks(FakeLinks(*OWNERS.values(), slow=OWNERS[1], mbps=5.0), lead, job(kind))
    assert lead.changes == 0
    still = job("adaptive")
    still = replace(
        still, config=replace(still.config, compression=replace(still.config.compression, live=False))
    )
    looks(FakeLinks(*OWNERS.values(), IDLE, slow=OWNERS[1], mbps=2.0), lead, still)
    assert lead.changes == 0 and lead.moves == []


def test_a_stage_is_moved_once_a_minute() -> None:
    links, lead = FakeLinks(*OWNERS.values(), IDLE, slow=OWNERS[1], mbps=2.0), FakeLead()
    looks(links, lead, job("none"))
    assert lead.moves == [(1, IDLE)]
    lead = FakeLead()
    looks(links, lead, job("none"), moved=True)
    assert lead.moves == []


@pytest.mark.parametrize(("mbps", "moves"), [(2.0, [(1, IDLE)]), (60.0, [])])
def test_a_move_that_saves_much_waits_less_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch, mbps: float, moves: list[tuple[int, str]]
) -> None:
    monkeypatch.setattr(tuner, "MOVE_SECONDS", 4.0)
    monkeypatch.setattr(tuner, "REQUESTED_SECONDS", 1.0)
    lead = FakeLead()
    looks(FakeLinks(*OWNERS.values(), IDLE, slow=OWNERS[1], mbps=mbps), lead, job("none"), 1.5, moved=True)
    assert lead.moves == moves


def test_a_step_that_became_slow_is_a_reason_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "CALM_SECONDS", 1000.0)
    links, lead = FakeLinks(*OWNERS.values(), IDLE), FakeLead(replace(PACE, step_seconds=0.1))

    async def change() -> None:
        await asyncio.sleep(0.2)
        links.mbps[OWNERS[1]] = 2.0
        await asyncio.sleep(0.2)
        seen.append(len(lead.moves))
        lead.pace = PACE

    seen: list[int] = []

    def owners() -> dict[int, PeerId]:
        if not tasks:
            tasks.append(asyncio.create_task(change()))
        return OWNERS

    tasks: list[asyncio.Task[None]] = []
    looks(links, lead, job("none"), seconds=1.5, owners=owners)
    assert seen == [0] and lead.moves == [(1, IDLE)]


def test_figures_that_are_on_their_way_move_nothing() -> None:
    class Falling(FakeLinks):
        async def refresh(self, max_age_seconds: float) -> LinkView:
            """Now one stage's links look worst, now another's."""
            self.mbps[OWNERS[0]], self.mbps[OWNERS[2]] = self.mbps[OWNERS[2]], self.mbps[OWNERS[0]]
            return await super().refresh(max_age_seconds)

    lead = FakeLead()
    looks(Falling(*OWNERS.values(), IDLE, slow=OWNERS[0], mbps=2.0), lead, job("none"))
    assert lead.moves == []


def test_nothing_is_decided_before_everything_is_known() -> None:
    links = FakeLinks(*OWNERS.values(), IDLE, slow=OWNERS[1], mbps=2.0)
    for lead, owners in ((FakeLead(None), OWNERS), (FakeLead(), {0: OWNERS[0], 2: OWNERS[2]})):
        looks(links, lead, job("none"), owners=lambda owners=owners: owners)
        assert lead.moves == []
    unlisted, lead = FakeLinks(OWNERS[0], OWNERS[1], IDLE, slow=OWNERS[1], mbps=2.0), FakeLead()
    looks(unlisted, lead, job("none"))
    assert lead.moves == []


def test_which_codecs_are_timed() -> None:
    assert needed_families(CompressionConfig()) == ()
    assert needed_families(CompressionConfig(kind="uniform", codec="topk:0.1")) == ("topk",)
    assert needed_families(CompressionConfig(kind="uniform", codec="none")) == ()
    assert needed_families(CompressionConfig(kind="adaptive", families=("topk", "bf16"))) == (
        "bf16",
        "int8",
        "topk",
    )
