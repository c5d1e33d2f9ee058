"""Hands a hosted stage to its next owner: stop at a step boundary, store the state, describe it to the next owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fusion.runtime.job.errors import JobError
from fusion.runtime.training.data.ledger import UNTRAINED
from fusion.runtime.training.snapshots.stage_snapshots import StageSnapshots
from fusion.runtime.training.stage_messages import Outbox
from fusion.runtime.training.step.events import Leave, Stay
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.runtime.training.step.history import Version
from fusion.runtime.training.step.run_statistics import RunStatistics


class StageHandover:
    def __init__(self, outbox: Outbox, snapshots: StageSnapshots) -> None:
        self._outbox = outbox
        self._mailbox = outbox.mailbox
        self._snapshots = snapshots
        self._passing: asyncio.Future[HandoverState] | None = None  # while we leave

    async def pass_on(self) -> HandoverState:
        """Hand the stage over. Returns what the next owner needs, once the state of a step boundary is stored; from then on this peer
        only serves the stored state. Raises JobError where that fails; the caller bounds the time."""
        if self._passing is None:
            self._passing = asyncio.get_running_loop().create_future()
            self._mailbox.put(Leave())
        return await asyncio.shield(self._passing)

    def stay(self) -> None:
        """No peer took the stage that `pass_on` stopped, or was to stop: it goes on here."""
        self.fail("the stage stays")
        self._passing = None
        self._mailbox.put(Stay())

    def fail(self, text: str) -> None:
        """The stage is not handed over: waiting calls of `pass_on` raise JobError."""
        if self._passing is not None and not self._passing.done():
            self._passing.set_exception(JobError(text))
            self._passing.exception()  # retrieved, in case no call waits any more
            self._passing = None

    async def store(self, version: Version, statistics: Callable[[], RunStatistics]) -> None:
        """Store the state at the step boundary of `version`, with the `statistics` that the stage has."""
        try:
            shard = await self._snapshots.store(version)
        except JobError as error:
            self.fail(str(error))
            self._mailbox.put(Stay())
            return
        await self._outbox.partners.flush()  # what other stages still need of the committed step
        lead = self._outbox.lead
        ledger, known = (UNTRAINED, statistics()) if lead is None else lead.totals
        if self._passing is None:  # no call waits for it any more
            self._mailbox.put(Stay())
        elif not self._passing.done():
            handover = HandoverState(
                step=version.step, history=version.history, shard=shard, checkpoint=self._snapshots.newest, ledger=ledger, statistics=known,
                codecs=None if lead is None else lead.chosen,
            )  # fmt: skip
            self._passing.set_result(handover)
