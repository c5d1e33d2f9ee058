"""The stages of models that run once for each request, on one peer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import DTYPE_BYTES
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.manifest import Manifest, OptimizerConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import MAX_RUN_BYTES
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.plane import Plane, TrainingStage
from fusion.runtime.planes.weights_file import WeightsFile
from fusion.runtime.serving.graphs.arrays import Array
from fusion.runtime.serving.graphs.inputs import checked_inputs
from fusion.swarm.directory.records import JobId, Place
from fusion.swarm.printable import error_line

# Fetches everything that a stage needs; returns the path of its weights
Fetch = Callable[[Place, Manifest], Awaitable[Path]]
NO_OPTIMIZER = OptimizerConfig(kind="sgd")  # without state


@dataclass(frozen=True)
class _Held:
    stage: Stage
    manifest: Manifest
    plane: TrainingStage


class GraphStages:
    """`host` and `prepare` are those of a service of jobs (`fusion.runtime.hosting.jobs.service`)."""

    def __init__(self, context: Context, plane: Plane, graphs: StageGraphs, fetch: Fetch) -> None:
        self._context = context
        self._plane = plane
        self._graphs = graphs
        self._fetch = fetch
        self._held: dict[Place, _Held] = {}

    def held(self, job: JobId, stage: int) -> Manifest | None:
        """The manifest of a stage that runs here."""
        held_stage = self._held.get((job, stage))
        return None if held_stage is None else held_stage.manifest

    def progress(self, job: JobId) -> Progress | None:
        """Progress of the job, where its first stage runs here; else None."""
        manifest = self.held(job, 0)
        return None if manifest is None else Progress(job=job, state="running", stages=manifest.stages)

    async def host(self, job: JobId, manifest: Manifest, stage: int) -> None:
        """Serve the stage until cancelled. Raises JobFailed for a job that no peer could serve, BlobError, MemoryError."""
        place, memory = (job, stage), self._context.memory
        memory.hold(place, manifest.needed_bytes(stage))
        try:
            part = (await self._graphs.of(job, manifest))[0][stage]
            path = await self._fetch(place, manifest)
            try:
                worker = self._context.on_behalf_of(manifest.author, job, serves=True).compute
                plane = await worker.run(
                    lambda: self._plane.training(
                        part, WeightsFile(path, len(part.graph.variables)), NO_OPTIMIZER
                    )
                )
            except (ValueError, KeyError) as error:
                raise JobFailed(f"the weights of stage {stage} of {manifest.name}: {error}") from None
            self._held[place] = _Held(part, manifest, plane)
            self._context.leases.update(job, stage, ready=True)
            await asyncio.Event().wait()
        finally:
            self._held.pop(place, None)
            memory.release(place)

    async def prepare(self, job: JobId, manifest: Manifest, stage: int) -> None:
        """Fetch what the stage needs. Raises JobError, BlobError, QuotaExceeded."""
        await self._fetch((job, stage), manifest)

    async def compute(self, job: JobId, stage: int, inputs: Sequence[Array]) -> list[Array]:
        """Run a stage that is held here: the values that it sends on, and its outputs of the model as `result/<i>`. JobError for invalid
        inputs; JobFailed where the run fails."""
        held = self._held[job, stage]
        serve = held.manifest.serve
        assert serve is not None, "no others are held"
        values = checked_inputs((held.stage,), {a.name: a for a in inputs}, serve.sizes, edges=True)
        worker = self._context.on_behalf_of(held.manifest.author, job, serves=True).compute
        try:
            outputs: list[Array] = await worker.run(partial(_evaluate, held, values))
        except JobError:
            raise
        except IndexError:  # shapes and dtypes have been checked by `checked_inputs`
            raise JobError("input: an index beyond a table of the model") from None
        except (ValueError, RuntimeError) as error:
            raise JobFailed(
                f"stage {held.stage.index} of {held.manifest.name}: {error_line(error)}"
            ) from None
        return outputs


def _evaluate(held: _Held, values: Mapping[str, Array]) -> list[Array]:
    """Runs in the device's thread."""
    outputs = held.plane.evaluate({name: _tensor(array) for name, array in values.items()})
    size = sum(t.numel() * t.element_size() for t in outputs.values())
    if size > MAX_RUN_BYTES:
        raise JobError(
            f"input: what stage {held.stage.index} makes of so many samples has {size} bytes; at most {MAX_RUN_BYTES}: "
            "fewer at once (--batch)"
        )
    return [_array(name, tensor) for name, tensor in outputs.items()]


def _tensor(array: Array) -> torch.Tensor:
    outputs = torch.frombuffer(bytearray(array.data), dtype=TORCH_DTYPES[array.dtype])
    return outputs.reshape(array.shape)


def _array(name: str, tensor: torch.Tensor) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    assert dtype in DTYPE_BYTES, "a graph has no others"
    flat = tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return Array(name, dtype, tuple(tensor.shape), flat.tobytes())
