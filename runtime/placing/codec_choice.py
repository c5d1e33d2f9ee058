"""The codecs of a job's edges, chosen by its links. Pure arithmetic, without torch: for the launcher,
for `plan`, and for the lead, which chooses anew when links change.

The rule is `fusion.compression.adaptive`; here the edges of a placement become the uses of links that are its input.
All that leaves a peer shares its uplink, all that reaches it shares its downlink, and all that goes from one peer to
another shares their link, each use in proportion to its dense bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf

from fusion.compression import spec as specs
from fusion.compression.adaptive import (
    DENSE,
    ELEMENT_WISE,
    CodecSpeed,
    Direction,
    EdgeUse,
    choose,
    least_lossy,
    target_seconds,
)
from fusion.compression.spec import Spec
from fusion.dag.cutting.cuts import tie_groups
from fusion.dag.cutting.stage import Edge, Stage
from fusion.dag.ir.dims import bind, size
from fusion.dag.ir.graph import DTYPE_BYTES, TensorType
from fusion.dag.placement import pipeline
from fusion.dag.placement.codec_cost import CodecCost
from fusion.dag.placement.network import Network
from fusion.runtime.job.manifest import CompressionConfig, EdgeCodecs

WITH_TOPK = "int8"  # what ties may have where topk is allowed: they keep every element

_HIDDEN = 0.25  # of what the busiest stage computes
_WORTH = 0.02  # for a smaller share of the step no more is taken away from what is sent


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A tied variable: at the end of a step each stage that holds it sends its gradient to each other."""

    variable: str
    elements: int
    itemsize: int
    stages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StageTraffic:
    """What the stages of a job send each other, and over which links."""

    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...]
    sizes: Mapping[str, int]  # of one microbatch
    owners: Sequence[str]  # the peers by stage
    network: Network


def edges_of(stages: Iterable[Stage]) -> tuple[Edge, ...]:
    """Every edge once, by the stage that makes it."""
    return tuple(edge for stage in stages for edge in stage.sends)


def ties_of(stages: Sequence[Stage], sizes: Mapping[str, int]) -> tuple[Tie, ...]:
    """The tied variables whose gradients a codec can compress."""
    types = {v.name: v.type for stage in stages for v in stage.graph.variables}
    return tuple(
        Tie(
            variable=group.variable,
            elements=elements_of(types[group.variable], sizes),
            itemsize=DTYPE_BYTES[types[group.variable].dtype],
            stages=group.stages,
        )
        for group in tie_groups(stages)
        if _floating(types[group.variable])
    )


def choose_codecs(
    traffic: StageTraffic,
    compression: CompressionConfig,
    speeds: Mapping[str, CodecSpeed],
    compute_seconds: float,
) -> EdgeCodecs:
    """The job's table: edges in their order, then ties; dense ones are not in it.

    `speeds` of the codecs, by family: one that it does not have is not chosen. `compute_seconds`: of the busiest stage for
    one microbatch, forward and backward."""
    match compression.kind:
        case "none":
            return ()
        case "uniform":
            return _uniform(traffic, compression.codec)
    families: dict[str, CodecSpeed] = {f: speeds[f] for f in compression.families if f in speeds}
    uses = _uses(traffic)
    found = choose(uses, compression.ratio, families, compute_seconds, reuse_mask=compression.reuse_mask)
    ways = [
        (edge.name, found.get((edge.name, "forward"), "none"), found.get((edge.name, "backward"), "none"))
        for edge in traffic.edges
    ]
    gentle: dict[str, CodecSpeed] = {f: speed for f, speed in families.items() if f in ELEMENT_WISE}
    if "topk" in families and WITH_TOPK in speeds:
        gentle[WITH_TOPK] = speeds[WITH_TOPK]
    target = target_seconds(uses, compression.ratio, compute_seconds)
    for tie in traffic.ties:
        spec = least_lossy(_tie_uses(tie, traffic), target, gentle)
        ways.append((tie.variable, str(spec), "none"))
    return tuple(way for way in ways if way[1:] != ("none", "none"))


def fastest_codecs(
    traffic: StageTraffic,
    compression: CompressionConfig,
    speeds: Mapping[str, CodecSpeed],
    compute_seconds: float,
    step_seconds: Callable[[EdgeCodecs], float],
) -> EdgeCodecs:
    """The least lossy table with which a step is nearly as short as with any, `step_seconds` being what a step takes with a
    table; the others as for `choose_codecs`. What computing hides in the long run still takes its time in the first
    microbatch and the last, so that it can pay to bring a link below what the busiest stage computes."""

    def chosen(floor: float) -> EdgeCodecs:
        return choose_codecs(traffic, compression, speeds, floor)

    gentle = chosen(compute_seconds)
    if compression.kind != "adaptive":
        return gentle
    tied = {tie.variable for tie in traffic.ties}
    best: EdgeCodecs = tuple(way for way in gentle if way[0] in tied)
    seconds = step_seconds(best)
    for found in dict.fromkeys((gentle, chosen(compute_seconds * _HIDDEN), chosen(0.0))):
        took = step_seconds(found)
        if took < seconds * (1 - _WORTH):
            best, seconds = found, took
    return best


def codec_costs(
    codecs: EdgeCodecs,
    edges: Sequence[Edge],
    sizes: Mapping[str, int],
    speeds: Mapping[str, CodecSpeed],
    reuse_mask: bool,
) -> pipeline.EdgeCosts:
    """The costs of the edges with `codecs`, for the step model: the exact bytes that are sent. A family without `speeds` takes no
    time."""
    table = {name: (specs.parse(forward), specs.parse(backward)) for name, forward, backward in codecs}
    found: dict[tuple[str, str], CodecCost] = {}
    for edge in edges:
        elements, itemsize = elements_of(edge.type, sizes), DTYPE_BYTES[edge.type.dtype]
        if edge.name not in table or not _floating(edge.type) or not elements:
            continue
        forward, backward = table[edge.name]
        masked = reuse_mask and forward.family == "topk" and not forward.is_dense(elements, itemsize)
        found[edge.name, "forward"] = _cost(forward, elements, itemsize, speeds, masked=False)
        found[edge.name, "backward"] = _cost(
            forward if masked else backward, elements, itemsize, speeds, masked=masked
        )
    return found


def _cost(
    spec: Spec, elements: int, itemsize: int, speeds: Mapping[str, CodecSpeed], *, masked: bool
) -> CodecCost:
    if spec.is_dense(elements, itemsize):
        return CodecCost(name=str(DENSE), bytes_per_element=itemsize)
    bytes_ = spec.payload_bytes_at(elements, itemsize) if masked else spec.payload_bytes(elements, itemsize)
    speed = speeds.get(spec.family, CodecSpeed(encode_bytes_per_second=inf, decode_bytes_per_second=inf))
    return CodecCost(
        name=str(spec),
        bytes_per_element=bytes_ / elements,
        encode_seconds_per_element=itemsize / speed.encode_bytes_per_second,
        decode_seconds_per_element=itemsize / speed.decode_bytes_per_second,
    )


def _uniform(traffic: StageTraffic, codec: str) -> EdgeCodecs:
    if codec == str(DENSE):
        return ()
    return (
        *((edge.name, codec, codec) for edge in traffic.edges if _floating(edge.type)),
        *((tie.variable, codec, str(DENSE)) for tie in traffic.ties),
    )


def _uses(traffic: StageTraffic) -> list[EdgeUse]:
    """Of edges that a codec can compress; the others only take their share of lines."""
    sizes, network = traffic.sizes, traffic.network
    moves = [
        (edge, direction, sender, receiver, elements_of(edge.type, sizes) * DTYPE_BYTES[edge.type.dtype])
        for edge in traffic.edges
        for direction, sender, receiver in _ways(edge, traffic.owners)
    ]
    out: Counter[str] = Counter()
    into: Counter[str] = Counter()
    between: Counter[tuple[str, str]] = Counter()
    for _, _, sender, receiver, bytes_ in moves:
        out[sender] += bytes_
        into[receiver] += bytes_
        between[sender, receiver] += bytes_
    return [
        EdgeUse(
            edge=edge.name,
            direction=direction,
            elements=elements_of(edge.type, sizes),
            itemsize=DTYPE_BYTES[edge.type.dtype],
            bytes_per_second=network.rate(a, b),
            uplink_share=_share(
                network, a, b, out[a] / bytes_, into[b] / bytes_, between[a, b] / bytes_
            ),
        )
        for edge, direction, a, b, bytes_ in moves
        if bytes_ and _floating(edge.type)
    ]  # fmt: skip


def _ways(edge: Edge, owners: Sequence[str]) -> Iterator[tuple[Direction, str, str]]:
    for consumer in edge.consumers:
        sender, receiver = owners[edge.producer], owners[consumer]
        if sender != receiver:
            yield "forward", sender, receiver
            if edge.needs_gradient:
                yield "backward", receiver, sender


def _share(network: Network, a: str, b: str, out: float, into: float, between: float) -> float:
    """The part of the rate from a to b that one use has; so many times its own bytes leave a, reach b, go from a to b."""
    rate = network.rate(a, b)
    if rate == inf:
        return 1.0
    up, down = network.device(a).up_bytes_per_second, network.device(b).down_bytes_per_second
    return min(1.0, min(network.link(a, b).bytes_per_second / between, up / out, down / into) / rate)


def _tie_uses(tie: Tie, traffic: StageTraffic) -> list[EdgeUse]:
    network, holders = traffic.network, list(dict.fromkeys(traffic.owners[stage] for stage in tie.stages))
    others = len(holders) - 1
    return [
        EdgeUse(
            edge=tie.variable,
            direction="forward",
            elements=tie.elements,
            itemsize=tie.itemsize,
            bytes_per_second=network.rate(a, b),
            uplink_share=_share(network, a, b, others, others, 1),
        )
        for a, b in permutations(holders, 2)
    ]


def elements_of(kind: TensorType, sizes: Mapping[str, int]) -> int:
    return bind(size(kind.shape), sizes)


def _floating(kind: TensorType) -> bool:
    """Whether a codec can compress it."""
    return "float" in kind.dtype and DTYPE_BYTES[kind.dtype] in (2, 4)
