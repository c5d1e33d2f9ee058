"""What one stage needs, counted from its own graph, as `split` cuts it: the tables of every run of nodes must agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusion.dag.cutting.costs import bound_types, node_costs, stashed, storages, type_bytes
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Ref
from fusion.dag.ir.opset import spec
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
    trained = [types[Ref(v.name)] for v in graph.variables if v.trainable and v.kind == "parameter"]
    return StageCost(
        forward_flops=sum(c.forward_flops for c in node_costs(graph, sizes)),
        parameter_bytes=sum(type_bytes(types[Ref(v.name)]) for v in graph.variables),
        trained_bytes=sum(type_bytes(t) + 4 * optimizer_slots * elements(t) for t in trained),
        saved_bytes=_saved_bytes(stage, sizes),
        working_bytes=_working_bytes(stage, sizes),
    )


def _saved_bytes(stage: Stage, sizes: Mapping[str, int]) -> int:
    graph, types, storage = stage.graph, bound_types(stage.graph, sizes), storages(stage.graph)
    needing = {Ref(e.name) for e in stage.receives if e.needs_gradient}
    needing |= {Ref(v.name) for v in graph.variables if v.trainable and v.kind == "parameter"}
    seen, total = {Ref(v.name) for v in graph.variables}, 0
    for node in graph.nodes:
        if spec(node.op).differentiable and any(ref in needing for ref in node.refs()):
            needing |= {Ref(node.name, i) for i, t in enumerate(node.results) if "float" in t.dtype}
        own, values = stashed(node, types, frozenset(needing), storage)
        total += own + sum(type_bytes(types[value]) for value in values - seen)
        seen |= values
    return total


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
