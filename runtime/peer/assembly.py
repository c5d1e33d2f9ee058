"""The services and the hosting of a peer, put together over any transport, directory and device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from fusion.runtime.hosting.hosting import Hosting, HostingConfig
from fusion.runtime.hosting.jobs.files import JobFiles
from fusion.runtime.hosting.jobs.service import Service
from fusion.runtime.job.context import Context
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.planes.plane import Plane
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.runtime.serving.graphs.stages import GraphStages
from fusion.runtime.serving.models import ServedModels
from fusion.runtime.serving.service import ServingService
from fusion.runtime.serving.stage_loader import StageLoader as ServingLoader
from fusion.runtime.training.service import TrainingService
from fusion.runtime.training.stage_loader import StageLoader as TrainingLoader
from fusion.runtime.training.stage_source import StageSource
from fusion.swarm.errors import SwarmError

LEAVE_SECONDS = 14.0  # for all stages together; see HAND_OVER_SECONDS in `fusion.cli.start`

log = logging.getLogger(__name__)


# By the kind of their jobs
Services = Callable[[Context], AbstractAsyncContextManager[Mapping[str, Service]]]


@dataclass(frozen=True)
class Assembly:
    services: Mapping[str, Service]
    hosting: Hosting
    work: asyncio.Task[None]  # the hosting; it ends by itself only with an error


@asynccontextmanager
async def training_and_serving(plane: Plane, context: Context) -> AsyncIterator[Mapping[str, Service]]:
    """The services of the product's peers, computed by `plane`."""
    graphs = StageGraphs(context)
    training = TrainingService(context, TrainingLoader(context, plane, StageSource(context, graphs)))
    loader = ServingLoader(context, plane, graphs)
    serving = ServingService(context, loader)
    in_one_run = GraphStages(context, plane, graphs, loader.fetch)
    runs = GraphGateway(context, in_one_run, graphs, serving.gateway.catalog)
    try:
        await training.start()
        await serving.start()
        await runs.start()
        yield {"train": training, "serve": ServedModels(serving, in_one_run, runs)}
    finally:
        await serving.aclose()


def job_files(context: Context) -> JobFiles:
    """The job files of the product's peers."""
    return JobFiles(context.home / "jobs", context.clock.unix)


@asynccontextmanager
async def assemble(
    context: Context,
    services: Services,
    fitness: float,
    *,
    config: HostingConfig | None = None,
    files: JobFiles | None = None,
    reachable: Callable[[], bool] = lambda: True,
) -> AsyncIterator[Assembly]:
    """Look for jobs, claim their stages and run them until the block ends; then hand over, if other peers are `reachable`.
    `fitness`: as for `Hosting`; `files` keep the records of jobs."""
    async with services(context) as running:
        hosting = Hosting(context, running, fitness, config, files)
        await hosting.start()
        work = asyncio.create_task(hosting.run(), name="hosting")
        try:
            yield Assembly(running, hosting, work)
        finally:
            if reachable() and not work.done():
                await _hand_over(hosting)
            work.cancel()
            await asyncio.wait([work])


async def _hand_over(hosting: Hosting) -> None:
    """Give our stages to their standbys, in bounded time. Other peers recover from failures here."""
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await hosting.leave()
    except TimeoutError:
        log.warning("not everything was handed over within %.0f s", LEAVE_SECONDS)
    except SwarmError as error:
        log.warning("not handed over: %s", error)
