"""A placement as users read it: what each peer computes and sends, how long a step takes and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from fusion.dag.cutting.costs import node_costs
from fusion.dag.cutting.memory import MemoryConfig
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.network import Network
from fusion.dag.placement.pipeline import EdgeCosts, Pipeline, pipeline
from fusion.dag.placement.place import Placement
from fusion.dag.placement.simulate import Trace, simulate
from fusion.dag.placement.step_model import step_seconds
from fusion.runtime.job.manifest import CompressionConfig
from fusion.swarm.links.view import BYTES_PER_MBIT


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    stage: int
    peer: str
    first_node: int  # of the graph's
    last_node: int
    flops_share: float  # of a step's, from 0 to 1
    memory_bytes: int  # that it needs
    lent_bytes: int  # that its peer has
    seconds: float  # of computing, in a step
    busy: float  # share of the simulated step


@dataclass(frozen=True, kw_only=True)
class PlannedLink:
    """What one peer sends to another in a step."""

    sender: str
    receiver: str
    activation_bytes: float
    gradient_bytes: float
    codecs: tuple[str, ...]
    mbps: float  # when nothing else uses the lines of the two
    rtt_ms: float
    seconds: float  # to send it all at that rate
    known: bool  # False: rate and latency are a guess


@dataclass(frozen=True, kw_only=True)
class PlannedLine:
    """What a peer sends and receives in a step over a line that limits it: its own uplink and downlink."""

    peer: str
    up_seconds: float
    down_seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    stages: tuple[PlannedStage, ...]
    links: tuple[PlannedLink, ...]
    lines: tuple[PlannedLine, ...]
    left_out: tuple[str, ...]  # peers that get nothing to do
    microbatches: int
    schedule: str
    in_flight: int  # microbatches that the first stage holds at most
    predicted_seconds: float  # a step, by the closed form
    simulated_seconds: float  # a step, played out
    bound_seconds: float  # a step, if whatever is busiest were busy all the time
    bottleneck: str
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    samples: int = 0  # that a step trains on
    price_usd: float | None = None  # of all peers that were offered; None where it is not known of each

    @property
    def samples_per_second(self) -> float:
        return self.samples / max(self.simulated_seconds, 1e-12)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        for link in found["links"]:
            link["from"], link["to"] = link.pop("sender"), link.pop("receiver")
            if link["mbps"] == float("inf"):
                link["mbps"] = None  # JSON has no infinity
        return found


def planned(
    graph: Graph,
    placement: Placement,
    network: Network,
    sizes: Mapping[str, int],
    memory: MemoryConfig,
    *,
    edge_costs: EdgeCosts | None = None,
    compression: CompressionConfig | None = None,
    known: Callable[[str, str], bool] = lambda a, b: True,
    price_usd: float | None = None,
    trace: Trace | None = None,
) -> Plan:
    """`sizes`: of one microbatch; `known`: whether the link of an ordered pair of peers was measured; `price_usd`: of the peers in
    `network`; `trace`: of a simulated step, where there is one already."""
    pipe = pipeline(graph, placement, network, sizes, edge_costs, memory)
    prediction, trace = step_seconds(pipe), trace or simulate(pipe)
    flops = [c.forward_flops + c.backward_flops * placement.training for c in node_costs(graph, sizes)]
    return Plan(
        stages=_stages(pipe, placement.cuts, flops, network, trace),
        links=_links(pipe, network, trace, known),
        lines=_lines(pipe, trace),
        left_out=placement.left_out,
        microbatches=pipe.microbatches,
        schedule=pipe.schedule,
        in_flight=pipe.in_flight(0),
        predicted_seconds=prediction.seconds,
        simulated_seconds=trace.step_seconds,
        bound_seconds=prediction.bound_seconds,
        bottleneck=prediction.bottleneck,
        compression=compression or CompressionConfig(),
        samples=pipe.microbatches * sizes.get("batch", 1),
        price_usd=price_usd,
    )


def _stages(
    pipe: Pipeline, cuts: Sequence[int], flops: Sequence[int], network: Network, trace: Trace
) -> tuple[PlannedStage, ...]:
    """`flops`: of each node of the graph in a step."""
    return tuple(
        PlannedStage(
            stage=s,
            peer=pipe.owners[s],
            first_node=first,
            last_node=end - 1,
            flops_share=sum(flops[first:end]) / max(1, sum(flops)),
            memory_bytes=pipe.stages[s].memory_bytes,
            lent_bytes=network.device(pipe.owners[s]).memory_bytes,
            seconds=trace.stage_busy_seconds[s],
            busy=trace.stage_busy_seconds[s] / max(trace.step_seconds, 1e-12),
        )
        for s, (first, end) in enumerate(pairwise((0, *cuts, len(flops))))
    )


def _links(
    pipe: Pipeline, network: Network, trace: Trace, known: Callable[[str, str], bool]
) -> tuple[PlannedLink, ...]:
    sent: dict[tuple[str, str], list[float]] = {}
    codecs: dict[tuple[str, str], dict[str, None]] = {}
    for flow in pipe.flows:
        ends = pipe.owners[flow.producer], pipe.owners[flow.consumer]
        for way, cost, bytes_ in (
            (0, flow.forward, flow.forward_bytes),
            (1, flow.backward, flow.backward_bytes),
        ):
            if cost is not None and ends[0] != ends[1]:
                pair = ends[::-1] if way else ends
                sent.setdefault(pair, [0.0, 0.0])[way] += bytes_ * pipe.microbatches
                codecs.setdefault(pair, {})[cost.name] = None  # fmt: skip
    return tuple(
        PlannedLink(
            sender=a,
            receiver=b,
            activation_bytes=sent[a, b][0],
            gradient_bytes=sent[a, b][1],
            codecs=tuple(codecs[a, b]),
            mbps=network.rate(a, b) / BYTES_PER_MBIT,
            rtt_ms=(network.link(a, b).alpha_seconds + network.link(b, a).alpha_seconds) * 1000,
            seconds=trace.links[a, b].busy_seconds,
            known=known(a, b),
        )
        for a, b in sent
    )


def _lines(pipe: Pipeline, trace: Trace) -> tuple[PlannedLine, ...]:
    return tuple(
        PlannedLine(peer=peer, up_seconds=up, down_seconds=down)
        for peer in dict.fromkeys(pipe.owners)
        for up, down in [
            tuple(loads[peer].busy_seconds if peer in loads else 0.0 for loads in (trace.uplinks, trace.downlinks))
        ]
        if up or down
    )  # fmt: skip
