"""The loop of one hosted stage: message by message, to its part in the steps or to the lead."""

from __future__ import annotations

import logging

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.stage_work import StageWork
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.faults import Faults

log = logging.getLogger(__name__)


class StageLoop:
    """Of a job of so many `steps`."""

    def __init__(self, outbox: Outbox, work: StageWork, steps: int) -> None:
        self.finished: m.Finish | None = None  # how the job has ended
        self._outbox = outbox
        self._work = work
        self._steps = steps

    @property
    def faults(self) -> Faults:
        """What failed so far at the steps that are not committed, as the lead says."""
        lead = self._outbox.lead
        return self._work.state.faults if lead is None else lead.faults

    async def run(self) -> None:
        """Until the job has ended. Raises JobFailed."""
        while True:
            source, event = await self._outbox.mailbox.get()
            match event:
                case m.Finish(state="done") if self._work.state.step < self._steps:
                    # Whoever came to a vacant first stage may say so. If it is true, we hear it of the other owners.
                    log.warning(
                        "the lead says that the job is done: we are at step %d", self._work.state.step
                    )
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
                    await self._work.follow(event)
