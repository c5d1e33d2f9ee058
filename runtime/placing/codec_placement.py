"""A training job's placement together with the codecs of its edges, since each depends on the other: the cost of an edge over a
slow link depends on its codec, and which edges cross slow links depends on the placement.

The job is placed as if all edges were dense, and as if all had the least and the most lossy codec that it allows; codecs are
chosen for each of these placements, the least lossy that are nearly as fast as any, and the placement with the shortest simulated
step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from fusion.compression import spec as specs
from fusion.compression.adaptive import ELEMENT_WISE, CodecSpeed
from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.memory import MemoryConfig
from fusion.dag.ir.graph import Graph
from fusion.dag.placement import pipeline as pipelines
from fusion.dag.placement.codec_cost import CodecCost
from fusion.dag.placement.network import Network
from fusion.dag.placement.pipeline import Pipeline, pipeline
from fusion.dag.placement.place import Placement, Scheduler, place
from fusion.dag.placement.schedule import Schedule
from fusion.dag.placement.simulate import Trace, simulate
from fusion.runtime.job.manifest import CompressionConfig, EdgeCodecs, TrainConfig
from fusion.runtime.placing.codec_choice import (
    WITH_TOPK,
    StageTraffic,
    codec_costs,
    edges_of,
    fastest_codecs,
    ties_of,
)

_ELEMENTS = 1 << 18  # of a typical tensor: bytes per element hardly depend on it
_ITEMSIZE = 4
_DEEPEST = 8  # microbatches in flight for each stage ahead, at most
_DEEPER = 0.01  # share of the step that a deeper pipeline must save


@dataclass(frozen=True, kw_only=True)
class CodecPlacement:
    placement: Placement  # with the schedule that a job takes
    codecs: EdgeCodecs
    costs: pipelines.EdgeCosts  # of `codecs`
    trace: Trace  # of its step


def place_with_codecs(
    graph: Graph,
    network: Network,
    sizes: Mapping[str, int],
    microbatches: int,
    compression: CompressionConfig,
    speeds: Mapping[str, CodecSpeed],
    memory: MemoryConfig,
    *,
    requested: Schedule,
    stages: int | None = None,
    scheduler: Scheduler = "op-fence",
) -> CodecPlacement:
    """`sizes` are those of one microbatch, `speeds` those of codecs, `requested` the schedule of the job's file. Every stage fits
    its owner. Raises PlacementError."""
    lay = partial(pipeline, graph, network=network, sizes=sizes, memory=memory)
    found: dict[tuple[tuple[int, ...], tuple[str, ...]], tuple[float, CodecPlacement]] = {}
    for wire in _assumed(compression, speeds):
        placed = place(
            graph, network, sizes, microbatches, stages=stages, scheduler=scheduler, wire=wire, memory=memory,
            gpipe=requested == "gpipe",
        )  # fmt: skip
        if (placed.cuts, placed.owners) not in found:
            runs = as_launched(placed, requested, lambda runs: _fits(lay(runs)))
            found[placed.cuts, placed.owners] = _wired(graph, network, sizes, runs, compression, speeds, lay)
    return min(found.values(), key=lambda item: item[0])[1]


def as_launched(found: Placement, requested: Schedule, fits: Callable[[Placement], bool]) -> Placement:
    """With the schedule of the job: GPipe if its file requests it, else that of the placement, with the default number of
    microbatches in flight at least, where memory permits, since real stages are less regular than predicted ones."""
    if requested == "gpipe":
        return replace(found, schedule="gpipe")
    runs = replace(found, depth=max(found.depth, TrainConfig.depth))
    while runs.depth > found.depth and not fits(runs):
        runs = replace(runs, depth=runs.depth - 1)
    return runs


def codec_families(compression: CompressionConfig) -> tuple[str, ...]:
    """Those whose speeds are needed to choose the job's codecs."""
    match compression.kind:
        case "none":
            return ()
        case "uniform":
            family = specs.parse(compression.codec).family
            return (family,) if family != "none" else ()
    more = (WITH_TOPK,) if "topk" in compression.families else ()
    return tuple(dict.fromkeys((*compression.families, *more)))


def _wired(
    graph: Graph,
    network: Network,
    sizes: Mapping[str, int],
    runs: Placement,
    compression: CompressionConfig,
    speeds: Mapping[str, CodecSpeed],
    lay: Callable[..., Pipeline],
) -> tuple[float, CodecPlacement]:
    """The seconds of its simulated step, and the placement with its codecs."""
    parts = split(graph, runs.cuts)
    edges, ties = edges_of(parts), ties_of(parts, sizes)
    dense = lay(runs)
    busiest = max(stage.forward_seconds + stage.backward_seconds for stage in dense.stages)

    @lru_cache(maxsize=2)
    def traced(codecs: EdgeCodecs, depth: int) -> Trace:
        costs = codec_costs(codecs, edges, sizes, speeds, compression.reuse_mask)
        return simulate(lay(replace(runs, depth=depth), edge_costs=costs))

    first = runs.depth

    def simulated(codecs: EdgeCodecs, depth: int = first) -> float:
        return traced(codecs, depth).step_seconds

    traffic = StageTraffic(edges=edges, ties=ties, sizes=sizes, owners=runs.owners, network=network)
    codecs = fastest_codecs(traffic, compression, speeds, busiest, simulated)
    seconds = simulated(codecs)
    # With fewer bytes latency weighs more, and more microbatches in flight hide it.
    for depth in range(runs.depth + 1, _DEEPEST + 1):
        deep = replace(runs, depth=depth)
        if runs.schedule != "1f1b" or not _fits(lay(deep)):
            break
        took = simulated(codecs, depth)
        if took < seconds * (1 - _DEEPER):
            runs, seconds = deep, took
    costs = codec_costs(codecs, edges, sizes, speeds, compression.reuse_mask)
    trace = traced(codecs, runs.depth)
    return seconds, CodecPlacement(placement=runs, codecs=codecs, costs=costs, trace=trace)


def _fits(pipe: Pipeline) -> bool:
    """Whether every owner has the memory that its stages need."""
    return all(
        load.memory_bytes <= pipe.network.device(owner).memory_bytes
        for load, owner in zip(pipe.stages, pipe.owners, strict=True)
    )


def _assumed(compression: CompressionConfig, speeds: Mapping[str, CodecSpeed]) -> list[CodecCost | None]:
    """The assumed codec of all floating-point edges, one placement for each; None is dense."""
    match compression.kind:
        case "none":
            return [None]
        case "uniform":
            spec = specs.parse(compression.codec)
            if spec.family == "none":
                return [None]
            bytes_per_element = spec.payload_bytes(_ELEMENTS, _ITEMSIZE) / _ELEMENTS
            return [_cost(spec.family, bytes_per_element, speeds)]
    gentle = [family for family in ELEMENT_WISE if family in compression.families]
    assumed: list[CodecCost | None] = [None]
    for family in dict.fromkeys((*gentle[:1], *gentle[-1:])):
        bytes_per_element = specs.Spec(family=family).payload_bytes(_ELEMENTS, _ITEMSIZE) / _ELEMENTS
        assumed.append(_cost(family, max(bytes_per_element, _ITEMSIZE / compression.ratio), speeds))
    if "topk" in compression.families:
        assumed.append(_cost("topk", _ITEMSIZE / compression.ratio, speeds))
    return assumed


def _cost(family: str, bytes_per_element: float, speeds: Mapping[str, CodecSpeed]) -> CodecCost:
    return CodecCost(
        name=family,
        bytes_per_element=bytes_per_element,
        encode_seconds_per_element=_ITEMSIZE / speeds[family].encode_bytes_per_second,
        decode_seconds_per_element=_ITEMSIZE / speeds[family].decode_bytes_per_second,
    )
