"""The loop of one hosted stage: message by message, to its part in the steps or to the lead."""

from __future__ import annotations

from fusion.runtime.job.errors import JobFailed
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.stage_work import StageWork
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step import protocol as steps


class StageLoop:
    def __init__(self, outbox: Outbox, work: StageWork) -> None:
        self.finished: m.FinishMessage | None = None  # how the job has ended
        self._outbox = outbox
        self._work = work

    async def run(self) -> None:
        """Until the job has ended. Raises JobFailed."""
        while True:
            source, event = await self._outbox.mailbox.get()
            match event:
                case m.FinishMessage():
                    await self._work.stop()
                    self.finished = event
                    if event.state == "failed":
                        raise JobFailed(event.text)
                    return
                case m.BeginMessage(attempt=attempt, step=step, after=after, tally=tally):
                    await self._work.follow(steps.Begin(attempt, step, after, tally))
                case m.CommitMessage(
                    attempt=attempt, step=step, learning_rate=rate, clip_factor=clip, after=after
                ):
                    await self._work.follow(steps.Commit(attempt, step, rate, clip, after))
                case m.DiscardMessage(attempt=attempt):
                    await self._work.follow(steps.Discard(attempt))
                case m.HoldMessage(attempt=attempt, stage=stage, entry=entry):
                    await self._work.follow(steps.Hold(attempt, stage, entry))
                case m.RestoreMessage(attempt=attempt, point=point):
                    await self._work.follow(steps.Restore(attempt, point))
                case m.ReplicateMessage() | m.MoveMessage() | m.SavedMessage():
                    self._work.aside(event)
                case (
                    steps.Linked() | steps.Unlinked() | steps.Completed() | steps.Restored() | steps.LoadFailed()
                    | steps.Leave() | steps.Stay()
                ):  # fmt: skip
                    await self._work.follow(event)
                case _:
                    assert self._outbox.lead is not None
                    self._outbox.lead.receive(source, event)  # type: ignore[arg-type]
