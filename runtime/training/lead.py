"""The lead of a job: the owner of stage 0, which holds the data placeholder. Elected like any other stage owner.

The rules of a step are `fusion.runtime.training.step.lead` and those of a snapshot `fusion.runtime.training.snapshot.Collector`, both
pure; here they meet messages, the blobs of snapshot indices, and the figures that people watch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Literal

from fusion.runtime.job import TrainConfig
from fusion.runtime.progress import RECENT, Progress
from fusion.runtime.training import messages as m
from fusion.runtime.training import step as steps
from fusion.runtime.training.snapshot import Collector, encode_index
from fusion.swarm.records import Digest, JobId, one_line

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # of one step, at any stage, before the job fails
SPEED_STEPS = 8  # the speed shown is that of so many steps


class Lead:
    """`send(stage, message)` reaches every stage, the lead's own too, and returns at once; `spawn` runs a coroutine
    beside the loop; `put` stores a blob; `changed` is called when the progress did."""

    def __init__(
        self,
        job: JobId,
        config: TrainConfig,
        stages: int,
        term: int,
        newest: m.Point,
        *,
        send: Callable[[int, m.Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        put: Callable[[bytes], Awaitable[Digest]],
        changed: Callable[[], None],
    ) -> None:
        self.losses: list[tuple[int, float]] = []  # (step, loss) of the steps that this lead committed
        self.newest = newest
        self._job = job
        self._config = config
        self._stages = stages
        self._send = send
        self._spawn = spawn
        self._put = put
        self._changed = changed
        self._state = steps.LeadState(config=config, stages=stages, term=term)
        self._collector = Collector(stages=stages)
        self._index: Digest | None = None
        self._failures = 0
        self._finishing = False
        self._times: deque[float] = deque(maxlen=SPEED_STEPS + 1)
        self.progress = Progress(
            job=job, state="running", steps=config.steps, stages=stages,
            snapshot=newest.digest, snapshot_step=newest.step, step=newest.step,
        )  # fmt: skip

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that have not joined."""
        return self._state.missing

    def stop(self) -> None:
        """End the job after the step that is under way, with a snapshot."""
        self._event(steps.Stop())

    def tell(self, **fields: object) -> None:
        """Change what the progress says."""
        # What another peer said ends up here too, and a record carries only clean lines.
        clean = {name: one_line(value) if isinstance(value, str) else value for name, value in fields.items()}
        progress = replace(self.progress, **clean)  # type: ignore[arg-type]
        if progress != self.progress:
            self.progress = progress
            self._changed()

    def receive(self, stage: int, message: m.Message) -> None:
        """A control message from a stage. ValueError for one that only the lead may send."""
        match message:
            case m.JoinMessage(step=step, newest=newest):
                if (newest.step, newest.digest or "") > (self.newest.step, self.newest.digest or ""):
                    self._set_newest(newest)
                self._event(steps.Joined(stage, step))
            case m.SuspectMessage(text=text):
                log.info("stage %d: %s", stage, text)
                self._event(steps.Lost(stage))
            case m.ReadyMessage(attempt=attempt, step=step, report=report):
                self._event(steps.Ready(stage, attempt, step, report))
            case m.EvaluatedMessage(step=step, loss=loss):
                self.tell(validation_loss=loss, validation_step=step)
            case m.ShardMessage(step=step, digest=digest):
                self._shard(stage, step, digest)
            case m.HeldMessage(step=step, index=index):
                self._held(stage, step, index)
            case m.FailedMessage(text=text):
                self._failed(stage, text)
            case _:
                raise ValueError(f"{type(message).__name__} is for the lead to send")

    # --- steps

    def _event(self, event: steps.LeadEvent) -> None:
        self._state, actions = steps.lead(self._state, event)
        for action in actions:
            self._act(action)

    def _act(self, action: steps.LeadAction) -> None:
        match action:
            case steps.Begin(attempt, step, after):
                self._times.clear()
                self._times.append(time.monotonic())
                if after.snapshot:  # every stage will save this step, again if it has before
                    self._collector, self._index = Collector(stages=self._stages), None
                self._everyone(m.BeginMessage(attempt=attempt, step=step, after=after))
                self.tell(step=step, attempts=self._state.count, message="")
            case steps.Commit(attempt, step, rate, clip, after):
                self._everyone(
                    m.CommitMessage(
                        attempt=attempt, step=step, learning_rate=rate, clip_factor=clip, after=after
                    )
                )
            case steps.Committed():
                self._committed(action)
            case steps.Discard(attempt):
                self._everyone(m.DiscardMessage(attempt=attempt))
            case steps.Restore():
                log.info("the stages are at unlike steps: back to step %d", self.newest.step)
                self._everyone(m.RestoreMessage(point=self.newest))
            case steps.Fail(message):
                self.finish("failed", message)

    def _everyone(self, message: m.Message) -> None:
        # The others first: our own stage starts to compute at once, theirs have a link to cross.
        for stage in (*range(1, self._stages), 0):
            self._send(stage, message)

    def _committed(self, committed: steps.Committed) -> None:
        reports = [committed.reports[s] for s in range(self._stages)]
        loss = next((report.loss for report in reports if report.loss is not None), None)
        self._failures = 0
        self._times.append(time.monotonic())
        config = self._config
        tokens = config.microbatches * config.microbatch_size * max(1, config.sequence)
        seconds = self._times[-1] - self._times[0]
        recent = self.progress.recent
        if loss is not None:
            self.losses.append((committed.step, loss))
            recent = (*(r for r in recent if r[0] < committed.step), (committed.step, loss))[-RECENT:]
        self.tell(
            step=committed.step + 1,
            loss=loss,
            recent=recent,
            tokens_per_second=tokens * (len(self._times) - 1) / seconds if seconds > 0 else 0.0,
            busy=tuple(round(report.busy, 4) for report in reports),
            sent_bytes=sum(report.sent_bytes for report in reports),
            received_bytes=sum(report.received_bytes for report in reports),
        )

    def _failed(self, stage: int, text: str) -> None:
        self._failures += 1
        log.warning("stage %d failed: %s", stage, text)
        self._event(steps.Lost(stage))
        if self._failures >= MAX_FAILURES:
            self.finish("failed", f"stage {stage}: {text}")

    # --- snapshots

    def _shard(self, stage: int, step: int, digest: Digest) -> None:
        before = self._collector
        self._collector = before.shard(stage, step, digest)
        if self._collector.complete and self._collector != before:
            self._index = None
            self._spawn(self._write_index(self._collector))

    async def _write_index(self, collector: Collector) -> None:
        index = await self._put(encode_index(collector.index(self._job)))
        if self._collector.shards == collector.shards and self._collector.step == collector.step:
            self._index = index
            self._everyone(m.ReplicateMessage(step=collector.step, index=index))

    def _held(self, stage: int, step: int, index: Digest) -> None:
        if index != self._index:
            return
        self._collector = self._collector.held(stage, step)
        if self._collector.durable:
            self._set_newest(m.Point(step=step, digest=index))
            self._everyone(m.SavedMessage(point=self.newest))
            if self._state.phase == "running" and self._ends_at(step):
                self.finish("done" if step >= self._config.steps else "stopped")

    def _ends_at(self, step: int) -> bool:
        return (
            step == self._state.step and steps.after(self._config, step, stopping=self._state.stopping).finish
        )

    def _set_newest(self, point: m.Point) -> None:
        self.newest = point
        self.tell(snapshot=point.digest, snapshot_step=point.step)

    # --- the end

    def finish(self, state: Literal["done", "stopped", "failed"], text: str = "") -> None:
        """Tell everyone, ourselves included, that the job has ended."""
        if not self._finishing:
            self._finishing = True
            self._everyone(m.FinishMessage(state=state, text=text[:300]))
            self.tell(state=state, error=text[:300], message="")
