"""The lead of a job: the owner of stage 0, which holds the data placeholder. Elected like any other stage owner.

The rules of a step are `fusion.runtime.training.step.lead`, pure; here they meet messages and the figures that people watch. How fast the job is
is known to `StepTimes`, the snapshot under way to `SnapshotCoordinator`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from fusion.runtime.job.manifest import EdgeCodecs, TrainConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.lead.snapshot_coordinator import SnapshotCoordinator
from fusion.runtime.training.lead.step_times import Pace, StepTimes
from fusion.runtime.training.lead.tuning import in_words
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

MAX_HANDOVER_CODECS = 8192  # characters of a table that is handed on; the next lead can choose anew
MOST_BYTES = 1 << 50  # that one stage may say it has sent


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
        self._handed_over = handover
        self._config = config
        self._stages = stages
        self._send = send
        self._changed = changed
        self._clock = clock
        self._owners = owners
        begun = first_state(config, stages, term, newest, handover, samples=samples, faults=faults)
        self._state = replace(begun, spare=spare)
        self._snapshots = SnapshotCoordinator(
            job,
            stages,
            state_bytes,
            everyone=self._everyone,
            spawn=spawn,
            put=put,
            owners=owners,
            clock=clock,
        )
        self._times = StepTimes(config, clock)
        self._watched = clock()  # until when the statistics counts the seconds
        self._waits: dict[int, tuple[int, float]] = {}  # stage -> whom it said that it waits for, and when
        self._finishing = False
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
        self._snapshots.restart()
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
        return self._snapshots.trouble

    @property
    def books(self) -> tuple[Ledger, RunStatistics]:
        """What the next lead needs, if we hand over."""
        return self._state.ledger, self._state.statistics

    @property
    def pace(self) -> Pace | None:
        """None while no step is under way, before a few were committed, and once the job is to end."""
        state = self._state
        return self._times.pace(state.step) if state.phase == "running" and not state.stopping else None

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
                self._snapshots.saved(stage, message)
            case m.Held():
                if (saved := self._snapshots.held(stage, message)) is not None:
                    self._saved(saved)
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
                self._times.begin()
                self._snapshots.begun(statistics)
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
                self._snapshots.restored()
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
        if self._snapshots.give_up_overdue():
            self._event(e.SnapshotLost())
        if self._config.snapshot_every == 0 and self._snapshots.due:
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
        self._snapshots.stepped(self._times.committed([report.busy for report in reports]))
        self.update_progress(
            step=committed.step + 1,
            tokens_per_second=self._times.tokens_per_second,
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
            self._snapshots.ask(self._state.ledger, self._state.history)

    def _saved(self, saved: m.Saved) -> None:
        step = saved.checkpoint.step
        self._event(saved)
        self._everyone(saved)
        self.update_progress(snapshot=saved.checkpoint.digest, snapshot_step=step)
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


def _payload(said: int) -> int:
    """What another peer said of itself, as a number of bytes: those of all stages together have to fit a message."""
    return said if 0 <= said < MOST_BYTES else 0
