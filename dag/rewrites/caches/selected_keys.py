"""Pattern matching of sparse attention with an indexer, as in DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): each query selects the
keys with the highest index scores, which become a mask.

Index scores are a sum over heads of weight * relu(query . key * scale), masked as the attention itself; `topk` gives the indices
of the highest, and `scatter` makes a mask of them. Anything else stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref
from fusion.dag.ir.opset import infer
from fusion.dag.rewrites.caches.eager_attention import (
    AttentionBias,
    AttentionMask,
    masked_fill,
)
from fusion.dag.rewrites.caches.node_patterns import producer, scalar_multiple, swaps_last_two
from fusion.dag.rewrites.positions import SEQUENCE

_S = symbol(SEQUENCE)
_NOT = frozenset({"aten.bitwise_not", "aten.logical_not"})
_AND = frozenset({"aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and"})
_OR = frozenset({"aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or"})


@dataclass(frozen=True)
class Selection:
    """The `count` keys with the highest index scores by `query` (batch, sequence, heads, width), `key` (batch, sequence, width) and
    `weights` (batch, sequence, heads), among those that `visible` shows. `order`: the indices of `topk`, which identify it."""

    order: Ref
    count: int
    query: Ref
    key: Ref
    weights: Ref
    scale: float
    visible: AttentionMask | AttentionBias


def top_k_masks(graph: Graph) -> dict[str, tuple[Ref, int]]:
    """For each mask that is scattered from the first indices of a `topk`, by name: the indices and how many. To be called before
    `use_position_ids`, which replaces the arange that the pattern has."""
    scattered = {node.name: _scattered_top_k(graph, node) for node in graph.nodes}
    return {
        name: (Ref(top_k[0].name, 1), top_k[1])
        for name, top_k in scattered.items()
        if top_k is not None and top_k[1] is not None
    }


def without_full_selections(graph: Graph) -> Graph:
    """The graph in which a mask that is scattered from all indices is a constant."""
    nodes = []
    for node in graph.nodes:
        scattered = _scattered_top_k(graph, node)
        if scattered is not None and scattered[1] is None:
            args: tuple[Arg, ...] = (node.results[0].shape, node.args[3], DType(node.results[0].dtype))
            if infer("aten.full", args, {}) == node.results:
                node = replace(node, op="aten.full", args=args)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def conjuncts(graph: Graph, mask: AttentionMask, positional: frozenset[str]) -> list[AttentionMask]:
    """The masks whose conjunction is the mask. One that depends on positions alone is not split."""
    node = producer(graph, mask.mask)
    if node is None or node.name in positional:
        return [mask]
    first = node.args[0] if node.args else None
    if node.op in _NOT and isinstance(first, Ref):
        return conjuncts(graph, AttentionMask(first, not mask.inverted), positional)
    if node.op == "aten.unsqueeze" and isinstance(first, Ref) and node.results[0].shape[1:2] == (1,):
        # (batch, sequence, sequence), the same for all heads
        is_pairwise = graph.types[first].shape[1:] == (_S, _S) and len(graph.types[first].shape) == 3
        return conjuncts(graph, AttentionMask(first, mask.inverted), positional) if is_pairwise else [mask]
    if node.op in (_OR if mask.inverted else _AND) and graph.types[mask.mask].dtype == "bool":
        return [
            each
            for ref in node.refs()
            for each in conjuncts(graph, AttentionMask(ref, mask.inverted), positional)
        ]
    return [mask]


def read_selection(
    graph: Graph, mask: AttentionMask, positional: frozenset[str], top_k: Mapping[str, tuple[Ref, int]]
) -> Selection | None:
    """The selection that the mask shows; None if it is none of an indexer. `top_k`: see `top_k_masks`."""
    node = producer(graph, mask.mask)
    if node is None or node.name not in top_k:
        return None
    order, count = top_k[node.name]
    topk = producer(graph, order)
    assert topk is not None
    base, value = _constant_bool(graph, node.args[0]), node.args[3]
    # True at the indices and False elsewhere, or inverted
    if not isinstance(value, bool) or base is not (not value) or value is mask.inverted:
        return None
    scores = topk.args[0]
    if not isinstance(scores, Ref) or len(graph.types[scores].shape) != 3:
        return None
    scores_and_mask = _scores_and_mask(graph, scores, positional)
    return None if scores_and_mask is None else _indexer(graph, order, count, *scores_and_mask)


def _scattered_top_k(graph: Graph, node: Node) -> tuple[Node, int | None] | None:
    """The `topk` from whose indices the mask is scattered along the last dimension, and how many of them; None for all."""
    if node.op != "aten.scatter.value":
        return None
    _, dim, index, _ = node.args
    shape = node.results[0].shape
    if dim not in (-1, len(shape) - 1) or not isinstance(index, Ref) or graph.types[index].shape != shape:
        return None
    index = _without_casts(graph, index)
    top_k = producer(graph, index)
    count = None
    if top_k is not None and top_k.op == "aten.where.self":
        first = _leading_places(graph, top_k)
        if first is None:
            return None
        index, count = first
        top_k = producer(graph, index)
    if top_k is None or top_k.op != "aten.topk" or index != Ref(top_k.name, 1):
        return None
    _, k, axis, largest, ordered = top_k.args
    sorts_all = k == shape[-1] and axis in (-1, len(shape) - 1) and top_k.results[1].shape == shape
    best_first = largest is True and ordered is True
    return (top_k, count) if sorts_all and (best_first or count is None) else None


def _leading_places(graph: Graph, node: Node) -> tuple[Ref, int] | None:
    """The indices and n of `where(arange < n, indices, indices[..., :1])`, which keeps the first n indices."""
    condition, order, other = node.args
    comparison, first_repeated = producer(graph, condition), producer(graph, other)
    if comparison is None or first_repeated is None or not isinstance(order, Ref):
        return None
    shape = graph.types[order].shape
    arange = producer(graph, comparison.args[0])
    if comparison.op != "aten.lt.Scalar" or arange is None or arange.op != "aten.arange":
        return None
    if arange.args[0] != shape[-1] or graph.types[Ref(arange.name)].dtype != "int64":
        return None
    if (
        first_repeated.op != "aten.slice.Tensor"
        or first_repeated.args[0] != order
        or first_repeated.args[1] not in (-1, len(shape) - 1)
    ):
        return None
    count = comparison.args[1]
    if (
        first_repeated.args[2] not in (0, None)
        or first_repeated.args[3:] != (1, 1)
        or type(count) is not int
        or count < 1
    ):
        return None
    return order, count


def _scores_and_mask(
    graph: Graph, scores: Ref, positional: frozenset[str]
) -> tuple[Ref, AttentionMask | AttentionBias] | None:
    """The index scores before they are masked, and the mask."""
    node = producer(graph, scores)
    if node is None:
        return None
    fill = masked_fill(graph, node)
    if fill is not None:
        return fill if fill[1].mask.name in positional else None
    if node.op == "aten.add.Tensor" and node.args[2] == 1:
        added = [ref for ref in node.refs() if ref.name in positional]
        scores_only = [ref for ref in node.refs() if ref.name not in positional]
        if len(added) == 1 and len(scores_only) == 1:
            return scores_only[0], AttentionBias(added[0])
    return None


def _indexer(
    graph: Graph, order: Ref, count: int, scores: Ref, visible: AttentionMask | AttentionBias
) -> Selection | None:
    """The selection by these index scores; None if they do not match."""
    sums = producer(graph, _without_views(graph, scores))
    if sums is None or sums.op != "aten.matmul":
        return None
    weights, relu = sums.args[0], producer(graph, sums.args[1])
    if not isinstance(weights, Ref) or relu is None or relu.op != "aten.relu":
        return None
    product, scale = producer(graph, relu.args[0]), 1.0
    while product is not None and (multiple := scalar_multiple(graph, product)) is not None:
        product, scale = producer(graph, multiple[0]), scale * multiple[1]
    if product is None or product.op != "aten.matmul":
        return None
    query, key_transposed = (arg for arg in product.args if isinstance(arg, Ref))
    query, key = _before_upcast(graph, query), _untransposed_key(graph, key_transposed)
    weights_view = producer(graph, weights)
    head_weights = (
        weights_view.args[0]
        if weights_view is not None and weights_view.op in ("aten.unsqueeze", "aten.reshape")
        else None
    )
    if key is None or not isinstance(head_weights, Ref):
        return None
    queries, keys, weights_shape, head_weights_shape = (
        graph.types[ref].shape for ref in (query, key, weights, head_weights)
    )
    if len(queries) != 4 or queries[1] != _S or keys != (*queries[:2], queries[3]):
        return None
    if head_weights_shape != queries[:3] or weights_shape != (*queries[:2], 1, queries[2]):
        return None
    dtypes = {graph.types[Ref(node.name)].dtype for node in (sums, relu, product)}
    if dtypes != {"float32"} or graph.types[query].dtype != graph.types[key].dtype:
        return None
    return Selection(order, count, query, key, head_weights, scale, visible)


def _untransposed_key(graph: Graph, key_transposed: Ref) -> Ref | None:
    """The key (batch, sequence, width) whose transpose is (batch, 1, width, sequence)."""
    batch, heads, width, length = graph.types[key_transposed].shape
    ref, swapped, unsqueezed = _before_upcast(graph, key_transposed), False, False
    while heads == 1 and not (swapped and unsqueezed):
        node = producer(graph, ref)
        source = node.args[0] if node is not None and node.args else None
        if node is None or not isinstance(source, Ref):
            return None
        rank = len(node.results[0].shape)
        if node.op == "aten.unsqueeze" and rank == 4 and node.args[1] in (1, -3):
            unsqueezed = True
        elif node.op == "aten.transpose.int" and swaps_last_two(node):
            swapped = not swapped
        else:
            return None
        ref = _before_upcast(graph, source)
    return ref if graph.types[ref].shape == (batch, length, width) else None


def _before_upcast(graph: Graph, ref: Ref) -> Ref:
    """The value before it is cast from half precision to float32."""
    node = producer(graph, ref)
    if node is None or node.op != "aten.to.dtype" or node.results[0].dtype != "float32":
        return ref
    source = node.args[0]
    half = isinstance(source, Ref) and graph.types[source].dtype in ("bfloat16", "float16")
    return source if half and isinstance(source, Ref) else ref


def _without_casts(graph: Graph, ref: Ref) -> Ref:
    """The value before casts between integers that hold every index."""
    while (node := producer(graph, ref)) is not None and node.op == "aten.to.dtype":
        source = node.args[0]
        if not isinstance(source, Ref) or {graph.types[r].dtype for r in (ref, source)} - {"int32", "int64"}:
            break
        ref = source
    return ref


def _without_views(graph: Graph, ref: Ref) -> Ref:
    """The scores (batch, sequence, 1, sequence) of which this is a view (batch, sequence, sequence)."""
    node = producer(graph, ref)
    if node is None or node.op not in ("aten.squeeze.dim", "aten.reshape", "aten.squeeze"):
        return ref
    source, shape = node.args[0], graph.types[ref].shape
    wide = isinstance(source, Ref) and graph.types[source].shape == (*shape[:2], 1, *shape[2:])
    return source if wide and isinstance(source, Ref) else ref


def _constant_bool(graph: Graph, base: Arg) -> bool | None:
    node = producer(graph, base)
    if node is None or node.results[0].dtype != "bool":
        return None
    if node.op in ("aten.ones", "aten.zeros"):
        return node.op == "aten.ones"
    value = node.args[1] if node.op == "aten.full" else None
    return value if isinstance(value, bool) else None
