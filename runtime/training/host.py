"""One stage of a training job on this peer: assembles its parts and runs it from its start to the end of the job.

walk of a microbatch:  data -> rad -> (plane) -> partner -> the next stage's inbox -> ... -> loss -> back
walk of a step:        rad completes -> ready -> lead -> commit -> apply -> the next step
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.training.compute.inbox import Inbox
from fusion.runtime.training.compute.stage_codecs import StageCodecs
from fusion.runtime.training.lead.leading import Leading
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.stage_loop import StageLoop
from fusion.runtime.training.stage_messages import Mailbox, Outbox
from fusion.runtime.training.stage_work import StageWork
from fusion.runtime.training.step.events import Linked, Unlinked
from fusion.runtime.training.streams.partner import Held
from fusion.runtime.training.streams.partners import Partners
from fusion.swarm.directory.records import JobId


class TrainingHost:
    """`run` returns when the job has ended, raises JobFailed when it failed, and the stage's own error when this peer cannot go on
    with it. `changed` is called whenever `progress` changes."""

    def __init__(
        self,
        context: Context,
        job: JobId,
        config: TrainConfig,
        term: int,
        loaded: Loaded,
        changed: Callable[[], None],
    ) -> None:
        plan, stage = loaded.plan, loaded.plan.stage.index
        here = Held(
            job=job, stage=stage, term=term, incarnation=int.from_bytes(context.random.randbytes(7), "big"), memory_bytes=plan.memory_bytes
        )  # fmt: skip
        codecs = StageCodecs(config, context.codec_worker)
        codecs.load(loaded.residuals)
        inbox = Inbox(plan, config, codecs)
        self._here = here
        self._config = config
        self._loaded = loaded
        self._mailbox = Mailbox(stage)
        self.partners = Partners(
            context, here, plan.partners, inbox.offer, self._mailbox.receive, self._link_changed,
            largest_bytes=inbox.largest_bytes,
        )  # fmt: skip
        outbox = Outbox(stage, self._mailbox, self.partners)
        self._work = StageWork(
            context, here, config, loaded, inbox, outbox, spawn=self._spawn, changed=changed
        )
        self._loop = StageLoop(context, here.job, outbox, self._work, config.steps)
        self.handover = self._work.handover
        self._group: asyncio.TaskGroup | None = None
        self._leading: Leading | None = None
        if stage == 0:
            self._leading = Leading(
                context, here, config, loaded, self.partners,
                send=outbox.send, spawn=self._spawn, put=self._work.snapshots.store_index, changed=changed,
            )  # fmt: skip
            outbox.lead = self._leading.lead
        self.lead = outbox.lead  # of the job, if our stage is the first

    @property
    def progress(self) -> Progress:
        """The lead's progress; on another stage what it knows itself, until `finish` reports how the job ended."""
        if self.lead is not None:
            return self.lead.progress
        newest, end = self._work.snapshots.newest, self._loop.finished
        known = Progress(
            job=self._here.job, state="running", step=self._work.state.step, steps=self._config.steps,
            stages=self._loaded.plan.stages, snapshot=newest.digest, snapshot_step=newest.step,
        )  # fmt: skip
        if end is None:
            return known
        return replace(end.progress or known, job=self._here.job, state=end.state, error=end.text)

    async def run(self) -> None:
        try:
            if await self._work.snapshots.complete():
                newest = self._work.snapshots.newest
                if self._loaded.handover is None:
                    self._work.learn(newest.version)
                if self.lead is not None:
                    self.lead.learn(newest)
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self.partners.run(), name=f"streams of stage {self._here.stage}")
                group.create_task(self._loaded.files.hold_copies())
                group.create_task(self._loop.watch())
                if self._leading is not None:
                    self._leading.start(group)
                try:
                    await self._loop.run()
                finally:
                    await self.partners.finish()
                raise _Ended
        except BaseExceptionGroup as errors:
            first = _first(errors)
            if not isinstance(first, _Ended):
                raise first from None
        finally:
            self._group = None
            self._loaded.remember(self._loop.faults)
            self.partners.close()  # it may have accepted streams before it ran
            self.handover.fail("the job has ended")

    def _link_changed(self, linked: bool) -> None:
        terms = tuple(sorted(self.partners.linked_terms.items()))
        self._mailbox.put(Linked(terms) if linked else Unlinked())
        if self._leading is not None:
            self._leading.report_owners()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        assert self._group is not None
        return self._group.create_task(work)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of the group, or JobFailed if it is among them."""
    leaves: list[BaseException] = []
    for error in errors.exceptions:
        leaves += [_first(error)] if isinstance(error, BaseExceptionGroup) else [error]
    return next((leaf for leaf in leaves if isinstance(leaf, JobFailed)), leaves[0])


class _Ended(Exception):
    """Ends the task group of a host whose job has ended."""
