"""Pattern matching of a relative position bias, as in T5: the bucket of a distance chooses a row of a table, with a number for
each head. The buckets are found by evaluating the sub-graph that computes them, for the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fusion.dag.ir.dims import Poly, bind
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Graph, Input, Node, Ref
from fusion.dag.ir.opset import spec
from fusion.dag.ir.opset_spec import MAX_LIST
from fusion.dag.rewrites.caches.masks import Evaluate, mask_graph
from fusion.dag.rewrites.positions import SEQUENCE

MAX_POSITIONS = 2048  # a longer sequence would make the table of pairs too large
_LENGTHS = (1, 2, 3, 9, 40)  # tried beside the longest


@dataclass(frozen=True)
class RelativeBias:
    """The bias `table[buckets[distance], head]`; the last bucket holds for all larger distances."""

    table: Ref
    buckets: tuple[int, ...]


def relative_bias(graph: Graph, bias: Ref, evaluate: Evaluate, max_length: int | None) -> RelativeBias | None:
    """`bias` (..., heads, sequence, sequence) as a relative bias, where a causal mask shows it; None for any other."""
    lookup_and_views = _embedding_lookup(graph, bias)
    if lookup_and_views is None or max_length is None or max_length > MAX_POSITIONS:
        return None
    lookup, views = lookup_and_views
    table, index = lookup.args[:2]
    assert isinstance(table, Ref) and isinstance(index, Ref)
    if table.name not in graph.variable_names or not _moves_heads_first(lookup, views, bias, graph, evaluate):
        return None
    buckets = _buckets(graph, index, evaluate, max_length)
    return None if buckets is None or len(buckets) > MAX_LIST else RelativeBias(table, buckets)


def _embedding_lookup(graph: Graph, bias: Ref) -> tuple[Node, tuple[Node, ...]] | None:
    """The embedding that the bias is a view of, and the views."""
    views: list[Node] = []
    ref = bias
    while (index := graph.node_index.get(ref.name)) is not None:
        node = graph.nodes[index]
        if node.op == "aten.embedding":
            return node, tuple(reversed(views))
        refs = list(node.refs())
        if spec(node.op).family != "view" or len(refs) != 1:
            return None
        views.append(node)
        ref = refs[0]
    return None


def _moves_heads_first(
    lookup: Node, views: tuple[Node, ...], bias: Ref, graph: Graph, evaluate: Evaluate
) -> bool:
    """Whether the views permute (..., i, j, head) to (..., head, i, j)."""
    lookup_type = lookup.results[0]
    lead, heads = lookup_type.shape[:-3], lookup_type.shape[-1]
    if len(lookup_type.shape) < 3 or any(d != 1 for d in lead) or not isinstance(heads, int):
        return False
    part = Graph(
        (Input(lookup.name, replace(lookup_type, dtype="float64")),), (), views, (bias,), graph.symbols
    )
    for length in _LENGTHS:
        numbers = np.arange(length * length * heads, dtype=np.float64).reshape(length, length, heads)
        sizes = dict.fromkeys(graph.symbols, 2) | {SEQUENCE: length}
        lookup_value = numbers.reshape(
            [bind(d, sizes) if isinstance(d, Poly) else d for d in lookup_type.shape]
        )
        (result,) = evaluate(part, {lookup.name: lookup_value}, sizes)
        expected = numbers.transpose(2, 0, 1)
        if result.shape[-3:] != expected.shape or not np.array_equal(
            result, np.broadcast_to(expected, result.shape)
        ):
            return False
    return True


def _buckets(graph: Graph, index: Ref, evaluate: Evaluate, max_length: int) -> tuple[int, ...] | None:
    try:
        part = mask_graph(graph, index)
    except UnsupportedModel:
        return None
    by_distance: npt.NDArray[np.int64] | None = None
    for length in (max_length, *(n for n in _LENGTHS if n < max_length)):
        inputs = {i.name: np.arange(length, dtype=np.int64)[None] for i in part.inputs}
        try:
            (values,) = evaluate(part, inputs, {"batch": 1, SEQUENCE: length})
        except (RuntimeError, ValueError, IndexError):
            return None
        if values.shape[-2:] != (length, length) or values.size != length * length:
            return None
        rows = values.reshape(length, length).astype(np.int64)
        by_distance = rows[-1, ::-1] if by_distance is None else by_distance
        queries, keys = np.tril_indices(length)
        if not np.array_equal(rows[queries, keys], by_distance[queries - keys]):
            return None
    assert by_distance is not None
    last = (
        int(np.flatnonzero(by_distance != by_distance[-1])[-1]) + 1
        if (by_distance != by_distance[-1]).any()
        else 0
    )
    return tuple(by_distance[: last + 1].tolist())
