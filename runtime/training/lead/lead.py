"""The lead of a job: the owner of stage 0, which holds the data placeholder. Elected like any other stage owner.

The rules of a step are `fusion.runtime.training.step.lead`, pure; this is their shell: messages in and out, and the job's
progress. `StepTimes` measures its speed, `SnapshotCoordinator` has the snapshot under way.
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
from fusion.runtime.training.lead.tuning import codec_summary
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.faults import HOLDS_JOB_UP, Faults
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.runtime.training.step.lead import after, initial_state, lead
from fusion.runtime.training.step.run_statistics import RunStatistics
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

MAX_HANDOVER_CODECS = 8192  # characters of a table that is handed over; the next lead can choose again
MOST_BYTES = 1 << 50  # that one stage may report as sent


class Lead:
    """`send(stage, message)` reaches every stage, the lead's own too, and returns at once; `spawn` starts a task; `put` stores a
    blob; `changed` is called whenever the progress changes; `clock` returns seconds. `owners` returns the current owners by
    stage, `spare` the peers that could take a stage; `faults`: of the job, as this peer remembers them; `state_bytes`: of the
    largest stage.

    `newest` is the snapshot that our stage was loaded from, or knows beside the `handover` that it took over with;
    `samples`: in the training data, None where our stage reads none of it; `edges`: the names of the job's edges."""

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
        begun = initial_state(config, stages, term, newest, handover, samples=samples, faults=faults)
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
        self._counted_until = clock()  # the time up to which the statistics count `seconds`
        self._waits: dict[
            int, tuple[int, float]
        ] = {}  # stage -> the stage that it reported to wait for, and when
        self._finishing = False
        self._edges = edges
        self.progress = Progress(
            job=job, state="running", steps=config.steps, stages=stages,
            snapshot=newest.digest, snapshot_step=newest.step,
            step=newest.step if handover is None else handover.step,
            codecs=self._codec_summary(),
        )  # fmt: skip
        self._report_totals()

    def learn(self, checkpoint: Checkpoint) -> None:
        """The snapshot that our stage was loaded from, now with its ledger. Called before any message is received."""
        self._state = replace(self._state, snapshots=self._state.snapshots.begin(checkpoint))
        if self._handed_over is None:
            self._state = replace(self._state, ledger=checkpoint.ledger, history=checkpoint.version.history)
        self._snapshots.restart()
        self._counted_until = self._clock()
        self._report_totals()

    @property
    def waiting_for(self) -> str:
        """Why no step is running or, once the last one has run, its snapshot is not durable, in one line; empty otherwise."""
        if self._state.missing:
            return f"waiting for stage {', '.join(map(str, self._state.missing))}"
        if self._state.phase == "gathering":
            return "waiting for all stages to find each other"
        return self._snapshots.trouble

    @property
    def totals(self) -> tuple[Ledger, RunStatistics]:
        """The ledger and statistics, which a handover passes to the next lead."""
        return self._state.ledger, self._state.statistics

    @property
    def pace(self) -> Pace | None:
        """None while no step is running, before a few were committed, and once the job is to end."""
        state = self._state
        return self._times.pace(state.step) if state.phase == "running" and not state.stopping else None

    @property
    def codecs(self) -> EdgeCodecs:
        """The codecs of the edges, from the next step on at the latest."""
        return self._config.codecs if self._state.codecs is None else self._state.codecs

    @property
    def chosen(self) -> EdgeCodecs | None:
        """The codecs chosen since the job began, for a handover; None if none were, or they are too long for one."""
        codecs = self._state.codecs
        length = sum(len(text) for edge in codecs or () for text in edge)
        return codecs if length <= MAX_HANDOVER_CODECS else None

    def change_codecs(self, codecs: EdgeCodecs) -> None:
        """Use `codecs` from the next step on."""
        self._event(e.ChangeCodecs(codecs))
        self.update_progress(codecs=self._codec_summary())
        log.info("step %d: codecs are %s", self._state.step, self._codec_summary())

    def move(self, stage: int, peer: PeerId) -> None:
        """Ask the owner of a stage to hand it to `peer` at a step boundary."""
        self._send(stage, m.Move(peer))

    def stop(self) -> bool:
        """End the job after the running step, with a snapshot. Whether one is running."""
        self._event(e.Stop())
        return self._state.phase == "running"

    def update_progress(self, **fields: object) -> None:
        progress = self.progress.with_fields(**fields)
        if progress != self.progress:
            self.progress = progress
            self._changed()

    def receive(self, stage: int, message: m.Message) -> None:
        """A control message from a stage. Raises ValueError for one that only a lead sends."""
        match message:
            case m.Join():
                self._count_seconds()
                self._update_owners()
                self._event(message, stage)
                self._report_totals()
            case m.Suspect(waits_for=int(other)):
                self._waits[stage] = other, self._clock()
            case m.Suspect():
                log.info("stage %d: %s", stage, message.text)
                self._event(message, stage)
                self._report_totals()
            case m.Ready():
                self._check_snapshot_times()
                if len(self._state.ready) == self._stages - 1:
                    self._update_owners()
                self._event(message, stage)
            case m.Evaluated(step, loss):
                if step == self._state.step:  # watchers ignore an earlier step than they have seen
                    self.update_progress(validation_loss=loss, validation_step=step)
            case m.Shard():
                self._snapshots.saved(stage, message)
            case m.Held():
                if (saved := self._snapshots.held(stage, message)) is not None:
                    self._saved(saved)
            case m.Failed():
                log.warning("stage %d failed: %s", stage, message.text)
                self._update_owners()
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
        """Changes whenever a stage makes progress."""
        state = self._state
        return state.phase, state.attempt, state.step, len(state.ready), tuple(state.here.join_ids.items())

    def culprits(self, waits_for: int | None, since: float, *, unanimous: bool) -> tuple[int, ...]:
        """The stages of which one owner is to be replaced, as the step has stalled. `waits_for`: the stage that our own waits for.
        Reports from before `since` are ignored."""
        waits = {stage: other for stage, (other, at) in self._waits.items() if at >= since}
        if waits_for is not None and waits_for >= 0:
            waits[0] = waits_for
        return self._state.culprits(waits, unanimous=unanimous)

    def late_in_snapshot(self, least_seconds: float, *, believed: bool) -> tuple[int, ...]:
        """The stages of which one owner is to be replaced, as a snapshot is not durable after `least_seconds` or more. `believed`: other
        stages would have voted against us if our own shard were invalid."""
        state = self._state
        if state.phase != "running":
            return ()
        moved = {stage for _, stage, peer in state.stood_still if peer != state.peers.get(stage)}
        ending = after(self._config, state.step, stopping=state.stopping).finish
        return self._snapshots.late(least_seconds, moved, ending=ending, believed=believed)

    def replace_idle(self, stage: int, peer: PeerId, term: int) -> None:
        """The step has stalled at that owner of `stage`: tell it to give the stage up."""
        self._update_owners()
        self._event(e.StandsStill(stage, peer, term))

    @property
    def faults(self) -> Faults:
        """Faults at uncommitted steps."""
        return self._state.faults

    def _update_owners(self) -> None:
        # Owners that have left stay: their last messages may still arrive, and must be attributed to the same peer.
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
                self.update_progress(step=step, attempts=self._state.count, message="", **self._totals())
            case m.Commit():
                self._snapshot(action.after)
                self._everyone(action)
            case m.Discard():
                for stage, *_ in action.give_up:
                    why = [fault.text for fault in action.faults if fault.stage == stage] or [HOLDS_JOB_UP]
                    log.warning("stage %d has to go to another peer: %s", stage, why[-1])
                self._everyone(action)
            case m.Hold():
                self._send(action.stage, action)
            case m.Restore(_, checkpoint):
                log.info("not everybody has the state of one step: back to step %d", checkpoint.step)
                self._snapshots.restored()
                self._everyone(action)
                self._report_totals()
            case e.Committed():
                self._committed(action)
            case e.FellBack(lost):
                log.warning(
                    "nobody holds the snapshot of step %d any more: back to the one before", lost.step
                )
            case e.Fail(text):
                self.finish("failed", text)

    def _check_snapshot_times(self) -> None:
        if self._snapshots.give_up_overdue():
            self._event(e.SnapshotLost())
        if self._config.snapshot_every == 0 and self._snapshots.due:
            self._event(e.SnapshotDue())

    def _count_seconds(self) -> None:
        """Add the time since the last call to the statistics."""
        now, statistics = self._clock(), self._state.statistics
        statistics = replace(statistics, seconds=statistics.seconds + now - self._counted_until)
        self._state, self._counted_until = self._state.with_statistics(statistics), now

    def _totals(self) -> dict[str, object]:
        (ledger, statistics), held = self.totals, self._state.snapshots.held
        recent = tuple(pair for pair in statistics.recent if pair[0] < ledger.steps)
        return {
            "samples": ledger.samples, "ledger": ledger.head, "discarded": statistics.discarded,
            "replayed": statistics.replayed, "losses": statistics.losses, "recoveries": statistics.recoveries,
            "recent": recent, "loss": recent[-1][1] if recent else None,
            "snapshot": held.digest, "snapshot_step": held.step,
        }  # fmt: skip

    def _report_totals(self) -> None:
        self.update_progress(**self._totals())

    def _everyone(self, message: m.Message) -> None:
        # Other stages first: their messages have a link to cross, while our own stage starts at once.
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
            **self._totals(),
        )

    def _codec_summary(self) -> str:
        return "" if self._config.compression.kind == "none" else codec_summary(self.codecs, self._edges)

    # --- snapshots

    def _snapshot(self, after: m.After) -> None:
        """Note the snapshot that all stages are about to be asked for, if any."""
        if after.snapshot:
            self._snapshots.request(self._state.ledger, self._state.history)

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


def _payload(reported_bytes: int) -> int:
    """A number of bytes that another peer reported, or 0 where it is out of range: the numbers of all stages have to fit a message."""
    return reported_bytes if 0 <= reported_bytes < MOST_BYTES else 0
