"""The lead of a job: the owner of stage 0, which holds the data placeholder. Elected like any other stage owner.

The rules of a step are `fusion.runtime.training.step.lead` and those of a snapshot `fusion.runtime.training.snapshots.snapshot.Collector`, both
pure, as is when to take the next (`fusion.runtime.training.snapshots.snapshot_period`); here they meet messages, the blobs of snapshot indices, and the figures that people watch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from fusion.runtime.job.manifest import EdgeCodecs, TrainConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.lead.tuning import in_words
from fusion.runtime.training.snapshots.snapshot import Collector, copies_away, encode_index
from fusion.runtime.training.snapshots.snapshot_period import SnapshotPeriod, first_cost_seconds
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.faults import STANDS_STILL, Faults
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.runtime.training.step.lead import after, first_state, lead
from fusion.runtime.training.step.run_statistics import RunStatistics
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

SPEED_STEPS = 8  # the speed shown is that of so many steps
MAX_HANDOVER_CODECS = 8192  # characters of a table that is handed on; the next lead can choose anew
MOST_BYTES = 1 << 50  # that one stage may say it has sent
PACE_STEPS = 2  # committed in a row, before it is known how fast the job is


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a job trains."""

    step_seconds: float  # of the last step, or of the one under way where that takes longer already
    compute_seconds: tuple[float, ...]  # of each stage for one microbatch, as the last steps showed it
    steps_left: int


class Lead:
    """`send(stage, message)` reaches every stage, the lead's own too, and returns at once; `spawn` runs a coroutine
    beside the loop; `put` stores a blob; `changed` is called when the progress did; `clock` counts seconds. `owners` are
    those of the stages now, `spare`: who could take a stage; `faults`: that this peer remembers of the job;
    `state_bytes`: of the largest of its stages.

    `newest` is the snapshot that our stage was loaded from, or knows of beside the `handover` that it took over with;
    `samples`: in the training data, None where our stage reads none of it; `edges`: names of those of the job."""

    def __init__(
        self,
        job: JobId,
        config: TrainConfig,
        stages: int,
        term: int,
        newest: Checkpoint,
        handover: HandoverState | None = None,
        *,
        samples: int | None,
        edges: Sequence[str] = (),
        send: Callable[[int, m.Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        put: Callable[[bytes], Awaitable[Digest]],
        changed: Callable[[], None],
        clock: Callable[[], float],
        owners: Callable[[], Mapping[int, PeerId]] = dict,
        spare: Callable[[int], frozenset[PeerId]] = lambda stage: frozenset(),
        faults: Faults = (),
        state_bytes: int = 0,
    ) -> None:
        self._job = job
        self._handed_over = handover
        self._config = config
        self._stages = stages
        self._send = send
        self._spawn = spawn
        self._put = put
        self._changed = changed
        self._clock = clock
        self._owners = owners
        begun = first_state(config, stages, term, newest, handover, samples=samples, faults=faults)
        self._state = replace(begun, spare=spare)
        self._collector = Collector(stages=stages)
        self._index: Digest | None = None
        self._troubles: dict[int, str] = {}  # stage -> what keeps it from its part of the snapshot under way
        # How far the copies are of the newest snapshot, and of the one under way.
        self._away = self._asked_away = m.NEXT_STAGE
        self._first_cost = first_cost_seconds(state_bytes)
        self._period = SnapshotPeriod(began=clock(), taken=clock(), cost_seconds=self._first_cost)
        self._watched = clock()  # until when the statistics counts the seconds
        self._waits: dict[int, tuple[int, float]] = {}  # stage -> whom it said that it waits for, and when
        self._finishing = False
        self._times: deque[float] = deque(maxlen=SPEED_STEPS + 1)
        self._computed: deque[tuple[float, ...]] = deque(maxlen=SPEED_STEPS)  # as `Pace.compute_seconds`
        self._edges = edges
        self.progress = Progress(
            job=job, state="running", steps=config.steps, stages=stages,
            snapshot=newest.digest, snapshot_step=newest.step,
            step=newest.step if handover is None else handover.step,
            codecs=self._codecs_in_words(),
        )  # fmt: skip
        self._report_books()

    def learn(self, checkpoint: Checkpoint) -> None:
        """The snapshot that our stage was loaded from, now with its ledger; before anything is received."""
        self._state = replace(self._state, snapshots=self._state.snapshots.begin(checkpoint))
        if self._handed_over is None:
            self._state = replace(self._state, ledger=checkpoint.ledger, history=checkpoint.version.history)
        self._period = SnapshotPeriod(began=self._clock(), taken=self._clock(), cost_seconds=self._first_cost)
        self._watched = self._clock()
        self._report_books()

    @property
    def waiting_for(self) -> str:
        """One line for people: why no step is under way or, where the last one was, no snapshot becomes durable; empty where
        neither is so."""
        if self._state.missing:
            return f"waiting for stage {', '.join(map(str, self._state.missing))}"
        if self._state.phase == "gathering":
            return "waiting for all stages to find each other"
        return next((f"stage {stage} {text}" for stage, text in sorted(self._troubles.items())), "")

    @property
    def books(self) -> tuple[Ledger, RunStatistics]:
        """What the next lead needs, if we hand over."""
        return self._state.ledger, self._state.statistics

    @property
    def pace(self) -> Pace | None:
        """None while no step is under way, before a few were committed, and once the job is to end."""
        state = self._state
        if state.phase != "running" or state.stopping or len(self._computed) < PACE_STEPS:
            return None
        return Pace(
            step_seconds=max(self._times[-1] - self._times[-2], self._clock() - self._times[-1]),
            compute_seconds=tuple(median(of_stage) for of_stage in zip(*self._computed, strict=True)),
            steps_left=self._config.steps - state.step,
        )

    @property
    def codecs(self) -> EdgeCodecs:
        """What tensors are sent as, from the next step on at the latest."""
        return self._config.codecs if self._state.codecs is None else self._state.codecs

    @property
    def chosen(self) -> EdgeCodecs | None:
        """The table that the next lead would not know of, if it is no longer than a handover can carry."""
        codecs = self._state.codecs
        length = sum(len(word) for way in codecs or () for word in way)
        return codecs if length <= MAX_HANDOVER_CODECS else None

    def change_codecs(self, codecs: EdgeCodecs) -> None:
        """Send tensors by that table from the next step on."""
        self._event(e.ChangeCodecs(codecs))
        self.update_progress(codecs=self._codecs_in_words())
        log.info("step %d: codecs are %s", self._state.step, self._codecs_in_words())

    def move(self, stage: int, peer: PeerId) -> None:
        """Have the owner of a stage hand it to that peer at a step boundary."""
        self._send(stage, m.Move(peer))

    def stop(self) -> bool:
        """End the job after the step that is under way, with a snapshot. Whether there is one."""
        self._event(e.Stop())
        return self._state.phase == "running"

    def update_progress(self, **fields: object) -> None:
        """Change what the progress says."""
        progress = self.progress.with_fields(**fields)
        if progress != self.progress:
            self.progress = progress
            self._changed()

    def receive(self, stage: int, message: m.Message) -> None:
        """A control message from a stage. ValueError for one that only the lead may send."""
        match message:
            case m.Join():
                self._watch()
                self._look_around()
                self._event(message, stage)
                self._report_books()
            case m.Suspect(waits_for=int(other)):
                self._waits[stage] = other, self._clock()
            case m.Suspect():
                log.info("stage %d: %s", stage, message.text)
                self._event(message, stage)
                self._report_books()
            case m.Ready():
                self._look_at_the_clock()
                if len(self._state.ready) == self._stages - 1:
                    self._look_around()
                self._event(message, stage)
            case m.Evaluated(step, loss):
                if step == self._state.step:  # watchers wait for a later one than they have seen
                    self.update_progress(validation_loss=loss, validation_step=step)
            case m.Shard():
                self._shard(stage, message)
            case m.Held(step, index, trouble):
                self._trouble(stage, step, trouble)
                self._held(stage, step, index)
            case m.Failed():
                log.warning("stage %d failed: %s", stage, message.text)
                self._look_around()
                self._event(message, stage)
            case m.Leaving():
                log.info("the owner of stage %d is leaving", stage)
                self._event(message, stage)
            case m.Lack():
                log.warning("stage %d cannot go back: %s", stage, message.text)
                self._event(message, stage)
            case _:
                raise ValueError(f"{m.kind_of(message)} is for the lead to send")

    @property
    def mark(self) -> Hashable:
        """What changes whenever a stage has brought the job on."""
        state = self._state
        return state.phase, state.attempt, state.step, len(state.ready), tuple(state.here.join_ids.items())

    def culprits(self, waits_for: int | None, since: float, *, all_say_so: bool) -> tuple[int, ...]:
        """The stages of which one has to go, where the step stands still; `waits_for`: for whom our own stage waits. What was said
        before `since` is over."""
        waits = {stage: other for stage, (other, at) in self._waits.items() if at >= since}
        if waits_for is not None and waits_for >= 0:
            waits[0] = waits_for
        return self._state.culprits(waits, all_say_so=all_say_so)

    def replace_idle(self, stage: int, peer: PeerId, term: int) -> None:
        """The step stands still with the owner of that stage: have it leave."""
        self._look_around()
        self._event(e.StandsStill(stage, peer, term))

    @property
    def faults(self) -> Faults:
        """What failed so far at the steps that are not committed."""
        return self._state.faults

    def _look_around(self) -> None:
        """Who holds the stages."""
        # One that has just left is still whose word comes: without its name it would count as another peer each time.
        peers = {**self._state.peers, **self._owners()}
        self._state = replace(self._state, peers=peers)

    # --- steps

    def _event(self, event: e.LeadEvent, stage: int = 0) -> None:
        self._state, actions = lead(self._state, event, stage)
        for action in actions:
            self._act(action)

    def _act(self, action: e.LeadAction) -> None:
        match action:
            case m.Begin(_, step, after, statistics):
                now = self._clock()
                self._times.clear()
                self._times.append(now)
                self._computed.clear()
                self._period = self._period.seen(now, statistics.seconds, statistics.losses).give_up()
                # Whoever was saving may be gone, and the next owner does not know of it.
                self._collector, self._index = Collector(stages=self._stages), None
                self._troubles.clear()
                self._snapshot(after)
                self._everyone(action)
                self.update_progress(step=step, attempts=self._state.count, message="", **self._books())
            case m.Commit():
                self._snapshot(action.after)
                self._everyone(action)
            case m.Discard():
                for stage, *_ in action.give_up:
                    why = [fault.text for fault in action.faults if fault.stage == stage] or [STANDS_STILL]
                    log.warning("stage %d has to go to another peer: %s", stage, why[-1])
                self._everyone(action)
            case m.Hold():
                self._send(action.stage, action)
            case m.Restore(_, checkpoint):
                log.info("not everybody has the state of one step: back to step %d", checkpoint.step)
                self._period = self._period.restored(self._clock())
                self._away = m.NEXT_STAGE  # whose copies everybody makes anew (`StageSnapshots.hold_again`)
                self._everyone(action)
                self._report_books()
            case e.Committed():
                self._committed(action)
            case e.FellBack(lost):
                log.warning(
                    "nobody holds the snapshot of step %d any more: back to the one before", lost.step
                )
            case e.Fail(text):
                self.finish("failed", text)

    def _look_at_the_clock(self) -> None:
        now = self._clock()
        if self._period.overdue(now):
            log.warning("the snapshot of step %d was not held in time", self._collector.step)
            self._period = self._period.give_up_overdue()
            self._event(e.SnapshotLost())
        if self._config.snapshot_every == 0 and self._period.due(now):
            self._event(e.SnapshotDue())

    def _watch(self) -> None:
        """Count the time that this job was watched."""
        now, statistics = self._clock(), self._state.statistics
        statistics = replace(statistics, seconds=statistics.seconds + now - self._watched)
        self._state, self._watched = self._state.count_on(statistics), now

    def _books(self) -> dict[str, object]:
        (ledger, statistics), held = self.books, self._state.snapshots.held
        recent = tuple(pair for pair in statistics.recent if pair[0] < ledger.steps)
        return {
            "samples": ledger.samples, "ledger": ledger.head, "discarded": statistics.discarded,
            "replayed": statistics.replayed, "losses": statistics.losses, "recoveries": statistics.recoveries,
            "recent": recent, "loss": recent[-1][1] if recent else None,
            "snapshot": held.digest, "snapshot_step": held.step,
        }  # fmt: skip

    def _report_books(self) -> None:
        self.update_progress(**self._books())

    def _everyone(self, message: m.Message) -> None:
        # The others first: our own stage starts to compute at once, theirs have a link to cross.
        for stage in (*range(1, self._stages), 0):
            self._send(stage, message)

    def _committed(self, committed: e.Committed) -> None:
        reports = [committed.reports[s] for s in range(self._stages)]
        self._times.append(self._clock())
        took, config = self._times[-1] - self._times[-2], self._config
        self._period = self._period.stepped(took)
        self._computed.append(tuple(_share(r.busy) * took / config.microbatches for r in reports))
        tokens = config.microbatches * config.microbatch_size * max(1, config.sequence)
        seconds = self._times[-1] - self._times[0]
        self.update_progress(
            step=committed.step + 1,
            tokens_per_second=tokens * (len(self._times) - 1) / seconds if seconds > 0 else 0.0,
            busy=tuple(round(report.busy, 4) for report in reports),
            sent_bytes=sum(_payload(report.sent_bytes) for report in reports),
            received_bytes=sum(_payload(report.received_bytes) for report in reports),
            **self._books(),
        )

    def _codecs_in_words(self) -> str:
        return "" if self._config.compression.kind == "none" else in_words(self.codecs, self._edges)

    # --- snapshots

    def _snapshot(self, after: m.After) -> None:
        """Whether everybody is told to save the state of the step that the ledger is of."""
        if after.snapshot:
            self._collector = Collector(
                stages=self._stages, ledger=self._state.ledger, history=self._state.history
            )
            self._index = None
            self._troubles.clear()
            self._period = self._period.ask(self._clock())

    def _trouble(self, stage: int, step: int, text: str) -> None:
        """A stage cannot do its part, or can again."""
        if step == self._collector.step and not self._collector.durable:
            self._troubles.pop(stage, None)
            if text:
                self._troubles[stage] = text[: m.MAX_TROUBLE]
                if stage > 0:  # ours has said so itself
                    log.warning("stage %d %s", stage, self._troubles[stage])

    def _shard(self, stage: int, shard: m.Shard) -> None:
        self._trouble(stage, shard.step, "")
        before = self._collector
        self._collector = before.shard(stage, shard.version, shard.digest, shard.seconds, shard.furthest)
        if self._collector.complete and self._collector.shards != before.shards:
            self._index = None
            self._spawn(self._write_index(self._collector))

    async def _write_index(self, collector: Collector) -> None:
        index = await self._put(encode_index(collector.index(self._job)))
        if self._collector.shards == collector.shards and self._collector.version == collector.version:
            self._index = index
            owners = self._owners()
            self._asked_away = copies_away(self._away, self._collector.furthest, owners, self._stages)
            self._everyone(m.Replicate(collector.step, index, self._asked_away))

    def _held(self, stage: int, step: int, index: Digest) -> None:
        if index != self._index or self._collector.durable:
            return
        self._collector = self._collector.held(stage, step)
        if self._collector.durable:
            self._troubles.clear()
            self._away = self._asked_away
            saved = m.Saved(self._collector.index(self._job).checkpoint(index))
            self._period = self._period.durable(self._clock(), self._collector.seconds)
            self._event(saved)
            self._everyone(saved)
            self.update_progress(snapshot=index, snapshot_step=saved.checkpoint.step)
            if self._state.phase == "running" and self._ends_at(step):
                self.finish("done" if step >= self._config.steps else "stopped")

    def _ends_at(self, step: int) -> bool:
        return step == self._state.step and after(self._config, step, stopping=self._state.stopping).finish

    # --- the end

    def finish(self, state: Literal["done", "stopped", "failed"], text: str = "") -> None:
        """Tell everyone, ourselves included, that the job has ended."""
        if not self._finishing:
            self._finishing = True
            self.update_progress(state=state, error=text[:300], message="")
            # All that is known of the job, but who held as many stages as it may have: we may be killed any moment.
            figures = replace(self.progress, owners=(), busy=())
            self._everyone(m.Finish(state, text[:300], figures))


def _share(said: float) -> float:
    """What another peer said of itself, as a number from 0 to 1."""
    return said if 0 <= said <= 1 else 0.0


def _payload(said: int) -> int:
    """What another peer said of itself, as a number of bytes: those of all stages together have to fit a message."""
    return said if 0 <= said < MOST_BYTES else 0
