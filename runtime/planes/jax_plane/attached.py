"""Which values of a graph depend on others through a gradient, as autograd finds out while it runs."""

from __future__ import annotations

from collections.abc import Set

from fusion.dag.cutting.mode import read_in_training
from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.ir.opset import spec


def attached(graph: Graph, sources: Set[str]) -> frozenset[Ref]:
    """The floating-point values that depend on the inputs and variables `sources`, these included."""
    values = {Ref(name) for name in sources if "float" in graph.types[Ref(name)].dtype}
    for node in graph.nodes:
        if spec(node.op).differentiable and any(ref in values for ref in read_in_training(node)):
            values.update(Ref(node.name, i) for i, type_ in enumerate(node.results) if "float" in type_.dtype)
    return frozenset(values)


def with_gradient(graph: Graph, among: Set[Ref], roots: Set[Ref]) -> frozenset[str]:
    """Names of the inputs, variables and nodes that the roots depend on through values of `among`."""
    names = {ref.name for ref in roots}
    for node in reversed(graph.nodes):
        if node.name in names and spec(node.op).differentiable:
            names.update(ref.name for ref in read_in_training(node) if ref in among)
    return frozenset(names)
