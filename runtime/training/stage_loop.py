"""The event loop of one hosted stage: dispatches each message to the stage's part in the steps or to the lead."""

from __future__ import annotations

import logging

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.stage_work import StageWork
from fusion.runtime.training.stall_watch import StallWatch
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.faults import Faults
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)


class StageLoop:
    """`steps`: of the job."""

    def __init__(self, context: Context, job: JobId, outbox: Outbox, work: StageWork, steps: int) -> None:
        self.finished: m.Finish | None = None  # how the job has ended
        self._context = context
        self._job = job
        self._led: PeerId | None = None  # the lead of the last committed step
        self._given_up: PeerId | None = (
            None  # the last lead that reported the job as failed, and was not believed
        )
        self._outbox = outbox
        self._work = work
        self._steps = steps
        self._stalls = StallWatch(context, work, outbox)

    @property
    def faults(self) -> Faults:
        """Faults at uncommitted steps, as reported by the lead."""
        lead = self._outbox.lead
        return self._work.state.faults if lead is None else lead.faults

    async def watch(self) -> None:
        """Detect stalled steps; runs concurrently with `run`. Never returns."""
        await self._stalls.run()

    async def run(self) -> None:
        """Run until the job has ended. Raises JobFailed."""
        while True:
            source, event = await self._outbox.mailbox.get()
            match event:
                case m.Finish() if not self._is_over(event):
                    # Any peer that claimed a vacant first stage can send this. If true, the author or other leads will confirm it.
                    log.warning("the lead reports the job as %s: not confirmed yet", event.state)
                case m.Finish():
                    await self._work.stop()
                    self.finished = event
                    if event.state == "failed":
                        raise JobFailed(event.text)
                    return
                case m.Replicate() | m.Move() | m.Saved():
                    self._work.aside(event)
                case _ if isinstance(event, m.ToLead):
                    assert self._outbox.lead is not None
                    self._outbox.lead.receive(source, event)
                case _:
                    self._stalls.receive(event)
                    step = self._work.state.step
                    await self._work.follow(event)
                    if isinstance(event, m.Commit):
                        if self._work.state.step > step:
                            self._stalls.committed()
                        self._led = self._context.leases.known_holder(self._job, 0)

    def _is_over(self, end: m.Finish) -> bool:
        """Whether to believe the lead that the job has ended. "stopped" is believed only of the author, in the job's record; "failed" of
        a lead that the author chose or that has led a step, or of two leads in a row."""
        if self._outbox.lead is not None:
            return True
        if end.state == "done":
            named = None if end.progress is None else end.progress.snapshot
            step = self._work.state.step
            return step >= self._steps and self._work.snapshots.has_part(named, step)
        if end.state != "failed":
            return False
        leader, before = self._leader, self._given_up
        self._given_up = leader
        if leader is None:
            return False
        law = self._context.access.law(self._job)
        chosen = law is not None and leader in law.chosen
        return chosen or leader == self._led or before not in (None, leader)

    @property
    def _leader(self) -> PeerId | None:
        return self._context.leases.known_holder(self._job, 0)
