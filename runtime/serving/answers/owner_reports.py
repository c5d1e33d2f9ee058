"""Reports of owners that seem to have failed, to the peers that could take their stages over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fusion.runtime.job.context import Takeover
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.ring.session import Hop
from fusion.swarm.cancelling import cancel_all
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import error_line

log = logging.getLogger(__name__)

REPORT_SECONDS = 8.0  # for a takeover, or a decision against one


class OwnerReports:
    """`newer` returns a later owner of a stage, if one is known; `takeover` None: no reports are possible."""

    def __init__(self, takeover: Takeover | None, newer: Callable[[JobId, int, Hop], Hop | None]) -> None:
        self._takeover = takeover
        self._newer = newer
        self._reports: dict[tuple[JobId, int, Hop], asyncio.Task[Hop | None]] = {}

    async def aclose(self) -> None:
        await cancel_all(self._reports.values())

    async def suspect(self, model: ServedModel, stage: int, hop: Hop) -> Hop | None:
        """Report the owner of a stage, once for all completions that wait for it. Returns the owner now; None where no peer has taken it
        over."""
        known = self._newer(model.job, stage, hop)
        if known is not None and known.peer != hop.peer:
            return known
        hop = known or hop  # it was a replica and is the owner now
        key = (model.job, stage, hop)
        report = self._reports.get(key)
        if report is None:
            report = self._reports[key] = asyncio.create_task(self._report(*key))
            report.add_done_callback(lambda _: self._reports.pop(key, None))
        return await asyncio.shield(report)

    async def _report(self, job: JobId, stage: int, hop: Hop) -> Hop | None:
        if self._takeover is None:
            return None
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                claim = await self._takeover.suspect(job, stage, hop.peer, hop.term)
        except (SwarmError, TimeoutError) as error:
            log.info("stage %d of job %.8s: nobody could take it over: %s", stage, job, error_line(error))
            return None
        return None if claim is None or claim.term < hop.term else Hop(claim.peer, claim.term)
