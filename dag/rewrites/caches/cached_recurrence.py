"""Give recurrences a cached state: `fusion.recurrence`, whose initial state is zero, becomes `fusion.cached_recurrence`, which
continues from the state after earlier positions. A recurrence is causal, so there is no pattern to match."""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.ir.graph import Graph, Node
from fusion.dag.ir.opset import next_slot
from fusion.dag.rewrites.caches.cached_convolution import cache_convolutions

_WHOLE = "fusion.recurrence"


def cache_states(graph: Graph) -> Graph:
    """The graph with cached recurrences and cached short convolutions."""
    return cache_recurrences(cache_convolutions(graph))


def cache_recurrences(graph: Graph) -> Graph:
    """The graph with cached recurrences, in slots after those in use."""
    slot = next_slot(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == _WHOLE:
            node = replace(node, op="fusion.cached_recurrence", args=(*node.args, slot))
            slot += 1
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
