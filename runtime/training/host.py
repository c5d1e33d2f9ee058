"""One stage of a training job on this peer: its loop of messages in, computation, messages out.

    walk of a microbatch:  data -> rad -> (plane) -> partners -> the next stage's inbox -> ... -> loss -> back
    walk of a step:        rad completes -> ready -> lead -> commit -> apply -> the next step

What follows from what is decided by `fusion.runtime.training.step.protocol.stage`; this shell carries it out, one event at a time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.placing.codec_choice import edges_of
from fusion.runtime.training.compute.inbox import Inbox
from fusion.runtime.training.compute.rad import Rad
from fusion.runtime.training.compute.stage_codecs import StageCodecs
from fusion.runtime.training.data.ledger import UNTRAINED
from fusion.runtime.training.lead.lead import Lead
from fusion.runtime.training.lead.tuner import Tuner
from fusion.runtime.training.lead.tuning import job_of
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.snapshots.stage_snapshots import StageSnapshots
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step import protocol as steps
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.runtime.training.streams.partner import Held
from fusion.runtime.training.streams.partners import Partners
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import StaleTerm, SwarmError
from fusion.swarm.transport import PeerId, Stream

log = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
WAIT_SECONDS = 1.0  # how often what we wait for is put in words


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
        self.newest, self.before = loaded.start, START
        self._context = context
        self._config = config
        self._plan = plan
        self._plane = loaded.plane
        self._files = loaded.files
        self._changed = changed
        self._final: Progress | None = None  # as the lead told it
        self._baton = loaded.baton
        host = int(secrets.token_hex(7), 16)
        self._state = steps.StageState(step=loaded.step, stage=self.stage, term=term, host=host)
        if loaded.baton is not None:
            self._state = replace(self._state, tally=loaded.baton.tally)
        self._events: asyncio.Queue[tuple[int, m.Message | steps.StageEvent]] = asyncio.Queue()
        self._codecs = StageCodecs(config, context.codec_worker)
        self._codecs.load(loaded.residuals)
        inbox = Inbox(plan, config, self._codecs)
        here = Held(
            job=job, stage=self.stage, term=term, incarnation=host, memory_bytes=tuple(plan.memory_bytes)
        )
        self._partners = Partners(
            context, here, plan.partners, inbox.offer, self._receive, self._link_changed,
            largest_bytes=inbox.largest_bytes,
        )  # fmt: skip
        self._rad = Rad(
            plan, config, loaded.plane, context.compute, loaded.batches, inbox, self._partners.post
        )
        self._snapshots = StageSnapshots(
            loaded, self._codecs, context.compute, self._owners, partial(self._send, 0), self._spawn
        )
        self._work: asyncio.Task[None] | None = None
        self._apply: asyncio.Task[None] | None = None
        self._lacked = ""  # why the last restore failed
        self._restoring: asyncio.Task[None] | None = None
        self._passing: asyncio.Future[HandoverState] | None = None  # while we leave
        self._group: asyncio.TaskGroup | None = None
        self._samples = loaded.batches.samples
        self.lead: Lead | None = self._new_lead(loaded.start) if self.stage == 0 else None

    def _new_lead(self, start: Checkpoint) -> Lead:
        return Lead(
            self.job, self._config, self._plan.stages, self.term, start, self._baton,
            samples=self._samples, edges=[edge.name for edge in edges_of(self._plan.whole)], send=self._send, spawn=self._spawn, put=self._files.put,
            changed=self._changed, clock=asyncio.get_running_loop().time,
        )  # fmt: skip

    @property
    def progress(self) -> Progress:
        """The lead's figures; on another stage, what it knows itself until the lead tells it how the job went."""
        if self.lead is not None:
            return self.lead.progress
        return self._final or Progress(
            job=self.job, state="running", step=self._state.step, steps=self._config.steps,
            stages=self._plan.stages, snapshot=self.newest.digest, snapshot_step=self.newest.step,
        )  # fmt: skip

    def stop(self) -> None:
        """The lead only: end the job after the step under way."""
        if self.lead is not None:
            self.lead.stop()

    async def pass_on(self) -> HandoverState:
        """Hand the stage over: stop at the next step boundary, store the state, say what the next owner needs. From
        then on this host does nothing but send what it has stored. JobError where that cannot be; how long it may
        take is for the caller to say."""
        if self._passing is None:
            self._passing = asyncio.get_running_loop().create_future()
            self._events.put_nowait((self.stage, steps.Leave()))
        return await asyncio.shield(self._passing)

    def stay(self) -> None:
        """Nobody took the stage that `pass_on` stopped, or was to stop: it goes on here."""
        self._pass_failed("the stage stays")
        self._passing = None
        self._events.put_nowait((self.stage, steps.Stay()))

    async def accept(self, stream: Stream, hello: m.Hello) -> None:
        await self._partners.accept(stream, hello)

    async def run(self) -> None:
        try:
            await self._complete_start()
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._partners.run(), name=f"streams of stage {self.stage}")
                group.create_task(self._explain_waiting())
                group.create_task(self._files.hold_copies())
                if self.lead is not None:
                    group.create_task(self._tuner(self.lead).run())
                try:
                    await self._loop()
                finally:
                    await self._partners.finish(FLUSH_SECONDS)
                raise _Ended
        except BaseExceptionGroup as errors:
            first = _first(errors)
            if not isinstance(first, _Ended):
                raise first from None
        finally:
            self._group = None
            self._partners.close()  # it may have welcomed some before it ran
            self._pass_failed("the job has ended")

    def _tuner(self, lead: Lead) -> Tuner:
        plan, clock = self._plan, asyncio.get_running_loop().time
        job = job_of(self._config, plan.whole, plan.memory_bytes or (0,) * plan.stages)
        return Tuner(self._context, job, lead, self._owners, clock, moved=self._baton is not None)

    async def _complete_start(self) -> None:
        """A job record has no room for the ledger of its snapshot: the snapshot itself has."""
        if self.newest.digest is None or self.newest.sound:
            return
        self.newest = await self._files.point(self.newest.digest)
        if self.lead is not None:
            self.lead = self._new_lead(self.newest)

    # --- events

    async def _loop(self) -> None:
        while True:
            source, event = await self._events.get()
            match event:
                case m.FinishMessage(state=state, text=text, progress=final):
                    await self._stop_work()
                    self._final = replace(final or self.progress, job=self.job, state=state, error=text)
                    if state == "failed":
                        raise JobFailed(text)
                    return
                case m.BeginMessage(attempt=attempt, step=step, after=after, tally=tally):
                    await self._event(steps.Begin(attempt, step, after, tally))
                case m.CommitMessage(
                    attempt=attempt, step=step, learning_rate=rate, clip_factor=clip, after=after
                ):
                    await self._event(steps.Commit(attempt, step, rate, clip, after))
                case m.DiscardMessage(attempt=attempt):
                    await self._event(steps.Discard(attempt))
                case m.HoldMessage(attempt=attempt, stage=stage, entry=entry):
                    await self._event(steps.Hold(attempt, stage, entry))
                case m.RestoreMessage(attempt=attempt, point=point):
                    await self._event(steps.Restore(attempt, point))
                case m.ReplicateMessage(step=step, index=index):
                    self._spawn(self._snapshots.replicate(step, index))
                case m.MoveMessage(peer=peer):
                    if self._context.succession is not None:
                        self._context.succession.give_away(self.job, self.stage, peer)
                case m.SavedMessage(point=point):
                    if point.rank > self.newest.rank:
                        self.newest, self.before = point, self.newest
                    self._spawn(self._files.forget_before(point))
                    self._changed()
                case (
                    steps.Linked() | steps.Unlinked() | steps.Completed() | steps.Restored() | steps.LoadFailed()
                    | steps.Leave() | steps.Stay()
                ):  # fmt: skip
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
            case steps.Join(step, entry, links, attempt, abandoned, tally):
                join = m.JoinMessage(
                    step=step, newest=self.newest, before=self.before, entry=entry, links=links, attempt=attempt,
                    abandoned=abandoned, tally=tally,
                )  # fmt: skip
                self._send(0, join)
            case steps.Suspect(entry):
                self._send(0, m.SuspectMessage(text=self._partners.waiting_for[:300], entry=entry))
            case steps.Run(attempt, step, after):
                self._work = self._spawn(self._run(attempt, step, after))
            case steps.SendReady(attempt, step, report):
                self._send(0, m.ReadyMessage(attempt=attempt, step=step, report=report))
            case steps.Apply(rate, clip):
                self._codecs.commit()
                # Queued on the device before anything of the next step is; nobody waits for it here.
                self._apply = self._spawn(self._context.compute.run(self._plane.apply, rate, clip))
                self._context.leases.update(self.job, self.stage, step=self._state.step)
            case steps.Drop():
                await self._stop_work()
                self._rad.inbox.drop()
                await self._codecs.discard()
                await self._context.compute.run(self._plane.discard)
            case steps.Load(attempt, point):
                if point.rank < self.newest.rank:
                    log.warning(
                        "stage %d goes back beyond the newest snapshot, to step %d", self.stage, point.step
                    )
                self.newest = point
                before, self._restoring = self._restoring, None
                self._restoring = self._spawn(self._restore(attempt, point, before))
            case steps.SendLeaving(entry):
                self._send(0, m.LeavingMessage(entry=entry))
            case steps.Lack(attempt):
                self._send(0, m.LackMessage(attempt=attempt, text=self._lacked[:300]))
            case steps.HandOver(step):
                self._spawn(self._hand_over(step))

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
        if after.wires is not None:
            self._codecs.use(after.wires)
        try:
            if after.evaluate:
                loss = await self._rad.evaluate(attempt, step)
                if loss is not None:
                    self._send(0, m.EvaluatedMessage(step=step, loss=loss))
            if after.snapshot:
                await self._snapshots.take(step)
            if after.finish:
                return
            report = await self._rad.step(attempt, step)
        except (RuntimeError, ValueError, MemoryError) as error:
            if await self._fail(attempt, error):
                raise
            return
        traffic = self._partners
        report = replace(report, sent_bytes=traffic.sent_bytes, received_bytes=traffic.received_bytes)
        self._events.put_nowait((self.stage, steps.Completed(attempt, step, report)))

    async def _fail(self, attempt: steps.Attempt, error: Exception) -> bool:
        """Our arithmetic failed. Whether this peer should give the stage up: another may have more luck (memory,
        say). What fails at the lead for another reason fails the job."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if self.lead is not None and not isinstance(error, MemoryError):
            self.lead.finish("failed", f"stage 0: {text}")
            return False
        self._send(0, m.FailedMessage(text=text, attempt=attempt))
        await self._partners.flush(FLUSH_SECONDS)
        return True

    async def _restore(
        self, attempt: steps.Attempt, point: Checkpoint, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:  # its point is not the one to go back to any more
            before.cancel()
            await asyncio.wait([before])
        event: steps.StageEvent = steps.Restored(attempt, point.step)
        try:
            await self._snapshots.restore(point)
        except (SwarmError, JobError, OSError) as error:
            self._lacked = str(error)
            event = steps.LoadFailed(attempt)
        self._events.put_nowait((self.stage, event))

    async def _hand_over(self, step: int) -> None:
        if self._apply is not None:
            await self._apply
        try:
            shard = await self._snapshots.store(step)
        except JobError as error:
            self._pass_failed(str(error))
            self._events.put_nowait((self.stage, steps.Stay()))
            return
        await self._partners.flush(FLUSH_SECONDS)  # what the others still need of the step that was committed
        ledger, tally = (UNTRAINED, self._state.tally) if self.lead is None else self.lead.books
        if self._passing is None:  # nobody waits for it any more
            self._events.put_nowait((self.stage, steps.Stay()))
        elif not self._passing.done():
            wires = None if self.lead is None else self.lead.chosen
            baton = HandoverState(
                step=step, shard=shard, point=self.newest, ledger=ledger, tally=tally, wires=wires
            )
            self._passing.set_result(baton)

    def _pass_failed(self, text: str) -> None:
        if self._passing is not None and not self._passing.done():
            self._passing.set_exception(JobError(text))
            self._passing.exception()  # nobody may be waiting any more: that is no error of its own
            self._passing = None

    # --- messages

    def _send(self, target: int, message: m.Message) -> None:
        if target != self.stage:
            self._partners.send(target, message)
        elif m.kind_of(message) in m.FROM_LEAD:
            self._events.put_nowait((target, message))
        else:
            # Our lead hears of our own links before it hears of anything that came over them since: what it tells a
            # stage that we have lost is told to nobody.
            assert self.lead is not None
            self.lead.receive(target, message)

    def _receive(self, source: int, message: m.Message) -> None:
        kind = m.kind_of(message)
        if (kind in m.FROM_LEAD) != (source == 0) or (self.stage != 0 and source != 0):
            raise StaleTerm(f"stage {source} may not send {kind} to stage {self.stage}")
        self._events.put_nowait((source, message))

    def _link_changed(self, linked: bool) -> None:
        self._events.put_nowait(
            (
                self.stage,
                steps.Linked(tuple(sorted(self._partners.linked_terms.items())))
                if linked
                else steps.Unlinked(),
            )
        )
        self._tell_owners()

    def _tell_owners(self) -> None:
        if self.lead is not None and not self.lead.progress.finished:
            owners: dict[int, PeerId] = self._owners()
            self.lead.tell(owners=tuple(owners.get(s) for s in range(self._plan.stages)))

    def _owners(self) -> dict[int, PeerId]:
        return {**self._partners.owners, self.stage: self._context.peer_id}

    async def _explain_waiting(self) -> None:
        while True:
            await asyncio.sleep(WAIT_SECONDS)
            if self.lead is not None and not self.lead.progress.finished:
                waiting = self._partners.waiting_for or self.lead.waiting_for
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
