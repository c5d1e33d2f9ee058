"""What a model writes to its buffers while it is trained, for the next run to read: running statistics of its own, codes of a quantiser
that follow what they are given, the vectors of a spectral norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusion.dag.cutting.references import substitute
from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.ir.opset_pointwise import KEEP


def keep_values(graph: Graph, kept: Mapping[str, Ref]) -> Graph:
    """The graph with an operator that keeps each of these values, by variable, directly behind what makes it. Whatever reads the value
    later reads what that operator gives: evaluated, that is the variable, as for a model that writes to it in training alone."""
    if not kept:
        return graph
    taken = {*graph.input_names, *graph.variable_names, *graph.node_index}
    behind: dict[str, list[tuple[Ref, Node]]] = {}
    for variable, value in kept.items():
        name = next(n for i in range(len(taken) + 1) if (n := f"{value.name}_kept{i or ''}") not in taken)
        taken.add(name)
        node = Node(name, KEEP, (Ref(variable), value), (graph.types[value],))
        behind.setdefault(value.name if value.name in graph.node_index else "", []).append((value, node))
    nodes: list[Node] = []
    renamed: dict[Ref, Ref] = {}
    for made in ("", *graph.nodes):
        if isinstance(made, Node):
            nodes.append(replace(made, args=substitute(made.args, renamed)))
        for value, node in behind.get(made.name if isinstance(made, Node) else "", ()):
            nodes.append(node)
            if value.name in graph.node_index:  # not what is given: all reads of that come later
                renamed[value] = Ref(node.name)
    outputs = tuple(renamed.get(ref, ref) for ref in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)
