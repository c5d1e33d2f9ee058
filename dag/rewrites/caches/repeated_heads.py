"""Pattern matching of keys and values that a model repeats for grouped-query attention."""

from __future__ import annotations

from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.rewrites.caches.node_patterns import producer


def before_repeat(graph: Graph, ref: Ref) -> Ref | None:
    """The tensor whose heads are repeated to (batch, heads, sequence, width), head h from h // (heads / kv heads); else None."""
    node, shape = producer(graph, ref), graph.types[ref].shape
    if node is None or len(shape) != 4:
        return None
    source = node.args[0]
    if node.op == "aten.repeat_interleave.self_int" and node.args[2] in (1, -3) and isinstance(source, Ref):
        return source
    if node.op == "aten.expand" and isinstance(source, Ref):
        return source if graph.types[source].shape == (shape[0], 1, *shape[2:]) else None
    if node.op != "aten.reshape" or not isinstance(source, Ref):
        return None
    # repeat_kv: (batch, few, sequence, width) -> (batch, few, 1, ...) -> (batch, few, times, ...) -> (batch, heads, ...)
    expand = producer(graph, source)
    split = graph.types[source].shape
    if (
        expand is None
        or expand.op != "aten.expand"
        or len(split) != 5
        or (split[0], *split[3:]) != (shape[0], *shape[2:])
    ):
        return None
    inserted = expand.args[0]
    if not isinstance(inserted, Ref) or graph.types[inserted].shape != (*split[:2], 1, *split[3:]):
        return None
    unsqueeze = producer(graph, inserted)
    unrepeated = (
        unsqueeze.args[0]
        if unsqueeze is not None and unsqueeze.op in ("aten.unsqueeze", "aten.reshape")
        else None
    )
    return (
        unrepeated
        if isinstance(unrepeated, Ref) and graph.types[unrepeated].shape == (*split[:2], *split[3:])
        else None
    )
