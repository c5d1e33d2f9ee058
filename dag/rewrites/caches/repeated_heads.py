"""Keys and values that a model repeats, so that each of its query heads has one (grouped queries)."""

from __future__ import annotations

from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.rewrites.caches.eager_attention import maker


def before_repeat(graph: Graph, ref: Ref) -> Ref | None:
    """What (batch, heads, sequence, width) was repeated from, head h from head h // (heads / fewer heads)."""
    node, wide = maker(graph, ref), graph.types[ref].shape
    if node is None or len(wide) != 4:
        return None
    source = node.args[0]
    if node.op == "aten.repeat_interleave.self_int" and node.args[2] in (1, -3) and isinstance(source, Ref):
        return source
    if node.op == "aten.expand" and isinstance(source, Ref):
        return source if graph.types[source].shape == (wide[0], 1, *wide[2:]) else None
    if node.op != "aten.reshape" or not isinstance(source, Ref):
        return None
    # repeat_kv: (batch, few, sequence, width) -> (batch, few, 1, ...) -> (batch, few, times, ...) -> (batch, heads, ...)
    expand = maker(graph, source)
    split = graph.types[source].shape
    if (
        expand is None
        or expand.op != "aten.expand"
        or len(split) != 5
        or (split[0], *split[3:]) != (wide[0], *wide[2:])
    ):
        return None
    inserted = expand.args[0]
    if not isinstance(inserted, Ref) or graph.types[inserted].shape != (*split[:2], 1, *split[3:]):
        return None
    before = maker(graph, inserted)
    few = before.args[0] if before is not None and before.op in ("aten.unsqueeze", "aten.reshape") else None
    return few if isinstance(few, Ref) and graph.types[few].shape == (*split[:2], *split[3:]) else None
