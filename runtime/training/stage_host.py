"""One stage of a training job on this peer: its loop of messages in, computation, messages out.

    walk of a microbatch:  data -> rad -> (plane) -> neighbours -> the next stage's inbox -> ... -> loss -> back
    walk of a step:        rad completes -> ready -> lead -> commit -> apply -> the next step

What follows from what is decided by `fusion.runtime.training.step.stage`; this shell carries it out, one event at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusion.runtime.context import Context
from fusion.runtime.data import Batches
from fusion.runtime.errors import JobError, JobFailed
from fusion.runtime.job import TrainConfig
from fusion.runtime.planes.plane import TrainingStage
from fusion.runtime.progress import Progress
from fusion.runtime.training import messages as m
from fusion.runtime.training import step as steps
from fusion.runtime.training.inbox import Plan
from fusion.runtime.training.lead import Lead
from fusion.runtime.training.neighbours import Neighbours
from fusion.runtime.training.rad import Rad
from fusion.runtime.training.stage_files import StageFiles
from fusion.swarm.errors import StaleTerm, SwarmError
from fusion.swarm.records import Digest, JobId
from fusion.swarm.transport import Frame, PeerId, Stream

log = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
WAIT_SECONDS = 1.0  # how often what we wait for is put in words

_FROM_LEAD = (
    m.BeginMessage, m.CommitMessage, m.DiscardMessage, m.RestoreMessage, m.ReplicateMessage, m.SavedMessage,
    m.FinishMessage,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A stage in memory: its part of the plan, its arithmetic, its data, its blobs, and what state it is in."""

    plan: Plan
    plane: TrainingStage
    batches: Batches
    files: StageFiles
    start: m.Point


class TrainingHost:
    """`run` returns when the job has ended, raises JobFailed when it failed, and the stage's own error when this peer
    cannot go on with it. `changed` is called when `progress` did."""

    def __init__(
        self,
        context: Context,
        job: JobId,
        config: TrainConfig,
        term: int,
        loaded: Loaded,
        changed: Callable[[], None],
    ) -> None:
        plan = loaded.plan
        self.job, self.stage, self.term = job, plan.stage.index, term
        self.newest = loaded.start
        self._context = context
        self._config = config
        self._plan = plan
        self._plane = loaded.plane
        self._files = loaded.files
        self._changed = changed
        self._state = steps.StageState(step=loaded.start.step)
        self._events: asyncio.Queue[tuple[int, m.Message | steps.StageEvent]] = asyncio.Queue()
        self._neighbours = Neighbours(
            context, job, self.stage, term, plan.partners, self._deliver, self._link_changed
        )
        self._rad = Rad(plan, config, loaded.plane, context.compute, loaded.batches, self._send_tensor)
        self._work: asyncio.Task[None] | None = None
        self._apply: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self.lead: Lead | None = None
        if self.stage == 0:
            self.lead = Lead(
                job, config, plan.stages, term, loaded.start,
                send=self._send, spawn=self._spawn, put=loaded.files.put, changed=changed,
            )  # fmt: skip

    @property
    def progress(self) -> Progress:
        """The lead's figures; on another stage, what it knows itself."""
        if self.lead is not None:
            return self.lead.progress
        return Progress(
            job=self.job, state="running", step=self._state.step, steps=self._config.steps,
            stages=self._plan.stages, snapshot=self.newest.digest, snapshot_step=self.newest.step,
        )  # fmt: skip

    def stop(self) -> None:
        """The lead only: end the job after the step under way."""
        if self.lead is not None:
            self.lead.stop()

    async def accept(self, stream: Stream, hello: m.Hello) -> None:
        await self._neighbours.accept(stream, hello)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._neighbours.run(), name=f"streams of stage {self.stage}")
                group.create_task(self._explain_waiting())
                group.create_task(self._files.hold_copies())
                try:
                    await self._loop()
                finally:
                    await self._neighbours.finish(FLUSH_SECONDS)
                raise _Ended
        except BaseExceptionGroup as errors:
            first = _first(errors)
            if not isinstance(first, _Ended):
                raise first from None
        finally:
            self._group = None

    # --- events

    async def _loop(self) -> None:
        while True:
            source, event = await self._events.get()
            match event:
                case m.FinishMessage(state=state, text=text):
                    await self._stop_work()
                    if state == "failed":
                        raise JobFailed(text)
                    return
                case m.BeginMessage(attempt=attempt, step=step, after=after):
                    await self._event(steps.Begin(attempt, step, after))
                case m.CommitMessage(
                    attempt=attempt, step=step, learning_rate=rate, clip_factor=clip, after=after
                ):
                    await self._event(steps.Commit(attempt, step, rate, clip, after))
                case m.DiscardMessage(attempt=attempt):
                    await self._event(steps.Discard(attempt))
                case m.RestoreMessage(point=point):
                    self.newest = point
                    await self._event(steps.Restore())
                case m.ReplicateMessage(step=step, index=index):
                    self._spawn(self._replicate(step, index))
                case m.SavedMessage(point=point):
                    self.newest = point
                    self._spawn(self._files.forget_before(point))
                    self._changed()
                case steps.Linked() | steps.Unlinked() | steps.Completed() | steps.Restored():
                    await self._event(event)
                case _:
                    assert self.lead is not None
                    self.lead.receive(source, event)  # type: ignore[arg-type]

    async def _event(self, event: steps.StageEvent) -> None:
        self._state, actions = steps.stage(self._state, event)
        for action in actions:
            await self._act(action)

    async def _act(self, action: steps.StageAction) -> None:
        match action:
            case steps.Join(step):
                self._send(0, m.JoinMessage(step=step, newest=self.newest))
            case steps.Suspect():
                self._send(0, m.SuspectMessage(text=self._neighbours.waiting_for[:300]))
            case steps.Run(attempt, step, after):
                self._work = self._spawn(self._run(attempt, step, after))
            case steps.SendReady(attempt, step, report):
                self._send(0, m.ReadyMessage(attempt=attempt, step=step, report=report))
            case steps.Apply(rate, clip):
                # Queued on the device before anything of the next step is; nobody waits for it here.
                self._apply = self._spawn(self._context.compute.run(self._plane.apply, rate, clip))
                self._context.leases.update(self.job, self.stage, step=self._state.step)
            case steps.Drop():
                await self._stop_work()
                self._rad.inbox.drop()
                await self._context.compute.run(self._plane.discard)
            case steps.Load():
                self._spawn(self._restore(self.newest))

    async def _stop_work(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
            self._work = None
        if self._apply is not None:  # committed: it must not be lost
            await self._apply
            self._apply = None

    # --- work

    async def _run(self, attempt: steps.Attempt, step: int, after: steps.After) -> None:
        try:
            if after.evaluate:
                loss = await self._rad.evaluate(attempt, step)
                if loss is not None:
                    self._send(0, m.EvaluatedMessage(step=step, loss=loss))
            if after.snapshot:
                await self._snapshot(step)
            if after.finish:
                return
            report = await self._rad.step(attempt, step)
        except (RuntimeError, ValueError, MemoryError) as error:
            if await self._fail(error):
                raise
            return
        traffic = self._neighbours
        report = steps.Report(
            squared_norm=report.squared_norm, loss=report.loss, busy=report.busy,
            sent_bytes=traffic.sent_bytes, received_bytes=traffic.received_bytes,
        )  # fmt: skip
        self._events.put_nowait((self.stage, steps.Completed(attempt, step, report)))

    async def _fail(self, error: Exception) -> bool:
        """Our arithmetic failed. Whether this peer should give the stage up: another may have more luck (memory,
        say). What fails at the lead for another reason fails the job."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if self.lead is not None and not isinstance(error, MemoryError):
            self.lead.finish("failed", f"stage 0: {text}")
            return False
        self._send(0, m.FailedMessage(text=text))
        await self._neighbours.flush(FLUSH_SECONDS)
        return True

    async def _snapshot(self, step: int) -> None:
        state = await self._context.compute.run(self._plane.state)
        if self._saving is not None:
            await self._saving
        self._saving = self._spawn(self._save(step, state))

    async def _save(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        try:
            digest = await self._files.save(step, state)
        except (SwarmError, OSError) as error:
            log.warning("stage %d could not save step %d: %s", self.stage, step, error)
            return
        self._send(0, m.ShardMessage(step=step, digest=digest))

    async def _replicate(self, step: int, index: Digest) -> None:
        try:
            await self._files.replicate(index, self._owners())
        except (SwarmError, JobError) as error:
            log.warning("stage %d could not hold the snapshot of step %d: %s", self.stage, step, error)
            return
        self._send(0, m.HeldMessage(step=step, index=index))

    async def _restore(self, point: m.Point) -> None:
        state = await self._files.load(point, self._owners())
        await self._context.compute.run(self._plane.load_state, state)
        self._events.put_nowait((self.stage, steps.Restored(point.step)))

    # --- messages

    def _send(self, target: int, message: m.Message) -> None:
        if target == self.stage:
            self._events.put_nowait((target, message))
        else:
            self._neighbours.post(target, *m.encode(message, self.term))

    def _send_tensor(self, target: int, kind: str, header: Mapping[str, Any], payload: Any) -> None:
        self._neighbours.post(target, kind, {**header, "term": self.term}, payload)

    def _deliver(self, source: int, frame: Frame) -> None:
        if frame.kind in m.TENSOR_KINDS:
            self._rad.inbox.offer(source, frame)
            return
        message = m.decode(frame)
        if isinstance(message, _FROM_LEAD) != (source == 0) or (self.stage != 0 and source != 0):
            raise StaleTerm(f"stage {source} may not send {frame.kind} to stage {self.stage}")
        self._events.put_nowait((source, message))

    def _link_changed(self, linked: bool) -> None:
        self._events.put_nowait((self.stage, steps.Linked() if linked else steps.Unlinked()))
        self._tell_owners()

    def _tell_owners(self) -> None:
        if self.lead is not None and not self.lead.progress.finished:
            owners: dict[int, PeerId] = self._owners()
            self.lead.tell(owners=tuple(owners.get(s) for s in range(self._plan.stages)))

    def _owners(self) -> dict[int, PeerId]:
        return {**self._neighbours.owners, self.stage: self._context.peer_id}

    async def _explain_waiting(self) -> None:
        while True:
            await asyncio.sleep(WAIT_SECONDS)
            if self.lead is not None and not self.lead.progress.finished:
                missing = ", ".join(map(str, self.lead.missing))
                waiting = self._neighbours.waiting_for or (f"waiting for stage {missing}" if missing else "")
                self.lead.tell(message=waiting[:300])

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        assert self._group is not None
        return self._group.create_task(work)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first; JobFailed, if it is among them, says it best."""
    leaves: list[BaseException] = []
    for error in errors.exceptions:
        leaves += [_first(error)] if isinstance(error, BaseExceptionGroup) else [error]
    return next((leaf for leaf in leaves if isinstance(leaf, JobFailed)), leaves[0])


class _Ended(Exception):
    """Ends the task group of a host whose job has ended."""
