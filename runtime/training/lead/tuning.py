"""Whether the codecs of a running job should change, from what is known of its links by now: pure.

What was measured is never the same twice, and a job should not change its mind with every figure. So a new table is only
looked for once a rate, or what the busiest stage computes, is more than CHANGED times what the table in use was chosen
with; noise of 15 % either way stays below that. And it is taken only where it pays: a step takes less than the GAINth
part, or nothing takes longer and less is taken away.
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
SAME = 1.02  # what is no further apart counts as equal
BACKWARD = 2 / 3  # of a microbatch's computing: the usual two to one


@dataclass(frozen=True, kw_only=True)
class Job:
    """What stays as it is while a job trains. By stage: what it needs on its peer, and what a hand-over sends."""

    config: TrainConfig
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...]
    memory_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    opset: int = 1  # that its peers have to know
    ops: frozenset[str] = frozenset()  # that they have to run


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What is known of it at one moment. `compute_seconds` of each stage for one microbatch, both passes."""

    owners: tuple[str, ...]
    network: Network
    compute_seconds: tuple[float, ...]
    speeds: Mapping[str, CodecSpeed]


def job_of(config: TrainConfig, stages: Sequence[Stage], memory_bytes: Sequence[int]) -> Job:
    """`stages` are all those of the job, `memory_bytes` what each needs."""
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
    """Of its variables, and what an optimizer keeps of those that it trains."""
    return sum(type_bytes(v.type) * (3 if v.trainable else 1) for v in stage.graph.variables)


def running(job: Job, sight: Sight, codecs: EdgeCodecs) -> Pipeline:
    """The job as it runs now, with that table; ties are a part of each microbatch's traffic."""
    config = job.config
    costs = codec_costs(codecs, job.edges, job.config.sizes, sight.speeds, config.compression.reuse_mask)
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
            for seconds, memory in zip(sight.compute_seconds, job.memory_bytes, strict=True)
        ),
        flows=tuple(flows),
        owners=sight.owners,
        network=sight.network,
        microbatches=config.microbatches,
        training=True,
        schedule=config.schedule,
        depth=config.depth,
    )


def better_codecs(job: Job, codecs: EdgeCodecs, now: Sight, known: Sight | None = None) -> EdgeCodecs | None:
    """The table to go on with instead of `codecs`, or None where that one does. `known`: what it was chosen with; None
    where that is not known."""
    if known is not None and not changed(job, known, now):
        return None
    found = fastest_codecs(
        StageTraffic(
            edges=job.edges, ties=job.ties, sizes=job.config.sizes, owners=now.owners, network=now.network
        ),
        job.config.compression,
        now.speeds,
        max(now.compute_seconds, default=0.0),
        lambda codecs: step_seconds(running(job, now, codecs)).seconds,
    )
    if found == codecs or not pays(running(job, now, codecs), running(job, now, found)):
        return None
    return found


def changed(job: Job, known: Sight, now: Sight) -> bool:
    """Whether what decides over the codecs is clearly other than it was."""
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
    # A line that was not seen to limit anything, or no longer, has no figure: that alone is no news.
    return any(inf > max(pair) > CHANGED * min(pair) for pair in figures)


def pays(old: Pipeline, new: Pipeline) -> bool:
    """Whether a table is worth changing for another: two predictions of the same job that differ in nothing else."""
    before, after = step_seconds(old).seconds, step_seconds(new).seconds
    if GAIN * after < before:
        return True
    return after <= SAME * before and _kinder(new.flows, old.flows)


def _kinder(new: Iterable[Flow], old: Iterable[Flow]) -> bool:
    """Whether less is taken away, from something, and from nothing more."""
    sizes = [
        pair
        for one, other in zip(new, old, strict=True)
        for pair in ((one.forward_bytes, other.forward_bytes), (one.backward_bytes, other.backward_bytes))
    ]
    return all(a >= b for a, b in sizes) and any(a > SAME * b for a, b in sizes)


def in_words(codecs: EdgeCodecs, edges: Sequence[str]) -> str:
    """One line for people: `int8 on 3, topk:0.05 on 1 of 5 edges`; nothing where there are no edges."""
    if not edges:
        return ""
    names = frozenset(edges)
    kinds = Counter(
        there if there == back else f"{there}/{back}" for name, there, back in codecs if name in names
    )
    if not kinds:
        return f"none on {len(names)} of {len(names)} edges"
    return ", ".join(f"{kind} on {count}" for kind, count in kinds.most_common()) + f" of {len(names)} edges"
