"""From a captured graph with a loss to the one that is trained."""

from __future__ import annotations

from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.experts import name_experts


def trained_graph(graph: Graph) -> Graph:
    """`graph` as `capture_language_model(training=True)` gives it, without what changes no value, and with experts as one op a
    product: experts in another form are run as the model spells them."""
    return name_experts(clean(graph))
