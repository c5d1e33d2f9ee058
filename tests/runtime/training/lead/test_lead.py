"""What the lead knows of its job's speed, and how what it decides beside the steps reaches the stages."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from support.training import config

from fusion.runtime.job.manifest import CompressionConfig, TrainConfig
from fusion.runtime.job.progress import RECENT
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.lead.lead import MAX_HANDOVER_CODECS, Lead
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import START
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.runtime.training.step.run_statistics import RunStatistics
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

STAGES = 2
CODECS = (("x/0", "int8", "bf16"),)
ADAPTIVE = CompressionConfig(kind="adaptive")


class Table:
    """Stages that do as they are told, and a clock."""

    def __init__(self, train: TrainConfig, handover: HandoverState | None = None, **parts: Any) -> None:
        """`parts`: of the lead, that are others than these here."""
        self.now = 100.0
        self.said: list[tuple[int, m.Message]] = []
        self.lead = Lead(
            JobId("job"), train, STAGES, 1, START, handover,
            samples=None, edges=["x/0", "y/0"], send=lambda stage, message: self.said.append((stage, message)),
            changed=lambda: None, clock=lambda: self.now, **{"spawn": _never, "put": _nowhere, **parts},
        )  # fmt: skip

    def join(self, step: int = 0) -> None:
        for stage in range(STAGES):
            self.lead.receive(stage, m.Join(step=step, newest=START, join_id=(1, 7, 1)))

    def step(self, seconds: float, *busy: float) -> None:
        begin = next(message for _, message in reversed(self.said) if isinstance(message, m.Begin))
        self.now += seconds
        step = self.lead.progress.step
        for stage in range(STAGES):
            self.lead.receive(stage, m.Ready(begin.attempt, step, busy=busy[stage], fed=""))

    def last(self, kind: type[Any]) -> Any:
        return next(message for _, message in reversed(self.said) if isinstance(message, kind))


def _never(work: Coroutine[Any, Any, None]) -> None:
    work.close()


async def _nowhere(data: bytes) -> Digest:
    await asyncio.sleep(0)
    raise AssertionError("nothing is stored here")


def _at_once(work: Coroutine[Any, Any, None]) -> None:
    """For one that waits for nothing."""
    with pytest.raises(StopIteration):
        work.send(None)


async def _somewhere(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


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
    table.lead.receive(1, m.Suspect(text="gone", join_id=(1, 7, 1)))
    assert table.lead.pace is None


def test_a_new_table_goes_out_with_the_next_commit_and_with_every_begin() -> None:
    table = Table(trained())
    assert table.lead.progress.codecs == "none on 2 of 2 edges" and table.lead.chosen is None
    table.join()
    table.lead.change_codecs(CODECS)
    assert table.lead.progress.codecs == "int8/bf16 on 1 of 2 edges"
    table.step(1.0, 0.5, 0.5)
    assert table.last(m.Commit).after.codecs == CODECS
    table.step(1.0, 0.5, 0.5)
    assert table.last(m.Commit).after.codecs is None  # as before
    table.lead.receive(1, m.Join(step=2, newest=START, join_id=(1, 7, 2)))
    assert table.last(m.Begin).after.codecs == CODECS


def test_who_takes_the_lead_over_at_a_boundary_knows_the_table() -> None:
    table = Table(trained())
    table.lead.change_codecs(CODECS)
    assert table.lead.chosen == CODECS
    handover = HandoverState(
        step=3, shard=Digest("e" * 64), checkpoint=START, ledger=Ledger(steps=3, head="b" * 64), codecs=table.lead.chosen
    )  # fmt: skip
    successor = Table(trained(), handover)
    assert successor.lead.codecs == CODECS and successor.lead.progress.codecs.startswith("int8")
    successor.join(step=3)
    assert successor.last(m.Begin).after.codecs == CODECS
    table.lead.change_codecs((("x" * MAX_HANDOVER_CODECS, "int8", "int8"),))
    assert table.lead.chosen is None  # a handover is small


def test_a_move_is_asked_of_the_stage_alone() -> None:
    table = Table(replace(trained(), compression=CompressionConfig()))
    assert table.lead.progress.codecs == ""
    table.join()
    table.lead.move(1, PeerId("idle"))
    assert table.said[-1] == (1, m.Move(peer=PeerId("idle")))


def test_whatever_stages_say_of_their_traffic_the_figures_of_the_job_can_be_told() -> None:
    table = Table(trained())
    table.join()
    begin = table.last(m.Begin)
    for stage, said in enumerate((2**63 - 1, -5)):
        table.lead.receive(stage, m.Ready(begin.attempt, 0, fed="", sent_bytes=said, received_bytes=7))
    progress = table.lead.progress
    assert (progress.sent_bytes, progress.received_bytes, progress.step) == (0, 14, 1)


def test_losses_that_an_owner_makes_up_crowd_out_none() -> None:
    table = Table(trained())
    made_up = RunStatistics(recent=tuple((1000 + i, 0.0) for i in range(RECENT)))
    table.lead.receive(0, m.Join(step=0, newest=START, join_id=(1, 7, 1)))
    table.lead.receive(1, m.Join(step=0, newest=START, join_id=(1, 7, 1), statistics=made_up))
    begin = table.last(m.Begin)
    for stage, loss in enumerate((None, 2.5)):
        table.lead.receive(stage, m.Ready(begin.attempt, 0, loss=loss, fed=""))
    assert table.lead.progress.loss == 2.5 and table.lead.progress.recent == ((0, 2.5),)


def test_a_loss_on_held_out_data_is_of_the_step_that_the_job_is_at() -> None:
    """One of a step that never comes would hide all that follow."""
    table = Table(trained())
    table.join()
    for step, loss in ((1 << 40, 0.0), (0, 3.0), (1, 2.0)):
        table.lead.receive(1, m.Evaluated(step, loss))
    assert (table.lead.progress.validation_step, table.lead.progress.validation_loss) == (0, 3.0)


class SavingTable(Table):
    """Whose stages save at once and hold what they are told to `copying_seconds` later, unless another was asked for."""

    def __init__(self, train: TrainConfig, copying_seconds: float) -> None:
        super().__init__(train, spawn=_at_once, put=_somewhere)
        self.copying_seconds = copying_seconds
        self.held_at = math.inf

    def step(self, seconds: float, *busy: float) -> None:
        before = len(self.said)
        super().step(seconds, *busy)
        for stage, message in self.said[before:]:
            if stage == 1 and isinstance(message, m.Commit) and message.after.snapshot:
                self.held_at = self.now + self.copying_seconds
                for each in range(STAGES):
                    self.lead.receive(each, m.Shard(message.step + 1, Digest(str(each) * 64)))
        if self.now >= self.held_at:
            asked, self.held_at = self.last(m.Replicate), math.inf
            for each in range(STAGES):
                self.lead.receive(each, m.Held(asked.step, asked.index))


def test_copies_that_take_far_longer_than_the_usual_are_a_snapshot_in_the_end() -> None:
    """What is given up is cancelled at the stages, and the next one is due at once: none was ever whole."""
    table = SavingTable(config(steps=10_000, snapshot_every=1), 70.0)
    table.join()
    for _ in range(200):
        table.step(1.0, 0.5, 0.5)
    assert table.lead.progress.snapshot_step > 0


def test_what_keeps_a_stage_from_its_part_of_a_snapshot_is_what_the_job_waits_for() -> None:
    """At its end no step follows, and it stood in the log of the stage's peer alone."""
    table = SavingTable(config(steps=2, snapshot_every=1000), 9.0)
    table.join()
    table.step(1.0, 0.5, 0.5)
    table.step(1.0, 0.5, 0.5)
    assert table.lead.waiting_for == ""
    table.lead.receive(1, m.Held(1, m.NOTHING, "could not hold the snapshot of step 1: an old one"))
    assert table.lead.waiting_for == ""
    table.lead.receive(
        1, m.Held(2, m.NOTHING, "could not hold the snapshot of step 2: the disk is full" + 400 * "!")
    )
    assert table.lead.waiting_for.startswith(
        "stage 1 could not hold the snapshot of step 2: the disk is full!"
    )
    assert len(table.lead.waiting_for) < 330 and table.lead.progress.state == "running"
    asked = table.last(m.Replicate)
    for stage in range(STAGES):
        table.lead.receive(stage, m.Held(asked.step, asked.index))
    assert table.lead.waiting_for == "" and table.lead.progress.state == "done"


def _awaiting_snapshot(**parts: Any) -> Table:
    """A job that has done its steps and waits for its last snapshot, of which both shards are saved."""
    table = Table(config(steps=1, snapshot_every=1000), **parts)
    table.join()
    table.step(1.0, 0.5, 0.5)
    for stage in range(STAGES):
        table.lead.receive(stage, m.Shard(1, Digest(f"{stage:064x}")))
    table.now += 1000.0
    return table


def test_a_stage_that_holds_no_copies_is_late() -> None:
    table = _awaiting_snapshot(spawn=_at_once, put=_somewhere)
    index = table.last(m.Replicate).index
    table.lead.receive(0, m.Held(1, index))
    assert (
        table.lead.late_in_snapshot(1000.0, believed=True) == (1,)
        and table.lead.late_in_snapshot(1000.1, believed=True) == ()
    )
    table.lead.receive(1, m.Held(1, index))
    assert table.lead.late_in_snapshot(0.0, believed=True) == ()


def test_no_stage_is_late_that_waits_for_the_lead() -> None:
    assert _awaiting_snapshot().lead.late_in_snapshot(1000.0, believed=True) == (), "no index is stored yet"


def test_a_stage_that_accuses_one_that_does_not_exist_is_late_itself() -> None:
    table = _awaiting_snapshot(spawn=_at_once, put=_somewhere)
    table.lead.receive(0, m.Held(1, table.last(m.Replicate).index))
    for accused in (STAGES, -1, 10**12):
        table.lead.receive(1, m.Held(1, m.NOTHING, "could not hold the snapshot of step 1", accused))
        assert table.lead.late_in_snapshot(1000.0, believed=True) == (1,)
