"""The stages of a job's graph: its blob read, checked and cut by the manifest's cuts, once for all stages that are loaded here; and
what each needs, computed from the graph, as the manifest's figures are untrusted.

Nothing more expensive than the graph is fetched for a stage whose manifest declares less than it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cachetools import LRUCache

from fusion.dag.cutting.costs import FLOAT32_BYTES, bound_types, type_bytes
from fusion.dag.cutting.cuts import split, tie_groups
from fusion.dag.cutting.memory import MemoryConfig, measure_memory
from fusion.dag.cutting.stage import Stage, TieGroup
from fusion.dag.ir import serialise
from fusion.dag.ir.dims import bind, size
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Ref
from fusion.dag.placement.misfit import size_text
from fusion.dag.placement.pipeline import max_in_flight
from fusion.runtime.device.overrun import LONGEST_SECONDS, call_seconds
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import Refused, Understated, Unsupported
from fusion.runtime.job.manifest import CompressionConfig, Manifest, OptimizerConfig, ServeConfig, TrainConfig
from fusion.swarm.directory.records import Digest, JobId

MAX_GRAPH_BYTES = 64 << 20
# Of a stage: all become one Python function, whose compilation blocks a peer's loop, a quarter of a second for so many.
MAX_STAGE_NODES = 25_000
REMEMBERED_GRAPHS = 8
REMEMBERED_READS = 1024
TOLERATED_RATIO, TOLERATED_BYTES = 1.25, 16 << 20  # that a stage may need beyond what its manifest declares
SAFETENSORS_HEADER_BYTES = 1 << 20  # and as much again for each thousand tensors

Config = TrainConfig | ServeConfig

# All stages, and the variables that several of them hold
Stages = tuple[tuple[Stage, ...], tuple[TieGroup, ...]]


async def load_stages(context: Context, job: JobId, manifest: Manifest) -> Stages:
    """Raises BlobError where the graph cannot be fetched, Unsupported where it is not valid, or not for this release."""
    return await _cut(context, job, await _read(context, job, manifest), manifest)


async def _read(context: Context, job: JobId, manifest: Manifest) -> bytes:
    hints = [peer for peer in manifest.proposed if peer]
    return await context.blobs.of(job).read(manifest.graph, MAX_GRAPH_BYTES, hints)


async def _cut(context: Context, job: JobId, data: bytes, manifest: Manifest) -> Stages:
    def cut() -> Stages:
        stages = split(serialise.decode(data), manifest.cuts)
        return stages, tie_groups(stages)

    try:
        return await context.work_for(job, manifest.author, cut)
    except GraphError as error:
        raise Unsupported(f"the graph of {manifest.name}: {error}") from None


def whole_stage(data: bytes, name: str) -> Stage:
    """The stage of a graph in one piece. Raises Unsupported as `load_stages`, and Refused where it has more than
    MAX_STAGE_NODES."""
    try:
        stage = split(serialise.decode(data), ())[0]
    except GraphError as error:
        raise Unsupported(f"the graph of {name}: {error}") from None
    _require_few_nodes(stage, name)
    return stage


class StageGraphs:
    """Remembers the last few: a stage that stands by, runs and stands by again is decoded once, and so are jobs of one graph."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: LRUCache[tuple[Digest, tuple[int, ...]], Stages] = LRUCache(REMEMBERED_GRAPHS)
        # The jobs whose graph was read as theirs: another job with the same graph may admit other readers.
        self._read: LRUCache[tuple[JobId, Digest], None] = LRUCache(REMEMBERED_READS)
        # One graph at a time: each thread that runs Python delays the loop by a switch interval.
        self._turn = asyncio.Lock()

    async def of(self, job: JobId, manifest: Manifest) -> Stages:
        """As `load_stages`."""
        read, cut = (job, manifest.graph), (manifest.graph, tuple(manifest.cuts))
        if read not in self._read or cut not in self._known:
            data = await _read(self._context, job, manifest)
            self._read[read] = None
            async with self._turn:
                if cut not in self._known:
                    self._known[cut] = await _cut(self._context, job, data, manifest)
                return self._known[cut]
        return self._known[cut]

    async def check(self, job: JobId, manifest: Manifest, stage: int, beside_bytes: int = 0) -> None:
        """Understated where the stage, with `beside_bytes`, needs clearly more memory than the manifest declares (without a
        declaration, none is reserved), Refused where it has more than MAX_STAGE_NODES or a call of it would take longer here than
        LONGEST_SECONDS, Unsupported where no peer could train the job, or its sizes overflow. Raises as `of`."""
        try:
            await self._check(job, manifest, stage, beside_bytes)
        except GraphError as error:
            raise Unsupported(f"stage {stage} of {manifest.name}: {error}") from None

    async def _check(self, job: JobId, manifest: Manifest, stage: int, beside_bytes: int) -> None:
        stages, _ = await self.of(job, manifest)
        _check_loss(stages, manifest)
        _require_few_nodes(stages[stage], manifest.name)
        work_for = self._context.work_for
        needed = await work_for(job, manifest.author, needed_bytes, stages[stage], manifest)
        needed += beside_bytes
        declared = manifest.needed_bytes(stage)
        if needed > declared * TOLERATED_RATIO + TOLERATED_BYTES:
            raise Understated(
                f"stage {stage} of {manifest.name} needs {size_text(needed)}: its manifest says {size_text(declared)}"
            )
        rate = self._context.flops_per_second
        if rate > 0:
            config = manifest.train or manifest.serve
            assert config is not None, "a manifest without one is refused"
            seconds = await work_for(job, manifest.author, longest_call, stages[stage], config, rate)
            if seconds > LONGEST_SECONDS:
                raise Refused(
                    f"stage {stage} of {manifest.name}: one call of it would take this device about "
                    f"{seconds:.3g} s; at most {LONGEST_SECONDS:.0f} s"
                )


def _require_few_nodes(stage: Stage, name: str) -> None:
    if (count := len(stage.graph.nodes)) > MAX_STAGE_NODES:
        raise Refused(f"stage {stage.index} of {name} has {count} nodes: at most {MAX_STAGE_NODES}")


def _check_loss(stages: Sequence[Stage], manifest: Manifest) -> None:
    """The loss must be one number: otherwise peer after peer would find out after a whole step."""
    if manifest.train is None:
        return
    maker = next((stage for stage in reversed(stages) if 0 in stage.results), None)
    if maker is None:
        raise Unsupported(f"the graph of {manifest.name} has no loss")
    loss = maker.graph.types[maker.graph.outputs[len(maker.sends) + maker.results.index(0)]]
    sizes = manifest.train.sizes
    if any(bind(dim, sizes) != 1 for dim in loss.shape):
        raise Unsupported(f"the loss of {manifest.name} is {loss}, and not one number")


def needed_bytes(stage: Stage, manifest: Manifest) -> int:
    """The memory that a stage needs at least: what the launcher declares for it, less the residuals of variables that it shares.
    From the stage alone, as a job may have thousands of them. GraphError where its sizes overflow."""
    config = manifest.train or manifest.serve
    assert config is not None, "a manifest without one is refused"
    in_flight, training = 1, isinstance(config, TrainConfig)
    if isinstance(config, TrainConfig):
        in_flight = max_in_flight(
            stage.index, manifest.stages, config.microbatches, True, config.schedule, config.depth
        )
    bounds = (0, len(stage.graph.nodes))
    if not stage.graph.nodes:
        return weights_bytes(stage)
    needing = [Ref(edge.name) for edge in stage.receives if edge.needs_gradient]
    memory, sizes = memory_config(config), config.sizes
    needed = measure_memory(stage.graph, bounds, sizes, training, memory, needing).bytes(0, 1, in_flight)
    if training and memory.error_feedback:
        types = bound_types(stage.graph, sizes)
        needed += sum(FLOAT32_BYTES * bind(size(types[ref].shape), sizes) for ref in needing)
    return int(needed)


def longest_call(stage: Stage, config: Config, flops_per_second: float) -> float:
    """`call_seconds` of one microbatch, of a prefill chunk, or of a run of a model that does not generate. Without a KV cache a long
    session takes longer, but short ones can be served all the same."""
    sizes = config.sizes
    if isinstance(config, ServeConfig) and not config.outputs:
        sizes["sequence"] = min(config.prefill_chunk, config.max_sequence)
    return call_seconds(stage, sizes, flops_per_second)


def weights_bytes(stage: Stage) -> int:
    """Of its variables."""
    return sum(type_bytes(v.type) for v in stage.graph.variables)


def file_bytes(tensors_bytes: int, tensors: int) -> int:
    """The most that a safetensors file of so many tensors may take."""
    return tensors_bytes + SAFETENSORS_HEADER_BYTES * (1 + tensors // 1000)


def memory_config(config: Config) -> MemoryConfig:
    if isinstance(config, TrainConfig):
        return training_memory(config.optimizer, config.compression)
    return serving_memory(config)


def training_memory(optimizer: OptimizerConfig, compression: CompressionConfig) -> MemoryConfig:
    return MemoryConfig(
        optimizer_slots=2 if optimizer.kind == "adamw" else int(optimizer.momentum != 0),
        error_feedback=compression.kind != "none" and compression.error_feedback,
    )


def serving_memory(config: ServeConfig) -> MemoryConfig:
    return MemoryConfig(chunk=config.prefill_chunk if config.cache == "kv" else None)
