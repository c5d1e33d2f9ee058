"""Values that a model writes to its buffers during training for the next run: running statistics, the codes of a quantiser, the vectors of
a spectral norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusion.dag.cutting.references import substitute
from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.ir.opset_pointwise import KEEP


def keep_values(graph: Graph, kept: Mapping[str, Ref]) -> Graph:
    """The graph with a KEEP node for each of these values (by variable), placed directly after the node that computes it. Later readers of the
    value read the KEEP node instead, which in evaluation returns the variable, as in a model that writes to it in training only."""
    if not kept:
        return graph
    taken = {*graph.input_names, *graph.variable_names, *graph.node_index}
    keeps_after: dict[str, list[tuple[Ref, Node]]] = {}
    for variable, value in kept.items():
        name = next(n for i in range(len(taken) + 1) if (n := f"{value.name}_kept{i or ''}") not in taken)
        taken.add(name)
        node = Node(name, KEEP, (Ref(variable), value), (graph.types[value],))
        keeps_after.setdefault(value.name if value.name in graph.node_index else "", []).append((value, node))
    nodes: list[Node] = []
    renamed: dict[Ref, Ref] = {}
    for step in ("", *graph.nodes):
        if isinstance(step, Node):
            nodes.append(replace(step, args=substitute(step.args, renamed)))
        for value, node in keeps_after.get(step.name if isinstance(step, Node) else "", ()):
            nodes.append(node)
            if value.name in graph.node_index:  # not of an input, which all nodes would read through it
                renamed[value] = Ref(node.name)
    outputs = tuple(renamed.get(ref, ref) for ref in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)
