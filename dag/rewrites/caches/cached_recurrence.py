"""Give recurrences a memory: `fusion.recurrence`, which begins with a state of zeros, becomes `fusion.cached_recurrence`, which goes
on with that of earlier positions. It is causal by what it is, so there is nothing to recognise."""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.ir.graph import Graph, Node
from fusion.dag.ir.opset import next_slot
from fusion.dag.rewrites.caches.cached_convolution import cache_convolutions

_WHOLE = "fusion.recurrence"


def cache_states(graph: Graph) -> Graph:
    """The graph for a piece of a sequence, as far as recurrences and the short convolutions before them go."""
    return cache_recurrences(cache_convolutions(graph))


def cache_recurrences(graph: Graph) -> Graph:
    """The graph for a piece of a sequence, as far as recurrences go. Slots go on from those that are taken."""
    slot = next_slot(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == _WHOLE:
            node = replace(node, op="fusion.cached_recurrence", args=(*node.args, slot))
            slot += 1
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
