"""Which values of a graph depend on others in a way that has a gradient, as autograd would find out while it runs."""

from __future__ import annotations

from collections.abc import Set

from fusion.dag.cutting.mode import read_in_training
from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.ir.opset import spec


def attached(graph: Graph, sources: Set[str]) -> frozenset[Ref]:
    """The floating values that depend on the inputs and variables of these names, these included."""
    found = {Ref(name) for name in sources if "float" in graph.types[Ref(name)].dtype}
    for node in graph.nodes:
        if spec(node.op).differentiable and any(ref in found for ref in read_in_training(node)):
            found.update(Ref(node.name, i) for i, made in enumerate(node.results) if "float" in made.dtype)
    return frozenset(found)


def with_gradient(graph: Graph, among: Set[Ref], roots: Set[Ref]) -> frozenset[str]:
    """Names of the inputs, variables and nodes on which the roots depend, going over the values `among` alone."""
    wanted = {ref.name for ref in roots}
    for node in reversed(graph.nodes):
        if node.name in wanted and spec(node.op).differentiable:
            wanted.update(ref.name for ref in read_in_training(node) if ref in among)
    return frozenset(wanted)
