"""A world's replacements for what a real peer has below the protocol: tensors, graphs, files on disk.

All other code of `fusion.runtime` and `fusion.swarm` runs unchanged.
"""

from __future__ import annotations

import builtins
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from worlds.arithmetic import VARIABLE, WorldBatches, first_state, pack, stages_of, unpack
from worlds.virtual_time import lane_now

from fusion.dag.cutting.stage import Stage
from fusion.runtime.hosting.hosted_stages import HostedStages
from fusion.runtime.hosting.job_faults import JobFaults
from fusion.runtime.hosting.jobs import files
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.stage_graphs import StageGraphs, Stages
from fusion.runtime.training.stage_source import StageSource
from fusion.runtime.training.step.history import Version
from fusion.swarm.directory.records import JobId, JobRecord


def context(**parts: Any) -> Context:
    """A context as a running peer has it, from `parts`."""
    fields = {**parts}
    try:
        from fusion.runtime.hosting.takeover import Takeovers
    except ImportError:
        pass
    else:
        fields["takeover"] = Takeovers(parts["transport"], parts["leases"])
    return Context(**fields)


def initial(stage: int) -> bytes:
    return pack({VARIABLE: torch.tensor(first_state(stage))})


class JobFiles(files.JobFiles):
    """Job files on a simulated disk. A file is written in one piece."""

    def save(self, record: JobRecord) -> None:
        document = {"version": files.VERSION, "record": files.fields_of(record)}
        self._path(record.job).write_text(json.dumps(document))

    def load(self) -> tuple[JobRecord, ...]:
        paths = sorted(self._folder.glob("*.json"))
        return tuple(files.record_of(json.loads(path.read_bytes())["record"]) for path in paths)


class WorldGraphs(StageGraphs):
    def __init__(self) -> None:
        return

    async def of(self, job: JobId, manifest: Manifest) -> Stages:
        return stages_of(manifest.stages), ()

    async def check(self, job: JobId, manifest: Manifest, stage: int) -> None:
        return


class WorldShards:
    """Implements `fusion.runtime.training.snapshots.stage_files.Shards` over a simulated disk."""

    def bytes_of(
        self, tensors: Mapping[str, torch.Tensor], version: Version
    ) -> tuple[int, Iterator[bytes | memoryview]]:
        packed = pack(tensors)
        return len(packed), iter([packed])

    def load_weights(self, path: Path, stage: Stage) -> dict[str, torch.Tensor]:
        return unpack(path.read_bytes())

    def load_state(
        self,
        path: Path,
        stage: Stage,
        residuals: Mapping[str, tuple[int, ...]],
        version: Version | None = None,
    ) -> dict[str, torch.Tensor]:
        return unpack(path.read_bytes())

    def check_state(
        self, path: Path, stage: Stage, residuals: Mapping[str, tuple[int, ...]], version: Version
    ) -> None:
        unpack(path.read_bytes())


def stage_source(context: Context) -> StageSource:
    return StageSource(context, WorldGraphs(), WorldBatches, WorldShards())


# The modules of hosting that log unexpected errors, with the name of the exception.
MISTAKES_LOGS = (HostedStages.__module__, JobFaults.__module__)


class Mistakes(logging.Handler):
    """Turns the unexpected errors that hosting survives and logs into violations."""

    def emit(self, record: logging.LogRecord) -> None:
        from worlds.world import World

        args = record.args if isinstance(record.args, tuple) else ()
        raised = {str(arg) for arg in args if isinstance(getattr(builtins, str(arg), None), type)}
        if raised - {"TimeoutError", "MemoryError"}:
            World.current.oracle.broken(f"sound: {lane_now().name}: {record.getMessage()}")


def install() -> None:
    """Watch the logs of hosting for unexpected errors. Call it once per process."""
    mistakes = Mistakes(logging.ERROR)
    for name in MISTAKES_LOGS:
        logging.getLogger(name).addHandler(mistakes)
        logging.getLogger(name).propagate = False
