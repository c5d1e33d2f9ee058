"""Carries out a hosted stage's part in the steps: the actions that `fusion.runtime.training.step.stage` decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import replace
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, StageFailed
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.training.compute.device_calls import DeviceCalls
from fusion.runtime.training.compute.inbox import Inbox
from fusion.runtime.training.compute.rad import Rad
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.snapshots.stage_snapshots import StageSnapshots
from fusion.runtime.training.stage_handover import StageHandover
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.history import Version
from fusion.runtime.training.step.stage import StageState, stage
from fusion.runtime.training.streams.partner import Held

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
# What a plane raises for wrong data (a label that the model does not have is an IndexError of torch's) or without memory.
FAILURES = (RuntimeError, ValueError, IndexError, KeyError, TypeError, MemoryError)


class StageWork:
    """`spawn` starts a task that ends with the host; `changed` is called when the stage learns something new of its job."""

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
        self.state = StageState(
            step=loaded.step, history=loaded.version.history, stage=here.stage, term=here.term, incarnation=here.incarnation, faults=loaded.faults, statistics=loaded.statistics
        )  # fmt: skip
        self._context = context
        self.here = here
        self._plane = loaded.plane
        self._codecs = inbox.codecs
        self._outbox = outbox
        self._mailbox, self._partners = outbox.mailbox, outbox.partners
        self._spawn = spawn
        self._changed = changed
        compute, clock = context.compute, context.clock.monotonic
        calls = DeviceCalls(loaded.plan, compute, clock, context.flops_per_second, context.real_pace)
        self._rad = Rad(
            loaded.plan, config, loaded.plane, calls, loaded.batches, inbox, self._partners.post, self._partners.room
        )  # fmt: skip
        self.snapshots = StageSnapshots(
            loaded, inbox.codecs, compute, self._partners.holders, self._send_to_lead, spawn, clock
        )
        self.handover = StageHandover(outbox, self.snapshots)
        self._copied = loaded.files.copied
        self._ends = False  # no further step begins
        self._latest: e.Run | None = None  # the last one started
        self._running: asyncio.Task[None] | None = None
        self._applying: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None

    @property
    def mark(self) -> Hashable:
        """Changes whenever our step makes progress."""
        return self.state.phase, self.state.attempt, self.state.step, self.state.linked, self._rad.mark

    @property
    def waits_for(self) -> int | None:
        """The stage whose tensor a step waits for, while it has nothing to compute here."""
        return self._rad.waits_for

    @property
    def ends(self) -> bool:
        """Whether no further step begins: the job waits for the snapshot of the last one."""
        return self._ends

    @property
    def largest_bytes(self) -> int:
        """The largest tensor that the stage waits for."""
        return self._rad.inbox.largest_bytes

    def learn(self, version: Version) -> None:
        """The version of the loaded state. Called before any event."""
        self.state = replace(self.state, step=version.step, history=version.history)

    async def follow(self, event: e.StageEvent) -> None:
        self.state, actions = stage(self.state, event)
        for action in actions:
            await self._act(action)

    async def _act(self, action: e.StageAction) -> None:
        match action:
            case m.Join():
                self._send_to_lead(
                    replace(action, newest=self.snapshots.newest, before=self.snapshots.before)
                )
            case m.Suspect():
                self._send_to_lead(replace(action, text=self._partners.waiting_for[:300]))
            case m.Ready() | m.Leaving() | m.Lack():
                self._send_to_lead(action)
            case e.Run():
                if self._latest is None or action.attempt != self._latest.attempt:
                    self.snapshots.begin()
                self._latest = action
                self._running = self._spawn(self._run(action, self.state.version))
            case e.Apply(rate, clip):
                state = self.state
                self._context.watch.commits(state.stage, state.attempt, state.step - 1)
                # Queued on the device before anything of the next step; not awaited here.
                self._applying = self._spawn(self._rad.apply(rate, clip))
                self._context.leases.update(self.here.job, self.here.stage, step=self.state.step)
            case e.Drop():
                await self.stop()
                self._rad.inbox.drop()
                await self._codecs.discard()
                await self._context.compute.run(self._plane.discard)
            case e.Load():
                self.snapshots.announce_restore(action.checkpoint)
                before, self._restoring = self._restoring, None
                self._restoring = self._spawn(self._restore(action, before))
            case e.GiveUp(text):
                await self._partners.flush()  # the lead's messages to other stages, where we lead
                raise StageFailed(text)
            case e.HandOver():
                self._spawn(self._hand_over(self.state.version))

    def aside(self, message: m.Replicate | m.Move | m.Saved) -> None:
        """Requests of the lead beside the steps."""
        match message:
            case m.Replicate(step, index, away):
                # When the job ends its launcher leaves, which may hold the only copy of the files we are still to copy.
                self.snapshots.hold(step, index, away, after=self._copied if self._ends else None)
            case m.Move(peer):
                if self._context.takeover is not None:
                    self._context.takeover.give_away(self.here.job, self.here.stage, peer)
            case m.Saved(checkpoint):
                self.snapshots.saved(checkpoint)
                self._changed()

    async def stop(self) -> None:
        """Cancel the running step. A committed one is applied first."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            self._running = None
        if self._applying is not None:  # a committed step must not be lost
            await self._applying
            self._applying = None

    def _send_to_lead(self, message: m.Message) -> None:
        self._outbox.send(0, message)

    async def _run(self, run: e.Run, version: Version) -> None:
        attempt, step, after = run.attempt, version.step, run.after
        self._ends = after.finish
        if after.codecs is not None:
            self._codecs.use(after.codecs)
        try:
            if after.evaluate:
                loss = await self._rad.evaluate(attempt, step)
                if loss is not None:
                    self._send_to_lead(m.Evaluated(step, loss))
            if after.snapshot:
                await self.snapshots.take(version)
            if after.finish:
                return
            ready = await self._rad.step(attempt, step, look=after.look)
        except FAILURES as error:
            if self._rad.answers_for(error):
                await self._fail(run, error)
            raise
        traffic = self._partners
        ready = replace(ready, sent_bytes=traffic.sent_bytes, received_bytes=traffic.received_bytes)
        self._mailbox.put(e.Completed(ready))

    async def _fail(self, run: e.Run, error: Exception) -> None:
        """Our arithmetic failed: this peer gives the stage up, since another may succeed (with more memory, say)."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self._send_to_lead(m.Failed(run.attempt, text))
        await self._partners.flush()

    async def _restore(self, load: e.Load, before: asyncio.Task[None] | None) -> None:
        if before is not None:  # an earlier restore is obsolete
            before.cancel()
            await asyncio.wait([before])
        version = load.checkpoint.version
        event: e.StageEvent = e.Restored(load.attempt, version.step, version.history)
        try:
            await self.snapshots.restore(load.checkpoint)
        except JobError as error:
            event = e.LoadFailed(load.attempt, str(error)[:300])
        self._mailbox.put(event)

    async def _hand_over(self, version: Version) -> None:
        if self._applying is not None:
            await self._applying
        await self.handover.store(version, lambda: self.state.statistics)
