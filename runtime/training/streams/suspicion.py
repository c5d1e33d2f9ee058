"""Asks the standbys of an owner that does not answer us to probe it: one request at a time, not one per dial."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fusion.runtime.job.context import Context
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

ANSWER_SECONDS = 6.0  # for the standbys to answer
AGAIN_SECONDS = 2.0  # from one request about an owner to the next


class Suspicion:
    """The suspicion of stage `stage` that the owner of stage `partner` is gone. `succeeded` is called with the claim of a successor, if
    there is one, and the term of the owner that it replaced."""

    def __init__(
        self,
        context: Context,
        job: JobId,
        stage: int,
        partner: int,
        succeeded: Callable[[ClaimRecord, int], None],
    ) -> None:
        self._context = context
        self._job, self._stage, self._partner = job, stage, partner
        self._succeeded = succeeded
        self._asking: asyncio.Task[None] | None = None
        self._last: tuple[PeerId, int] | None = None  # (peer, term) of the owner that was suspected last
        self._began = 0.0

    def begin(self, claim: ClaimRecord, group: asyncio.TaskGroup) -> None:
        """Ask about the owner of `claim`, unless a request about it is under way or recent."""
        if self._context.takeover is None:
            return
        now = asyncio.get_running_loop().time()
        owner = (claim.peer, claim.term)
        if owner == self._last and (self._asking is not None or now - self._began < AGAIN_SECONDS):
            return
        self.end()
        self._last, self._began = owner, now
        self._asking = group.create_task(self._ask(claim), name=f"suspecting stage {self._partner}")
        self._asking.add_done_callback(self._answered)

    def end(self) -> None:
        """The owner answers after all, or another one is suspected."""
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
            self._succeeded(successor, claim.term)

    def _answered(self, task: asyncio.Task[None]) -> None:
        if self._asking is task:
            self._asking = None
