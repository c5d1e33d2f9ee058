"""An owner that does not answer us: whoever may replace it is asked to look at it, once at a time and not with every
try."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fusion.runtime.job.context import Context
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

ANSWER_SECONDS = 6.0  # for the answer of those who may replace it
AGAIN_SECONDS = 2.0


class Suspicion:
    """Of the owner of stage `partner`, at stage `stage`. `heard` gets the claim of the successor, if there is one."""

    def __init__(
        self,
        context: Context,
        job: JobId,
        stage: int,
        partner: int,
        heard: Callable[[ClaimRecord, int], None],
    ) -> None:
        self._context = context
        self._job, self._stage, self._partner = job, stage, partner
        self._heard = heard
        self._asking: asyncio.Task[None] | None = None
        self._last: tuple[PeerId, int] | None = None  # who was suspected last, under which term
        self._began = 0.0

    def begin(self, claim: ClaimRecord, group: asyncio.TaskGroup) -> None:
        """Have others look at the owner of `claim`, which does not answer us, unless that is under way."""
        if self._context.takeover is None:
            return
        now = asyncio.get_running_loop().time()
        who = (claim.peer, claim.term)
        if who == self._last and (self._asking is not None or now - self._began < AGAIN_SECONDS):
            return
        self.end()
        self._last, self._began = who, now
        self._asking = group.create_task(self._ask(claim), name=f"suspecting stage {self._partner}")
        self._asking.add_done_callback(self._asked)

    def end(self) -> None:
        """The owner answers after all, or is not the one that we thought of."""
        task, self._asking = self._asking, None
        if task is not None:
            task.cancel()

    async def _ask(self, claim: ClaimRecord) -> None:
        takeover = self._context.takeover
        assert takeover is not None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                successor = await takeover.suspect(self._job, self._partner, claim.peer, claim.term)
        except (SwarmError, ValueError, TimeoutError) as error:
            log.debug(
                "stage %d: nobody to replace the owner of stage %d: %s", self._stage, self._partner, error
            )
            return
        if successor is not None:
            self._heard(successor, claim.term)

    def _asked(self, task: asyncio.Task[None]) -> None:
        if self._asking is task:
            self._asking = None
