"""What the lead knows of its job's speed, and how what it decides beside the steps reaches the stages."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from support.training import config

from fusion.runtime.job.manifest import CompressionConfig, TrainConfig
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.lead.lead import BATON_WIRES, Lead
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import START
from fusion.runtime.training.step.events import StageReport
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

STAGES = 2
WIRES = (("x/0", "int8", "bf16"),)
ADAPTIVE = CompressionConfig(kind="adaptive")


class Table:
    """Stages that do as they are told, and a clock."""

    def __init__(self, train: TrainConfig, baton: HandoverState | None = None) -> None:
        self.now = 100.0
        self.said: list[tuple[int, m.Message]] = []
        self.lead = Lead(
            JobId("job"), train, STAGES, 1, START, baton,
            samples=None, edges=["x/0", "y/0"], send=lambda stage, message: self.said.append((stage, message)),
            spawn=_never, put=_nowhere, changed=lambda: None, clock=lambda: self.now,
        )  # fmt: skip

    def join(self, step: int = 0) -> None:
        for stage in range(STAGES):
            self.lead.receive(stage, m.JoinMessage(step=step, newest=START, entry=(1, 7, 1)))

    def step(self, seconds: float, *busy: float) -> None:
        begin = next(message for _, message in reversed(self.said) if isinstance(message, m.BeginMessage))
        self.now += seconds
        step = self.lead.progress.step
        for stage in range(STAGES):
            report = StageReport(busy=busy[stage], fed="")
            self.lead.receive(stage, m.ReadyMessage(attempt=begin.attempt, step=step, report=report))

    def last(self, kind: type[Any]) -> Any:
        return next(message for _, message in reversed(self.said) if isinstance(message, kind))


def _never(work: Coroutine[Any, Any, None]) -> None:
    work.close()


async def _nowhere(data: bytes) -> Digest:
    await asyncio.sleep(0)
    raise AssertionError("nothing is stored here")


def trained(**changes: Any) -> TrainConfig:
    return config(steps=20, snapshot_every=1000, compression=ADAPTIVE, **changes)


def test_the_pace_is_known_after_a_few_steps_and_forgotten_when_they_begin_anew() -> None:
    table = Table(trained())
    assert table.lead.pace is None
    table.join()
    table.step(2.0, 0.5, 0.25)
    assert table.lead.pace is None
    table.step(4.0, 0.5, 1.0)
    table.step(2.0, 0.5, 7.0)  # no share: it says nothing
    pace = table.lead.pace
    assert pace is not None and pace.step_seconds == 2.0 and pace.steps_left == 17
    assert pace.compute_seconds == pytest.approx((0.25, 0.125))  # 4 microbatches
    table.now += 9.0
    assert table.lead.pace is not None and table.lead.pace.step_seconds == 9.0
    table.lead.receive(1, m.SuspectMessage(text="gone", entry=(1, 7, 1)))
    assert table.lead.pace is None


def test_a_new_table_goes_out_with_the_next_commit_and_with_every_begin() -> None:
    table = Table(trained())
    assert table.lead.progress.codecs == "none on 2 of 2 edges" and table.lead.chosen is None
    table.join()
    table.lead.rewire(WIRES)
    assert table.lead.progress.codecs == "int8/bf16 on 1 of 2 edges"
    table.step(1.0, 0.5, 0.5)
    assert table.last(m.CommitMessage).after.wires == WIRES
    table.step(1.0, 0.5, 0.5)
    assert table.last(m.CommitMessage).after.wires is None  # as before
    table.lead.receive(1, m.JoinMessage(step=2, newest=START, entry=(1, 7, 2)))
    assert table.last(m.BeginMessage).after.wires == WIRES


def test_who_takes_the_lead_over_at_a_boundary_knows_the_table() -> None:
    table = Table(trained())
    table.lead.rewire(WIRES)
    assert table.lead.chosen == WIRES
    baton = HandoverState(
        step=3, shard=Digest("e" * 64), point=START, ledger=Ledger(steps=3, head="b" * 64), wires=table.lead.chosen
    )  # fmt: skip
    heir = Table(trained(), baton)
    assert heir.lead.wires == WIRES and heir.lead.progress.codecs.startswith("int8")
    heir.join(step=3)
    assert heir.last(m.BeginMessage).after.wires == WIRES
    table.lead.rewire((("x" * BATON_WIRES, "int8", "int8"),))
    assert table.lead.chosen is None  # a baton is small


def test_a_move_is_asked_of_the_stage_alone() -> None:
    table = Table(replace(trained(), compression=CompressionConfig()))
    assert table.lead.progress.codecs == ""
    table.join()
    table.lead.move(1, PeerId("idle"))
    assert table.said[-1] == (1, m.MoveMessage(peer=PeerId("idle")))
