"""Which stages of jobs the plane of this peer can run: a plane may lack operators, and a manifest does not list a stage's.

A plane that lacks none can run all stages, and no graph is read. For another one the graph of a job is fetched before a stage of it
is claimed or stood by for; until then it runs none of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from cachetools import LRUCache

from fusion.dag.cutting.source import operators
from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.context import Context
from fusion.runtime.job.cool_down import CoolDown
from fusion.runtime.job.errors import Unsupported
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.stage_graphs import load_stages
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import one_line

log = logging.getLogger(__name__)

REMEMBERED_JOBS = 1024
COOL_DOWN_SECONDS, LONGEST_COOL_DOWN_SECONDS = 5.0, 300.0  # after a graph could not be fetched


class RunnableStages:
    """`spawn` runs work for a job beside everything else, `arrived` is called when a graph has been read."""

    def __init__(
        self,
        context: Context,
        spawn: Callable[[JobId, Coroutine[Any, Any, None]], object],
        arrived: Callable[[], None],
    ) -> None:
        self._context = context
        self._spawn = spawn
        self._arrived = arrived
        self._lacking: LRUCache[JobId, frozenset[int]] = LRUCache(REMEMBERED_JOBS)
        self._reading: set[JobId] = set()
        self._turn = asyncio.Lock()  # one graph at a time
        self._cooling: CoolDown[JobId] = CoolDown(
            COOL_DOWN_SECONDS, LONGEST_COOL_DOWN_SECONDS, context.clock.monotonic
        )

    def runs(self, job: JobId, manifest: Manifest, stage: int) -> bool:
        if not self._context.lacks:
            return True
        lacking = self._lacking.get(job)
        if lacking is not None:
            return stage not in lacking
        if job not in self._reading and not self._cooling.lasts(job):
            self._reading.add(job)
            self._spawn(job, self._read(job, manifest))
        return False

    async def _read(self, job: JobId, manifest: Manifest) -> None:
        try:
            async with self._turn:
                stages, _ = await load_stages(self._context, job, manifest)
        except Unsupported:
            self._lacking[job] = frozenset(range(manifest.stages))
        except SwarmError as error:
            log.debug("the graph of %s: %s", manifest.name, one_line(str(error)))
            self._cooling.start(job)
            return
        else:
            found = lacking_stages(stages, self._context.lacks)
            self._lacking[job] = frozenset(found)
            for stage, ops in found.items():
                log.info("stage %d of %s is left to others: no %s here", stage, manifest.name, ", ".join(ops))
        finally:
            self._reading.discard(job)
        self._cooling.forget(job)
        self._arrived()


def lacking_stages(stages: Sequence[Stage], lacks: frozenset[str]) -> dict[int, list[str]]:
    """The stages with operators that the plane lacks, and which these are."""
    found = {stage.index: sorted(operators(stage.graph) & lacks) for stage in stages}
    return {stage: ops for stage, ops in found.items() if ops}
