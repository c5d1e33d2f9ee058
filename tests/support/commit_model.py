"""The two state machines of `fusion.runtime.training.step` for all stages of a job, over a network that a seed drives.

A link delivers messages in order or breaks; then both ends notice, each at its own time. Unlike a transport, a link also
delivers copies of messages again later, while both ends have the same owners. Stages exchange messages with their neighbours
in the pipeline and with the lead. Assertions here check everything that must never happen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.planes.learning_rate import clip_factor, learning_rate
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.history import INITIAL, Version, contents, extend
from fusion.runtime.training.step.lead import LeadState, expected, lead
from fusion.runtime.training.step.run_statistics import Attempt, Interruptions, RunStatistics
from fusion.runtime.training.step.snapshot_state import SnapshotState
from fusion.runtime.training.step.stage import StageState, stage
from fusion.swarm.directory.records import Digest

SAMPLES = 11
FOREIGN = -1  # a step of another history, in which the same number of steps were applied


@cache
def ledger_of(config: TrainConfig, step: int) -> Ledger:
    """The ledger after `step` steps, according to the plan."""
    if step == 0:
        return Ledger()
    fed = expected(config, step - 1, SAMPLES)
    return ledger_of(config, step - 1).commit(step - 1, fed, config.microbatches * config.microbatch_size)


@cache
def history_of(config: TrainConfig, step: int, stages: int) -> str:
    """The history after `step` steps, where every stage's squared norm is 1."""
    if step == 0:
        return INITIAL
    at = step - 1
    made_of = contents(expected(config, at, SAMPLES), [1.0] * stages, [])
    rate, clip = learning_rate(config.optimizer, at, config.steps), clip_factor(config.optimizer, stages)
    return extend(history_of(config, at, stages), at, rate, clip, made_of)


@dataclass
class Owner:
    state: StageState
    newest: Checkpoint
    before: Checkpoint = START
    alive: bool = True
    applied: list[int] = field(
        default_factory=list
    )  # the steps that its parameters are made of; FOREIGN: another's
    work: e.Run | None = None
    local: list[e.StageEvent] = field(default_factory=list)  # what its own peer tells it, in order


@dataclass
class Model:
    config: TrainConfig
    stages: int
    chance: random.Random
    copies: float = 0.1  # of the messages come again later
    forks: float = 0.0  # of the new owners come from another history, at the very step that the lead is at
    lead: LeadState = field(init=False)
    owners: list[Owner] = field(init=False)
    up: set[frozenset[int]] = field(default_factory=set)  # pairs of stages with a link
    to_stage: list[list[Any]] = field(init=False)
    to_lead: list[list[Any]] = field(init=False)
    late: list[tuple[bool, int, int, int, Any]] = field(default_factory=list)
    ready: set[tuple[int, Attempt, int]] = field(default_factory=set)
    commits: dict[tuple[Attempt, int], m.Commit] = field(default_factory=dict)
    saving: tuple[int, set[int]] = (-1, set())
    record: Checkpoint = START  # what a new owner starts from
    announced: Checkpoint = START  # by the lead of now
    discards: int = 0
    restores: int = 0
    handovers: dict[int, tuple[Version, list[int], Checkpoint, LeadState | None, RunStatistics]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.owners = [Owner(StageState(step=0, history=INITIAL, stage=i), START) for i in range(self.stages)]
        self.to_stage = [[] for _ in range(self.stages)]
        self.to_lead = [[] for _ in range(self.stages)]
        self.lead = LeadState(
            config=self.config, stages=self.stages, term=1, samples=SAMPLES, history=INITIAL
        )
        for i in range(self.stages):
            self.link(i)

    # --- links

    def partners(self, i: int) -> set[int]:
        beside = {j for j in (i - 1, i + 1, 0) if 0 <= j < self.stages}
        return (set(range(self.stages)) if i == 0 else beside) - {i}

    def link(self, i: int) -> None:
        for j in self.partners(i):
            if self.owners[i].alive and self.owners[j].alive:
                self.up.add(frozenset((i, j)))
        for j in {i, *self.partners(i)}:
            self.notice(j)

    def notice(self, i: int) -> None:
        owner = self.owners[i]
        if not owner.alive:
            return
        linked = all(frozenset((i, j)) in self.up for j in self.partners(i))
        links = tuple((j, self.owners[j].state.term) for j in sorted(self.partners(i)))
        known = [event for event in owner.local if isinstance(event, e.Linked | e.Unlinked)]
        now = isinstance(known[-1], e.Linked) if known else owner.state.linked
        if linked != now:
            owner.local.append(e.Linked(links) if linked else e.Unlinked())

    def cut(self, i: int, j: int) -> None:
        self.up.discard(frozenset((i, j)))
        if 0 in (i, j):
            self.to_stage[max(i, j)].clear()
            self.to_lead[max(i, j)].clear()
        self.notice(i)
        self.notice(j)

    def break_a_link(self) -> None:
        i = self.chance.randrange(self.stages)
        if self.partners(i) and self.owners[i].alive:
            self.cut(i, self.chance.choice(sorted(self.partners(i))))

    def mend(self) -> None:
        for i in range(self.stages):
            self.link(i)

    # --- owners

    def kill(self, i: int | None = None) -> None:
        i = self.chance.randrange(self.stages) if i is None else i
        owner = self.owners[i]
        owner.alive, owner.work = False, None
        owner.local.clear()
        for j in self.partners(i):
            self.cut(i, j)
        self.to_stage[i].clear()
        self.to_lead[i].clear()
        if i == 0:
            for queue in (*self.to_stage, *self.to_lead):
                queue.clear()

    def succeed(self, i: int) -> None:
        """Start the next owner, from the handover if there is one, otherwise from the newest snapshot."""
        term = self.owners[i].state.term + 1
        handover = self.handovers.pop(i, None)
        if handover is None and i > 0 and self.chance.random() < self.forks:
            step = self.lead.step
            state = StageState(step=step, history="f" * 64, stage=i, term=term)
            self.owners[i] = Owner(state, self.record, applied=[FOREIGN] * step)
        elif handover is None:
            version = self.record.version
            state = StageState(step=version.step, history=version.history, stage=i, term=term)
            self.owners[i] = Owner(state, self.record, applied=list(range(self.record.step)))
        else:
            version, applied, checkpoint, _, statistics = handover
            state = StageState(
                step=version.step, history=version.history, stage=i, term=term, statistics=statistics
            )
            self.owners[i] = Owner(state, checkpoint, applied=list(applied))
        if i == 0:
            self.saving, self.announced = (-1, set()), START
            old = None if handover is None else handover[3]
            self.lead = LeadState(
                config=self.config, stages=self.stages, term=term, samples=SAMPLES,
                snapshots=SnapshotState(newest=self.owners[0].newest),
                ledger=self.record.ledger if old is None else old.ledger,
                history=self.record.version.history if old is None else old.history,
                interruptions=Interruptions(
                    statistics=RunStatistics() if old is None else old.statistics, counted=old is not None
                ),
            )  # fmt: skip
        self.link(i)

    def leave(self, i: int | None = None) -> None:
        i = self.chance.randrange(self.stages) if i is None else i
        if self.owners[i].alive and i not in self.handovers:
            self.owners[i].local.append(e.Leave())

    def stay(self) -> None:
        """Let an owner go on that wanted to leave or has handed its stage over, since no peer took the stage."""
        i = self.chance.randrange(self.stages)
        if self.owners[i].alive:
            self.owners[i].local.append(e.Stay())

    def passed(self) -> list[int]:
        """The stages whose owner has handed over and can go: all that it sent has arrived, long before its successor begins."""
        waiting = any(self.to_stage)
        return [i for i in self.handovers if self.owners[i].alive and not waiting]

    # --- messages

    def terms(self, i: int) -> tuple[int, int]:
        return self.owners[i].state.term, self.lead.term

    def lead_hears(self, i: int, message: Any) -> None:
        if isinstance(message, tuple):  # a shard
            _, step = message
            if step == self.saving[0]:
                self.saving[1].add(i)
                if len(self.saving[1]) == self.stages:
                    checkpoint = Checkpoint(
                        step=step,
                        digest=Digest(f"{step:064}"),
                        ledger=ledger_of(self.config, step),
                        history=history_of(self.config, step, self.stages),
                    )
                    self.saving = (-1, set())
                    self.record = max(self.record, checkpoint, key=lambda p: p.rank)
                    self.lead_event(m.Saved(checkpoint))
                    assert self.lead.snapshots.newest.rank >= self.announced.rank
                    self.announced = self.lead.snapshots.newest
                    for j in range(self.stages):
                        self.tell(j, checkpoint)
            return
        self.lead_event(message, i)

    def lead_event(self, event: e.LeadEvent, i: int = 0) -> None:
        self.lead, actions = lead(self.lead, event, i)
        for action in actions:
            match action:
                case e.Committed():
                    continue
                case e.Fail() | e.FellBack():
                    raise AssertionError(action)
                case m.Hold(_, stage, _):
                    self.tell(stage, action)
                    continue
                case m.Commit(attempt, step):
                    for j in range(self.stages):
                        assert (j, attempt, step) in self.ready, "a commit without every ready"
                    assert self.commits.setdefault((attempt, step), action) == action, "two commits"
                    assert self.lead.ledger == ledger_of(self.config, step + 1)
                    assert self.lead.history == history_of(self.config, step + 1, self.stages)
                case m.Begin(_, step, _):
                    assert self.lead.ledger == ledger_of(self.config, step)
                    self.saving = (-1, set())
                case m.Restore(_, checkpoint):
                    assert checkpoint.rank >= self.announced.rank, "a durable snapshot retreats"
                    self.restores += 1
                case m.Discard():
                    self.discards += 1
            if isinstance(action, m.Begin | m.Commit) and action.after.snapshot:
                self.saving = (self.lead.step, set())
            for j in range(self.stages):
                self.tell(j, action)

    def tell(self, j: int, message: Any) -> None:
        if j == 0 or frozenset((0, j)) in self.up:
            self.to_stage[j].append(message)

    def say(self, i: int, message: Any) -> None:
        if i == 0 or frozenset((0, i)) in self.up:
            self.to_lead[i].append(message)

    def stage_hears(self, i: int, message: Any) -> None:
        owner = self.owners[i]
        if isinstance(message, Checkpoint):
            if message.rank > owner.newest.rank:
                owner.newest, owner.before = message, owner.newest
            return
        before = owner.state
        if isinstance(message, e.Stay):
            self.handovers.pop(i, None)
        owner.state, actions = stage(before, message)
        for action in actions:
            match action:
                case m.Join():
                    assert action.step == len(owner.applied)
                    self.say(i, replace(action, newest=owner.newest, before=owner.before))
                case m.Suspect() | m.Leaving():
                    self.say(i, action)
                case e.Run(_, step, _):
                    assert owner.applied == list(range(step)), "a step on another base"
                    owner.work = action
                case m.Ready(attempt, step):
                    self.ready.add((i, attempt, step))
                    self.say(i, action)
                case e.Apply():
                    assert len(owner.applied) == before.step == owner.state.step - 1
                    owner.applied.append(before.step)
                case e.Drop():
                    owner.work = None
                case e.Load(attempt, checkpoint):
                    owner.newest = checkpoint
                    owner.local.append(e.Restored(attempt, checkpoint.step, checkpoint.version.history))
                    owner.applied = list(range(checkpoint.step))
                case e.HandOver(step):
                    assert step == len(owner.applied)
                    if not owner.state.leaving:  # nobody waits for it any more
                        owner.local.append(e.Stay())
                        continue
                    lead = self.lead if i == 0 else None
                    self.handovers[i] = (
                        owner.state.version,
                        list(owner.applied),
                        owner.newest,
                        lead,
                        owner.state.statistics,
                    )
                case m.Lack():
                    raise AssertionError(action)

    def complete(self, i: int) -> None:
        """Let the stage do its part of the current step."""
        owner = self.owners[i]
        assert owner.work is not None
        run, owner.work = owner.work, None
        if run.after.snapshot:
            self.say(i, ("shard", run.step))
        if run.after.finish:
            owner.work = replace(run, after=m.After(finish=True))
            return
        fed = expected(self.config, run.step, SAMPLES) if i == 0 else None
        self.stage_hears(i, e.Completed(m.Ready(run.attempt, run.step, squared_norm=1.0, fed=fed)))

    # --- chance

    def shake(self) -> bool:
        """Let one random possible event happen. Returns False if none is possible."""
        choices: list[tuple[str, int]] = []
        for i, owner in enumerate(self.owners):
            choices += [("local", i)] if owner.local else []
            choices += [("stage", i)] if self.to_stage[i] and owner.alive else []
            choices += [("lead", i)] if self.to_lead[i] and self.owners[0].alive else []
            run = owner.work
            choices += [("work", i)] if run and (not run.after.finish or run.after.snapshot) else []
        choices += [("late", -1)] if self.late else []
        if not choices:
            return False
        kind, i = self.chance.choice(choices)
        if kind == "local":
            self.stage_hears(i, self.owners[i].local.pop(0))
        elif kind == "work":
            self.complete(i)
        elif kind == "late":
            to_lead, i, term, lead_term, message = self.late.pop(self.chance.randrange(len(self.late)))
            if self.terms(i) == (term, lead_term) and self.owners[0].alive and self.owners[i].alive:
                (self.lead_hears if to_lead else self.stage_hears)(i, message)
        else:
            queue = (self.to_stage if kind == "stage" else self.to_lead)[i]
            message = queue.pop(0)
            if self.chance.random() < self.copies and not isinstance(message, tuple):
                self.late.append((kind == "lead", i, *self.terms(i), message))
            (self.stage_hears if kind == "stage" else self.lead_hears)(i, message)
        return True

    @property
    def ended(self) -> bool:
        at_the_end = all(o.alive and o.work is not None and o.work.after.finish for o in self.owners)
        return at_the_end and self.lead.snapshots.newest.step == self.config.steps
