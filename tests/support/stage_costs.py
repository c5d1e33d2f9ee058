"""The cost of one stage, computed from its own graph as `split` cuts it: the cost tables of runs of nodes must agree with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusion.dag.cutting.costs import (
    bound_types,
    cast_once,
    differentiable,
    node_costs,
    stashed,
    storages,
    type_bytes,
)
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.ir.opset_spec import elements


@dataclass(frozen=True, kw_only=True)
class StageCost:
    forward_flops: int
    parameter_bytes: int
    trained_bytes: int  # gradients and optimizer state
    saved_bytes: int  # of one microbatch between its forward and its backward pass, received values included
    working_bytes: int  # at most, of values alive at once when each is dropped after its last use

    @property
    def static_bytes(self) -> int:
        return self.parameter_bytes + self.trained_bytes


def stage_cost(stage: Stage, sizes: Mapping[str, int], optimizer_slots: int = 2) -> StageCost:
    graph = stage.graph
    types = bound_types(graph, sizes)
    received = [Ref(edge.name) for edge in stage.receives if edge.needs_gradient]
    trained = [types[Ref(v.name)] for v in graph.variables if v.trainable and v.kind == "parameter"]
    return StageCost(
        forward_flops=sum(c.forward_flops for c in node_costs(graph, sizes)),
        parameter_bytes=sum(type_bytes(types[Ref(v.name)]) for v in graph.variables),
        trained_bytes=sum(type_bytes(t) + 4 * optimizer_slots * elements(t) for t in trained),
        saved_bytes=sum(node_saved_bytes(graph, sizes, differentiable(graph, received))),
        working_bytes=_working_bytes(stage, sizes),
    )


def node_saved_bytes(
    graph: Graph, sizes: Mapping[str, int], needs_gradient: frozenset[Ref] | None = None
) -> list[int]:
    """By how much each node makes the stash of the backward pass grow; `needs_gradient` as of `node_costs`."""
    types, storage = bound_types(graph, sizes), storages(graph)
    needs_gradient = differentiable(graph) if needs_gradient is None else needs_gradient
    seen = {*cast_once(graph), *(Ref(v.name) for v in graph.variables)}
    found = []
    for node in graph.nodes:
        own, values = stashed(node, types, needs_gradient, storage)
        found.append(own + sum(type_bytes(types[value]) for value in values - seen))
        seen |= values
    return found


def _working_bytes(stage: Stage, sizes: Mapping[str, int]) -> int:
    graph, types, storage = stage.graph, bound_types(stage.graph, sizes), storages(stage.graph)
    made, last = {Ref(i.name): 0 for i in graph.inputs}, {Ref(i.name): 0 for i in graph.inputs}
    for index, node in enumerate(graph.nodes):
        for ref in (*node.refs(), *(Ref(node.name, i) for i in range(len(node.results)))):
            made.setdefault(storage[ref], index)
            last[storage[ref]] = index
    last |= {storage[ref]: len(graph.nodes) for ref in graph.outputs}
    owned = [value for value in made if value.name not in graph.variable_names]
    return max(
        (
            sum(type_bytes(types[v]) for v in owned if made[v] <= index <= last[v])
            for index in range(len(graph.nodes))
        ),
        default=0,
    )
