"""A hosted stage's part in the steps: what follows from an event by `fusion.runtime.training.step.stage`, carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.training.compute.inbox import Inbox
from fusion.runtime.training.compute.rad import Rad
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.snapshots.stage_snapshots import StageSnapshots
from fusion.runtime.training.stage_handover import StageHandover
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step import protocol as steps
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.streams.partner import Held

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class StageWork:
    """`spawn` starts a task that ends with the host; `changed` is called when what the stage knows of its job did."""

    def __init__(
        self,
        context: Context,
        here: Held,
        config: TrainConfig,
        loaded: Loaded,
        inbox: Inbox,
        outbox: Outbox,
        *,
        spawn: Spawn,
        changed: Callable[[], None],
    ) -> None:
        self.state = steps.StageState(
            step=loaded.step, stage=here.stage, term=here.term, host=here.incarnation, tally=loaded.statistics
        )
        self._context = context
        self._here = here
        self._plane = loaded.plane
        self._codecs = inbox.codecs
        self._outbox = outbox
        self._mailbox, self._partners = outbox.mailbox, outbox.partners
        self._spawn = spawn
        self._changed = changed
        compute, clock = context.compute, context.clock.monotonic
        self._rad = Rad(
            loaded.plan, config, loaded.plane, compute, loaded.batches, inbox, self._partners.post, clock
        )
        self.snapshots = StageSnapshots(
            loaded, inbox.codecs, compute, self._partners.holders, self._tell, spawn, clock
        )
        self.handover = StageHandover(outbox, self.snapshots)
        self._running: asyncio.Task[None] | None = None
        self._applying: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._lacked = ""  # why the last restore failed

    async def follow(self, event: steps.StageEvent) -> None:
        self.state, actions = steps.stage(self.state, event)
        for action in actions:
            await self._act(action)

    async def _act(self, action: steps.StageAction) -> None:
        match action:
            case steps.Join(step, entry, links, attempt, abandoned, tally):
                join = m.JoinMessage(
                    step=step, newest=self.snapshots.newest, before=self.snapshots.before, entry=entry,
                    links=links, attempt=attempt, abandoned=abandoned, tally=tally,
                )  # fmt: skip
                self._tell(join)
            case steps.Suspect(entry):
                self._tell(m.SuspectMessage(text=self._partners.waiting_for[:300], entry=entry))
            case steps.Run(attempt, step, after):
                self._running = self._spawn(self._run(attempt, step, after))
            case steps.SendReady(attempt, step, report):
                self._tell(m.ReadyMessage(attempt=attempt, step=step, report=report))
            case steps.Apply(rate, clip):
                self._codecs.commit()
                # Queued on the device before anything of the next step is; nobody waits for it here.
                self._applying = self._spawn(self._context.compute.run(self._plane.apply, rate, clip))
                self._context.leases.update(self._here.job, self._here.stage, step=self.state.step)
            case steps.Drop():
                await self.stop()
                self._rad.inbox.drop()
                await self._codecs.discard()
                await self._context.compute.run(self._plane.discard)
            case steps.Load(attempt, point):
                self.snapshots.go_back(point)
                before, self._restoring = self._restoring, None
                self._restoring = self._spawn(self._restore(attempt, point, before))
            case steps.SendLeaving(entry):
                self._tell(m.LeavingMessage(entry=entry))
            case steps.Lack(attempt):
                self._tell(m.LackMessage(attempt=attempt, text=self._lacked[:300]))
            case steps.HandOver(step):
                self._spawn(self._hand_over(step))

    def aside(self, message: m.ReplicateMessage | m.MoveMessage | m.SavedMessage) -> None:
        """What the lead asks for beside the steps."""
        match message:
            case m.ReplicateMessage(step=step, index=index):
                self._spawn(self.snapshots.replicate(step, index))
            case m.MoveMessage(peer=peer):
                if self._context.succession is not None:
                    self._context.succession.give_away(self._here.job, self._here.stage, peer)
            case m.SavedMessage(point=point):
                self.snapshots.saved(point)
                self._changed()

    async def stop(self) -> None:
        """The step under way goes no further; what was committed is applied."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            self._running = None
        if self._applying is not None:  # committed: it must not be lost
            await self._applying
            self._applying = None

    def _tell(self, message: m.Message) -> None:
        """The lead."""
        self._outbox.send(0, message)

    async def _run(self, attempt: steps.Attempt, step: int, after: steps.After) -> None:
        if after.wires is not None:
            self._codecs.use(after.wires)
        try:
            if after.evaluate:
                loss = await self._rad.evaluate(attempt, step)
                if loss is not None:
                    self._tell(m.EvaluatedMessage(step=step, loss=loss))
            if after.snapshot:
                await self.snapshots.take(step)
            if after.finish:
                return
            report = await self._rad.step(attempt, step)
        except (RuntimeError, ValueError, MemoryError) as error:
            if await self._fail(attempt, error):
                raise
            return
        traffic = self._partners
        report = replace(report, sent_bytes=traffic.sent_bytes, received_bytes=traffic.received_bytes)
        self._mailbox.put(steps.Completed(attempt, step, report))

    async def _fail(self, attempt: steps.Attempt, error: Exception) -> bool:
        """Our arithmetic failed. Whether this peer should give the stage up: another may have more luck (memory,
        say). What fails at the lead for another reason fails the job."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if self._outbox.lead is not None and not isinstance(error, MemoryError):
            self._outbox.lead.finish("failed", f"stage 0: {text}")
            return False
        self._tell(m.FailedMessage(text=text, attempt=attempt))
        await self._partners.flush()
        return True

    async def _restore(
        self, attempt: steps.Attempt, point: Checkpoint, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:  # its point is not the one to go back to any more
            before.cancel()
            await asyncio.wait([before])
        event: steps.StageEvent = steps.Restored(attempt, point.step)
        try:
            await self.snapshots.restore(point)
        except JobError as error:
            self._lacked = str(error)
            event = steps.LoadFailed(attempt)
        self._mailbox.put(event)

    async def _hand_over(self, step: int) -> None:
        if self._applying is not None:
            await self._applying
        await self.handover.store(step, lambda: self.state.tally)
