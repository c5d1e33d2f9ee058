"""Where a world takes the place of what a real peer has under the protocol: tensors, files on disk, random tokens.

Everything else of `fusion.runtime` and `fusion.swarm` runs as it is.
"""

from __future__ import annotations

import builtins
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from worlds.arithmetic import VARIABLE, WorldBatches, first_state, pack, stages_of, unpack
from worlds.virtual_time import lane_now

from fusion.dag.cutting.stage import Stage
from fusion.runtime.hosting.hosting import Hosting
from fusion.runtime.hosting.jobs import files
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import build
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.stage_graphs import StageGraphs, Stages
from fusion.runtime.training import service as training
from fusion.runtime.training import stage_work
from fusion.runtime.training.data import samples
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.stage_source import StageSource
from fusion.runtime.training.step import events
from fusion.runtime.training.streams import partners
from fusion.swarm.directory.records import JobRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.streams import handlers


def context(**parts: Any) -> Context:
    """A context as a running peer has it."""
    made = {**parts}
    try:
        from fusion.runtime.hosting.takeover import Takeovers
    except ImportError:
        pass
    else:
        made["succession"] = Takeovers(parts["transport"], parts["leases"])
    return Context(**made)


def initial(stage: int) -> bytes:
    return pack({VARIABLE: torch.tensor(first_state(stage))})


class JobFiles(files.JobFiles):
    """Over a simulated disk: whole files at once."""

    def save(self, record: JobRecord) -> None:
        record = replace(record, step=max(record.snapshot_step, 0))
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        path = self._path(record.job)
        path.write_text(json.dumps({"version": files.VERSION, "record": values}))

    def load(self) -> tuple[JobRecord, ...]:
        paths = sorted(self._folder.glob("*.json"))
        return tuple(build(JobRecord, json.loads(path.read_bytes())["record"], "record") for path in paths)


class WorldGraphs(StageGraphs):
    def __init__(self) -> None:
        return

    async def of(self, manifest: Manifest) -> Stages:
        return stages_of(manifest.stages), ()


class WorldShards:
    """Implements `fusion.runtime.training.snapshots.stage_files.Shards` over a simulated disk."""

    def save(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(pack(tensors))

    def load_weights(self, path: Path, stage: Stage) -> dict[str, torch.Tensor]:
        return unpack(path.read_bytes())

    def load_state(
        self, path: Path, stage: Stage, residuals: Mapping[str, tuple[int, ...]]
    ) -> dict[str, torch.Tensor]:
        return unpack(path.read_bytes())


def stage_source(context: Context) -> StageSource:
    return StageSource(context, WorldGraphs(), WorldBatches, WorldShards())


# --- replacements


def _remembered(pure: Callable[..., Any]) -> Callable[..., Any]:
    """With its latest results kept; a caller may change a list that it was given."""
    kept = lru_cache(maxsize=512)(pure)

    def call(*args: Any) -> Any:
        result = kept(*args)
        return list(result) if isinstance(result, list) else result

    return call


def replace_everywhere(original: Any, replacement: Any) -> None:
    """Wherever a module of the project names `original`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fusion."):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)


def _observe(cls: type, name: str, before: Callable[..., None]) -> None:
    original = getattr(cls, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(cls, name, wrapped)


def _took(streams: Any, source: int, frame: Any) -> None:
    from worlds.world import World

    World.current.oracle.took(
        streams, streams._context.peer_id, streams.stage, source, frame.kind, frame.header
    )


def _acts(work: Any, action: Any) -> None:
    from worlds.world import World

    if isinstance(action, events.Apply):
        state = work.state
        World.current.oracle.commits(work._context.peer_id, state.stage, state.attempt, state.step - 1)


def _hosts(service: Any, job: Any, manifest: Any, stage: int, term: int, *rest: Any, **more: Any) -> None:
    from worlds.world import World

    world = World.current
    world.oracle.hosts(world.processes[service._context.peer_id], stage, term)


_FORESEEN = (SwarmError, JobError, ValueError, TimeoutError, OSError)


def _told_apart(error: BaseException) -> str:
    """`handlers.error_line`, which every handler's error goes through: one of ours, or a mistake in the code."""
    from worlds.world import World

    if not isinstance(error, _FORESEEN):
        World.current.oracle.broken(f"sound: a handler of {lane_now().name} failed: {error!r}")
    return _one_line(error)


class Mistakes(logging.Handler):
    """Errors of a hosted stage that nobody foresaw, which hosting survives and logs."""

    def emit(self, record: logging.LogRecord) -> None:
        from worlds.world import World

        kind = record.args[2] if isinstance(record.args, tuple) and len(record.args) == 4 else ""
        if isinstance(getattr(builtins, str(kind), None), type) and kind not in (
            "TimeoutError",
            "MemoryError",
        ):
            World.current.oracle.broken(f"sound: {lane_now().name}: {record.getMessage()}")


_one_line = handlers.error_line


def install() -> None:
    """Once per process."""
    for pure in (manifests.decode, snapshot.decode_index, samples.sample_indices):
        replace_everywhere(pure, _remembered(pure))  # every peer asks for the same values
    replace_everywhere(handlers.error_line, _told_apart)
    hosts = logging.getLogger(Hosting.__module__)
    hosts.addHandler(Mistakes(logging.ERROR))
    hosts.propagate = False
    _observe(partners.Partners, "_deliver", _took)
    _observe(stage_work.StageWork, "_act", _acts)
    _observe(training.TrainingService, "host", _hosts)
