"""Give attention a memory, so that a sequence may be run in pieces: aten.scaled_dot_product_attention becomes
`fusion.cached_attention`, which reads the keys and values of earlier positions from a cache.

Only for attention that is recognised as causal, over all positions or a window of them; whatever else the model does
must treat positions one by one. Anything not recognised is refused: a model is never served almost right.
"""

from __future__ import annotations

from dataclasses import replace

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Arg, Graph, Node, Ref, TensorType
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.masks import Evaluate, visible_window
from fusion.dag.rewrites.own_positions import given_positions
from fusion.dag.rewrites.positions import SEQUENCE, require_separate_positions

ATTENTION = "aten.scaled_dot_product_attention"


def cache_attention(graph: Graph, evaluate: Evaluate, maximum_sequence: int | None = None) -> Graph:
    """The inference graph for a piece of a sequence: its inputs and outputs are of the new positions only.

    `position_ids` must count from 0 at the start of each sequence, and a session must give its positions in order.
    `evaluate` runs the small sub-graphs that make masks (see `masks.Evaluate`). Slots number the caches 0, 1, ... in
    the order of the nodes; keys and values that were repeated for grouped queries are cached before that. A window
    that `maximum_sequence` positions never fill is left out. UnsupportedModel, in one line, for any other model.
    """
    graph = clean(graph)
    windows: dict[Ref, int | None] = {}
    nodes = list(graph.nodes)
    slot = 0
    for i, node in enumerate(nodes):
        if node.op == ATTENTION:
            window = _window(graph, node, evaluate, windows)
            if window is not None and maximum_sequence is not None and window >= maximum_sequence:
                window = None
            nodes[i] = _cached(graph, node, slot, window)
            slot += 1
    cached = clean(given_positions(clean(replace(graph, nodes=tuple(nodes))), evaluate))
    require_separate_positions(cached)
    for ref in cached.outputs:
        if symbol(SEQUENCE) not in cached.types[ref].shape:
            raise UnsupportedModel(
                f"no KV cache for this model: the output {ref} has no dimension for the sequence"
            )
    return cached


def _window(graph: Graph, node: Node, evaluate: Evaluate, known: dict[Ref, int | None]) -> int | None:
    mask, dropout, is_causal = node.args[3:6]
    if dropout != 0:
        raise _refusal(node, "drops out weights: capture the model in evaluation mode")
    if not isinstance(mask, Ref):
        if is_causal is not True:
            raise _refusal(node, "sees later positions")
        return None
    if is_causal is True:
        raise _refusal(node, "has a mask beside its causal one")
    if mask not in known:
        known[mask] = visible_window(graph, mask, evaluate)
    return known[mask]


def _cached(graph: Graph, node: Node, slot: int, window: int | None) -> Node:
    query, key, value = (a for a in node.args[:3] if isinstance(a, Ref))
    scale, grouped = node.args[6:8]
    shared = _before_repeat(graph, key), _before_repeat(graph, value)
    if shared[0] and shared[1] and _heads(graph, shared[0]) == _heads(graph, shared[1]):
        key, value = shared[0], shared[1]
    types = [graph.types[r] for r in (query, key, value)]
    _refuse_shapes(node, types, grouped is True or shared == (key, value))
    args: tuple[Arg, ...] = (query, key, value, slot, scale, window)
    return replace(node, op="fusion.cached_attention", args=args)


def _refuse_shapes(node: Node, types: list[TensorType], grouped: bool) -> None:
    for type_ in types:
        shape = type_.shape
        if len(shape) != 4 or shape[2] != symbol(SEQUENCE) or shape[0] != types[0].shape[0]:
            raise _refusal(node, f"has {type_}, not (batch, heads, sequence, width)")
    heads = [t.shape[1] for t in types]
    q, k, v = (h if isinstance(h, int) else 0 for h in heads)
    if not (q and k == v and k and q % k == 0 and (grouped or k in (1, q))):
        raise _refusal(node, f"has {heads[0]} query heads over {heads[1]} key and {heads[2]} value heads")


def _heads(graph: Graph, ref: Ref) -> object:
    return graph.types[ref].shape[1]


def _before_repeat(graph: Graph, ref: Ref) -> Ref | None:
    """What (batch, heads, sequence, width) was repeated from, head h from head h // (heads / fewer heads)."""
    node, wide = _node(graph, ref), graph.types[ref].shape
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
    expand = _node(graph, source)
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
    before = _node(graph, inserted)
    few = before.args[0] if before is not None and before.op in ("aten.unsqueeze", "aten.reshape") else None
    return few if isinstance(few, Ref) and graph.types[few].shape == (*split[:2], *split[3:]) else None


def _node(graph: Graph, ref: Ref) -> Node | None:
    at = graph.node_index.get(ref.name)
    return None if at is None else graph.nodes[at]


def _refusal(node: Node, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"no KV cache for this model: the attention {node.name} {why}")
