"""What computes and decides in a peer, put together over whatever transport, directory and device there are."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fusion.runtime.hosting.hosting import Hosting
from fusion.runtime.hosting.jobs.files import JobFiles
from fusion.runtime.hosting.jobs.service import Service
from fusion.runtime.job.context import Context
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.planes.plane import Plane
from fusion.runtime.serving.service import ServingService
from fusion.runtime.serving.stage_loader import StageLoader as ServingLoader
from fusion.runtime.training.loader import StageLoader as TrainingLoader
from fusion.runtime.training.service import TrainingService
from fusion.runtime.training.stage_source import StageSource
from fusion.swarm.errors import SwarmError

LEAVE_SECONDS = 14.0  # for all stages together; see HAND_OVER_SECONDS in `fusion.cli.start`

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    training: TrainingService
    serving: ServingService
    hosting: Hosting
    work: asyncio.Task[None]  # the hosting; it never ends by itself unless something is wrong


@asynccontextmanager
async def assemble(
    context: Context, plane: Plane, fitness: float, reachable: Callable[[], bool] = lambda: True
) -> AsyncIterator[Assembly]:
    """Train, serve and host until the block ends; then hand over, while others are `reachable`. `fitness` is the score
    of claims that nobody proposed, from 0 to below 1."""
    graphs = StageGraphs(context)
    training = TrainingService(context, TrainingLoader(context, plane, StageSource(context, graphs)))
    serving = ServingService(context, ServingLoader(context, plane, graphs))
    services: dict[str, Service] = {"train": training, "serve": serving}
    hosting = Hosting(context, services, fitness, files=JobFiles(context.home / "jobs", context.clock.unix))
    try:
        await training.start()
        await serving.start()
        await hosting.start()
        # Generated code and its tensors sit in cycles: hundreds of MiB would wait for a collection by chance. What
        # is there already will stay, and need not be looked at, now or each time.
        gc.freeze()
        hosting.on_rest = gc.collect
        work = asyncio.create_task(hosting.run(), name="hosting")
        try:
            yield Assembly(training, serving, hosting, work)
        finally:
            if reachable() and not work.done():
                await _hand_over(hosting)
            work.cancel()
            await asyncio.wait([work])
    finally:
        await serving.aclose()


async def _hand_over(hosting: Hosting) -> None:
    """Give our stages to their standbys, in bounded time. What fails here, the others recover from."""
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await hosting.leave()
    except TimeoutError:
        log.warning("not everything was handed over within %.0f s", LEAVE_SECONDS)
    except SwarmError as error:
        log.warning("not handed over: %s", error)
