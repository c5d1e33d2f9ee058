"""Recognising a bias of attention by distance that is looked up in a table, as T5 has it: a row of the table, a number for
each head, by the bucket that the distance falls into. Which bucket that is, is told by evaluating what makes it, for the longest
sequence there can be.
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

MOST_POSITIONS = 2048  # of a sequence: what is evaluated has a number for each pair of them
_LENGTHS = (1, 2, 3, 9, 40)  # that are tried beside the longest


@dataclass(frozen=True)
class RelativeBias:
    """`table[buckets[distance], head]`; the last bucket is that of all larger distances too."""

    table: Ref
    buckets: tuple[int, ...]


def relative_bias(graph: Graph, bias: Ref, evaluate: Evaluate, longest: int | None) -> RelativeBias | None:
    """Of `bias` (..., heads, sequence, sequence), as far as a causal mask shows it; None for any other."""
    found = _looked_up(graph, bias)
    if found is None or longest is None or longest > MOST_POSITIONS:
        return None
    lookup, views = found
    table, index = lookup.args[:2]
    assert isinstance(table, Ref) and isinstance(index, Ref)
    if table.name not in graph.variable_names or not _in_place(lookup, views, bias, graph, evaluate):
        return None
    buckets = _buckets(graph, index, evaluate, longest)
    return None if buckets is None or len(buckets) > MAX_LIST else RelativeBias(table, buckets)


def _looked_up(graph: Graph, bias: Ref) -> tuple[Node, tuple[Node, ...]] | None:
    """The look-up that made the bias, and the views since."""
    views: list[Node] = []
    at = bias
    while (place := graph.node_index.get(at.name)) is not None:
        node = graph.nodes[place]
        if node.op == "aten.embedding":
            return node, tuple(reversed(views))
        refs = list(node.refs())
        if spec(node.op).family != "view" or len(refs) != 1:
            return None
        views.append(node)
        at = refs[0]
    return None


def _in_place(lookup: Node, views: tuple[Node, ...], bias: Ref, graph: Graph, evaluate: Evaluate) -> bool:
    """Whether the views bring (..., i, j, head) to (..., head, i, j)."""
    type_ = lookup.results[0]
    lead, heads = type_.shape[:-3], type_.shape[-1]
    if len(type_.shape) < 3 or any(d != 1 for d in lead) or not isinstance(heads, int):
        return False
    part = Graph((Input(lookup.name, replace(type_, dtype="float64")),), (), views, (bias,), graph.symbols)
    for length in _LENGTHS:
        numbers = np.arange(length * length * heads, dtype=np.float64).reshape(length, length, heads)
        sizes = dict.fromkeys(graph.symbols, 2) | {SEQUENCE: length}
        given = numbers.reshape([bind(d, sizes) if isinstance(d, Poly) else d for d in type_.shape])
        (found,) = evaluate(part, {lookup.name: given}, sizes)
        wanted = numbers.transpose(2, 0, 1)
        if found.shape[-3:] != wanted.shape or not np.array_equal(
            found, np.broadcast_to(wanted, found.shape)
        ):
            return False
    return True


def _buckets(graph: Graph, index: Ref, evaluate: Evaluate, longest: int) -> tuple[int, ...] | None:
    try:
        part = mask_graph(graph, index)
    except UnsupportedModel:
        return None
    known: npt.NDArray[np.int64] | None = None
    for length in (longest, *(n for n in _LENGTHS if n < longest)):
        inputs = {i.name: np.arange(length, dtype=np.int64)[None] for i in part.inputs}
        try:
            (values,) = evaluate(part, inputs, {"batch": 1, SEQUENCE: length})
        except (RuntimeError, ValueError, IndexError):
            return None
        if values.shape[-2:] != (length, length) or values.size != length * length:
            return None
        rows = values.reshape(length, length).astype(np.int64)
        known = rows[-1, ::-1] if known is None else known
        queries, keys = np.tril_indices(length)
        if not np.array_equal(rows[queries, keys], known[queries - keys]):
            return None
    assert known is not None
    last = int(np.flatnonzero(known != known[-1])[-1]) + 1 if (known != known[-1]).any() else 0
    return tuple(known[: last + 1].tolist())
