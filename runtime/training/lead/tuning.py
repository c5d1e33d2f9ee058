"""Whether the codecs of a running job should change, given what is known of its links. Pure.

Measurements are noisy, and a job should not change with every figure. A new table is considered only once a rate, or the
compute time of the busiest stage, differs by more than CHANGED times from the figures by which the current table was chosen;
noise of 15 % either way stays below that. It is adopted only if it pays: steps become GAIN times as fast, or no slower with
less compression.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf

from fusion.compression.adaptive import CodecSpeed
from fusion.compression.spec import parse
from fusion.dag.cutting.costs import type_bytes
from fusion.dag.cutting.source import operators
from fusion.dag.cutting.stage import Edge, Stage
from fusion.dag.ir.opset import needed_version
from fusion.dag.placement.codec_cost import DENSE, CodecCost
from fusion.dag.placement.network import Network
from fusion.dag.placement.pipeline import Flow, Pipeline, StageLoad
from fusion.dag.placement.step_model import step_seconds
from fusion.runtime.job.manifest import EdgeCodecs, TrainConfig
from fusion.runtime.placing.codec_choice import (
    StageTraffic,
    Tie,
    codec_costs,
    edges_of,
    elements_of,
    fastest_codecs,
    ties_of,
)

CHANGED = 1.4
GAIN = 1.25
SAME = 1.02  # ratios up to this count as equal
BACKWARD = 2 / 3  # share of a microbatch's compute time: the usual two to one


@dataclass(frozen=True, kw_only=True)
class Job:
    """The constants of a job while it trains. `memory_bytes`: needed on a stage's peer; `state_bytes`: sent by a handover; by stage."""

    config: TrainConfig
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...]
    memory_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    opset: int = 1  # version that its peers must support
    ops: frozenset[str] = frozenset()  # operators that they must run


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measurements of the job at one moment. `compute_seconds`: of each stage for one microbatch, both passes."""

    owners: tuple[str, ...]
    network: Network
    compute_seconds: tuple[float, ...]
    speeds: Mapping[str, CodecSpeed]


def job_of(config: TrainConfig, stages: Sequence[Stage], memory_bytes: Sequence[int]) -> Job:
    """`stages`: all those of the job; `memory_bytes`: needed by each."""
    return Job(
        config=config,
        edges=edges_of(stages),
        ties=ties_of(stages, config.sizes),
        memory_bytes=tuple(memory_bytes),
        state_bytes=tuple(state_bytes(stage) for stage in stages),
        opset=max(needed_version(stage.graph) for stage in stages),
        ops=frozenset[str]().union(*(operators(stage.graph) for stage in stages)),
    )


def state_bytes(stage: Stage) -> int:
    """The bytes of a stage's variables, with two optimizer slots for each trainable one."""
    return sum(type_bytes(v.type) * (3 if v.trainable else 1) for v in stage.graph.variables)


def running(job: Job, measurements: Measurements, codecs: EdgeCodecs) -> Pipeline:
    """The job as it runs now, with the table `codecs`; ties are counted as part of each microbatch's traffic."""
    config = job.config
    costs = codec_costs(
        codecs, job.edges, job.config.sizes, measurements.speeds, config.compression.reuse_mask
    )
    flows = []
    for edge in job.edges:
        dense, elements = DENSE[edge.type.dtype], elements_of(edge.type, job.config.sizes)
        for consumer in edge.consumers:
            flows.append(
                Flow(
                    name=edge.name,
                    producer=edge.producer,
                    consumer=consumer,
                    elements=elements,
                    forward=costs.get((edge.name, "forward"), dense),
                    backward=costs.get((edge.name, "backward"), dense) if edge.needs_gradient else None,
                )
            )
    table = {name: forward for name, forward, _ in codecs}
    for tie in job.ties:
        bytes_ = parse(table.get(tie.variable, "none")).payload_bytes(tie.elements, tie.itemsize)
        share = CodecCost(
            name="tie", bytes_per_element=bytes_ / max(1, tie.elements) / max(1, config.microbatches)
        )
        for one, other in permutations(tie.stages, 2):
            if one < other:
                flows.append(
                    Flow(
                        name=tie.variable, producer=one, consumer=other, elements=tie.elements,
                        forward=share, backward=share,
                    )
                )  # fmt: skip
    return Pipeline(
        stages=tuple(
            StageLoad(
                forward_seconds=seconds * (1 - BACKWARD),
                backward_seconds=seconds * BACKWARD,
                update_seconds=0.0,
                memory_bytes=memory,
            )
            for seconds, memory in zip(measurements.compute_seconds, job.memory_bytes, strict=True)
        ),
        flows=tuple(flows),
        owners=measurements.owners,
        network=measurements.network,
        microbatches=config.microbatches,
        training=True,
        schedule=config.schedule,
        depth=config.depth,
    )


def better_codecs(
    job: Job, codecs: EdgeCodecs, now: Measurements, known: Measurements | None = None
) -> EdgeCodecs | None:
    """A table to replace `codecs`, or None. `known`: the measurements by which `codecs` were chosen; None where unknown."""
    if known is not None and not changed(job, known, now):
        return None
    best = fastest_codecs(
        StageTraffic(
            edges=job.edges, ties=job.ties, sizes=job.config.sizes, owners=now.owners, network=now.network
        ),
        job.config.compression,
        now.speeds,
        max(now.compute_seconds, default=0.0),
        lambda codecs: step_seconds(running(job, now, codecs)).seconds,
    )
    if best == codecs or not pays(running(job, now, codecs), running(job, now, best)):
        return None
    return best


def changed(job: Job, known: Measurements, now: Measurements) -> bool:
    """Whether the figures that decide the codecs have clearly changed."""
    if known.owners != now.owners:
        return True
    stages = {(edge.producer, consumer) for edge in job.edges for consumer in edge.consumers}
    stages |= {pair for tie in job.ties for pair in permutations(tie.stages, 2)}
    pairs = {(now.owners[a], now.owners[b]) for a, b in stages}
    pairs = {pair for a, b in pairs if a != b for pair in ((a, b), (b, a))}
    figures = [(known.network.rate(*pair), now.network.rate(*pair)) for pair in pairs]
    for peer in {peer for pair in pairs for peer in pair}:
        before, after = known.network.device(peer), now.network.device(peer)
        figures.append((before.up_bytes_per_second, after.up_bytes_per_second))
        figures.append((before.down_bytes_per_second, after.down_bytes_per_second))
    figures.append((max(known.compute_seconds), max(now.compute_seconds)))
    # A line that does not limit transfers, or no longer does, has no figure: that alone is no change.
    return any(inf > max(pair) > CHANGED * min(pair) for pair in figures)


def pays(old: Pipeline, new: Pipeline) -> bool:
    """Whether to change to another table: `old` and `new` predict the same job and differ in the codecs alone."""
    before, after = step_seconds(old).seconds, step_seconds(new).seconds
    if GAIN * after < before:
        return True
    return after <= SAME * before and _kinder(new.flows, old.flows)


def _kinder(new: Iterable[Flow], old: Iterable[Flow]) -> bool:
    """Whether some flow is compressed less, and none more."""
    sizes = [
        pair
        for one, other in zip(new, old, strict=True)
        for pair in ((one.forward_bytes, other.forward_bytes), (one.backward_bytes, other.backward_bytes))
    ]
    return all(a >= b for a, b in sizes) and any(a > SAME * b for a, b in sizes)


def codec_summary(codecs: EdgeCodecs, edges: Sequence[str]) -> str:
    """`int8 on 3, topk:0.05 on 1 of 5 edges`; empty where there are no edges."""
    if not edges:
        return ""
    names = frozenset(edges)
    kinds = Counter(
        there if there == back else f"{there}/{back}" for name, there, back in codecs if name in names
    )
    if not kinds:
        return f"none on {len(names)} of {len(names)} edges"
    return ", ".join(f"{kind} on {count}" for kind, count in kinds.most_common()) + f" of {len(names)} edges"
