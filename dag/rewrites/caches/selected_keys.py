"""Recognising keys that a model selects for each query with an indexer, as DeepSeek-V3.2 does (arXiv 2512.02556, section 2.1): those of
the highest scores, which become a mask.

Scores are a sum over heads of weight * max(0, query . key * scale), hidden where the attention's own mask hides; `topk` gives the places
of the highest, and `scatter` makes a mask of them. What is not exactly that stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref
from fusion.dag.ir.opset import infer
from fusion.dag.rewrites.caches.eager_attention import (
    Added,
    Hides,
    filled_at,
    maker,
    scaled_by,
    swaps_last_two,
)
from fusion.dag.rewrites.positions import SEQUENCE

_S = symbol(SEQUENCE)
_NOT = frozenset({"aten.bitwise_not", "aten.logical_not"})
_AND = frozenset({"aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and"})
_OR = frozenset({"aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or"})


@dataclass(frozen=True)
class Selection:
    """The `count` keys that each query sees best by `query` (batch, sequence, heads, width), `key` (batch, sequence, width) and `weights`
    (batch, sequence, heads), among those that `visible` shows. `order`: what tells one selection from another."""

    order: Ref
    count: int
    query: Ref
    key: Ref
    weights: Ref
    scale: float
    visible: Hides | Added


def taken_places(graph: Graph) -> dict[str, tuple[Ref, int]]:
    """By the name of a mask that is made of the first of an order of keys: the order, and how many. To be asked before positions that
    the model counts are those of its input."""
    found = {node.name: _scattered(graph, node) for node in graph.nodes}
    return {
        name: (Ref(made[0].name, 1), made[1])
        for name, made in found.items()
        if made is not None and made[1] is not None
    }


def all_selected(graph: Graph) -> Graph:
    """The graph in which a mask that is made of all places there are, in whatever order, is one number."""
    nodes = []
    for node in graph.nodes:
        found = _scattered(graph, node)
        if found is not None and found[1] is None:
            args: tuple[Arg, ...] = (node.results[0].shape, node.args[3], DType(node.results[0].dtype))
            if infer("aten.full", args, {}) == node.results:
                node = replace(node, op="aten.full", args=args)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def parts_of(graph: Graph, hides: Hides, positional: frozenset[str]) -> list[Hides]:
    """Masks that show together what the mask shows. What depends on positions alone is not taken apart."""
    node = maker(graph, hides.mask)
    if node is None or node.name in positional:
        return [hides]
    first = node.args[0] if node.args else None
    if node.op in _NOT and isinstance(first, Ref):
        return parts_of(graph, Hides(first, not hides.inverts), positional)
    if node.op == "aten.unsqueeze" and isinstance(first, Ref) and node.results[0].shape[1:2] == (1,):
        # (batch, sequence, sequence), the same for all heads
        of_pairs = graph.types[first].shape[1:] == (_S, _S) and len(graph.types[first].shape) == 3
        return parts_of(graph, Hides(first, hides.inverts), positional) if of_pairs else [hides]
    if node.op in (_OR if hides.inverts else _AND) and graph.types[hides.mask].dtype == "bool":
        return [
            each for ref in node.refs() for each in parts_of(graph, Hides(ref, hides.inverts), positional)
        ]
    return [hides]


def read_selection(
    graph: Graph, hides: Hides, positional: frozenset[str], taken: Mapping[str, tuple[Ref, int]]
) -> Selection | None:
    """What the mask shows, where it is the keys of an indexer. `taken`: see `taken_places`."""
    node = maker(graph, hides.mask)
    if node is None or node.name not in taken:
        return None
    order, count = taken[node.name]
    chosen = maker(graph, order)
    assert chosen is not None
    base, value = _filled_with(graph, node.args[0]), node.args[3]
    # True at the places and False elsewhere, or the other way round where it hides
    if not isinstance(value, bool) or base is not (not value) or value is hides.inverts:
        return None
    scores = chosen.args[0]
    if not isinstance(scores, Ref) or len(graph.types[scores].shape) != 3:
        return None
    hidden = _visible(graph, scores, positional)
    return None if hidden is None else _indexer(graph, order, count, *hidden)


def _scattered(graph: Graph, node: Node) -> tuple[Node, int | None] | None:
    """The `topk` of whose places along the last dimension the mask is made, and of how many of them: None for all."""
    if node.op != "aten.scatter.value":
        return None
    _, dim, index, _ = node.args
    shape = node.results[0].shape
    if dim not in (-1, len(shape) - 1) or not isinstance(index, Ref) or graph.types[index].shape != shape:
        return None
    index = _without_casts(graph, index)
    chosen = maker(graph, index)
    count = None
    if chosen is not None and chosen.op == "aten.where.self":
        first = _first_ones(graph, chosen)
        if first is None:
            return None
        index, count = first
        chosen = maker(graph, index)
    if chosen is None or chosen.op != "aten.topk" or index != Ref(chosen.name, 1):
        return None
    _, most, along, largest, ordered = chosen.args
    whole = most == shape[-1] and along in (-1, len(shape) - 1) and chosen.results[1].shape == shape
    best_first = largest is True and ordered is True
    return (chosen, count) if whole and (best_first or count is None) else None


def _first_ones(graph: Graph, node: Node) -> tuple[Ref, int] | None:
    """Of a choice between the first places of an order, so many, and for the rest the first one again: the order, and how many."""
    condition, order, other = node.args
    early, again = maker(graph, condition), maker(graph, other)
    if early is None or again is None or not isinstance(order, Ref):
        return None
    shape = graph.types[order].shape
    places = maker(graph, early.args[0])
    if early.op != "aten.lt.Scalar" or places is None or places.op != "aten.arange":
        return None
    if places.args[0] != shape[-1] or graph.types[Ref(places.name)].dtype != "int64":
        return None
    if again.op != "aten.slice.Tensor" or again.args[0] != order or again.args[1] not in (-1, len(shape) - 1):
        return None
    count = early.args[1]
    if again.args[2] not in (0, None) or again.args[3:] != (1, 1) or type(count) is not int or count < 1:
        return None
    return order, count


def _visible(graph: Graph, scores: Ref, positional: frozenset[str]) -> tuple[Ref, Hides | Added] | None:
    """The scores before what a query does not see is hidden, and what hides it."""
    node = maker(graph, scores)
    if node is None:
        return None
    found = filled_at(graph, node)
    if found is not None:
        return found if found[1].mask.name in positional else None
    if node.op == "aten.add.Tensor" and node.args[2] == 1:
        added = [ref for ref in node.refs() if ref.name in positional]
        plain = [ref for ref in node.refs() if ref.name not in positional]
        if len(added) == 1 and len(plain) == 1:
            return plain[0], Added(added[0])
    return None


def _indexer(graph: Graph, order: Ref, count: int, scores: Ref, visible: Hides | Added) -> Selection | None:
    """The selection by these scores."""
    sums = maker(graph, _without_views(graph, scores))
    if sums is None or sums.op != "aten.matmul":
        return None
    weights, above = sums.args[0], maker(graph, sums.args[1])
    if not isinstance(weights, Ref) or above is None or above.op != "aten.relu":
        return None
    product, scale = maker(graph, above.args[0]), 1.0
    while product is not None and (times := scaled_by(graph, product)) is not None:
        product, scale = maker(graph, times[0]), scale * times[1]
    if product is None or product.op != "aten.matmul":
        return None
    query, across = (arg for arg in product.args if isinstance(arg, Ref))
    query, key = _narrow(graph, query), _turned(graph, across)
    each = maker(graph, weights)
    of_heads = each.args[0] if each is not None and each.op in ("aten.unsqueeze", "aten.reshape") else None
    if key is None or not isinstance(of_heads, Ref):
        return None
    queries, keys, row, each_head = (graph.types[ref].shape for ref in (query, key, weights, of_heads))
    if len(queries) != 4 or queries[1] != _S or keys != (*queries[:2], queries[3]):
        return None
    if each_head != queries[:3] or row != (*queries[:2], 1, queries[2]):
        return None
    dtypes = {graph.types[Ref(node.name)].dtype for node in (sums, above, product)}
    if dtypes != {"float32"} or graph.types[query].dtype != graph.types[key].dtype:
        return None
    return Selection(order, count, query, key, of_heads, scale, visible)


def _turned(graph: Graph, across: Ref) -> Ref | None:
    """(batch, sequence, width) of what is (batch, 1, width, sequence)."""
    batch, one, width, length = graph.types[across].shape
    ref, swapped, raised = _narrow(graph, across), False, False
    while one == 1 and not (swapped and raised):
        node = maker(graph, ref)
        source = node.args[0] if node is not None and node.args else None
        if node is None or not isinstance(source, Ref):
            return None
        rank = len(node.results[0].shape)
        if node.op == "aten.unsqueeze" and rank == 4 and node.args[1] in (1, -3):
            raised = True
        elif node.op == "aten.transpose.int" and swaps_last_two(node):
            swapped = not swapped
        else:
            return None
        ref = _narrow(graph, source)
    return ref if graph.types[ref].shape == (batch, length, width) else None


def _narrow(graph: Graph, ref: Ref) -> Ref:
    """The value before it was cast to a wider dtype, which holds each of its numbers."""
    node = maker(graph, ref)
    if node is None or node.op != "aten.to.dtype" or node.results[0].dtype != "float32":
        return ref
    source = node.args[0]
    half = isinstance(source, Ref) and graph.types[source].dtype in ("bfloat16", "float16")
    return source if half and isinstance(source, Ref) else ref


def _without_casts(graph: Graph, ref: Ref) -> Ref:
    """The value before casts between integers that hold every place."""
    while (node := maker(graph, ref)) is not None and node.op == "aten.to.dtype":
        source = node.args[0]
        if not isinstance(source, Ref) or {graph.types[r].dtype for r in (ref, source)} - {"int32", "int64"}:
            break
        ref = source
    return ref


def _without_views(graph: Graph, ref: Ref) -> Ref:
    """(batch, sequence, 1, sequence) of what is (batch, sequence, sequence)."""
    node = maker(graph, ref)
    if node is None or node.op not in ("aten.squeeze.dim", "aten.reshape", "aten.squeeze"):
        return ref
    source, shape = node.args[0], graph.types[ref].shape
    wide = isinstance(source, Ref) and graph.types[source].shape == (*shape[:2], 1, *shape[2:])
    return source if wide and isinstance(source, Ref) else ref


def _filled_with(graph: Graph, base: Arg) -> bool | None:
    node = maker(graph, base)
    if node is None or node.results[0].dtype != "bool":
        return None
    if node.op in ("aten.ones", "aten.zeros"):
        return node.op == "aten.ones"
    value = node.args[1] if node.op == "aten.full" else None
    return value if isinstance(value, bool) else None
