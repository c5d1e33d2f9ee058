"""The values of a graph that a cut may turn into edges, as a table: for any cuts, at once, the edges that
`fusion.dag.cutting.cuts.split` would make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion.dag.cutting.costs import with_gradient
from fusion.dag.cutting.cuts import value_bytes
from fusion.dag.cutting.positional import repeatable
from fusion.dag.cutting.references import needed, roots
from fusion.dag.cutting.source import source_values
from fusion.dag.cutting.stage import edge_name
from fusion.dag.ir.graph import DTYPE_BYTES, Graph, Node, Ref

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Crossing:
    """Values that are made by one node and read by another, in the order of their making."""

    names: tuple[str, ...]  # by value: the name of its edge
    dtypes: tuple[str, ...]
    elements: Indices  # one microbatch
    element_bytes: Indices
    gradient: npt.NDArray[np.bool_]  # whether a gradient comes back
    producer: Indices  # the node that makes it
    value: Indices  # by reading: which value
    reader: Indices  # by reading: the node that reads it

    def edges(self, cuts: Sequence[int]) -> tuple[Indices, Indices, Indices]:
        """Value, producing stage and consuming stage of each edge that these cuts make, ordered by value and consumer."""
        at = np.asarray(cuts, dtype=np.int64)
        made = np.searchsorted(at, self.producer, side="right")[self.value]
        read = np.searchsorted(at, self.reader, side="right")
        crosses = made < read
        stages = len(at) + 1
        once = np.unique(self.value[crosses] * stages + read[crosses])
        value, consumer = once // stages, once % stages
        return value, np.searchsorted(at, self.producer[value], side="right"), consumer


def crossing(graph: Graph, sizes: Mapping[str, int]) -> Crossing:
    repeated, gradient, index = repeatable(graph), with_gradient(graph), graph.node_index
    live = {node.name for node in needed(graph, roots(graph))}

    def runs_once(node: Node) -> bool:
        return node.name in live and node.name not in repeated

    found: list[tuple[Ref, list[int]]] = []
    for ref, readers in graph.uses.items():
        if ref.name in index and runs_once(graph.nodes[index[ref.name]]):
            later = [r for r in readers if runs_once(graph.nodes[r])]
            if later:
                found.append((ref, later))
    found.sort(key=lambda item: (index[item[0].name], item[0].index))
    types = [graph.types[ref] for ref, _ in found]
    once = source_values(graph)  # of an encoder-decoder: they cross before the first microbatch
    each = np.array([DTYPE_BYTES[t.dtype] for t in types], dtype=np.int64)
    return Crossing(
        names=tuple(edge_name(ref) for ref, _ in found),
        dtypes=tuple(t.dtype for t in types),
        elements=np.array(
            [0 if ref in once else value_bytes(t, sizes) for (ref, _), t in zip(found, types, strict=True)],
            dtype=np.int64,
        )
        // np.maximum(each, 1),
        element_bytes=each,
        gradient=np.array([ref in gradient for ref, _ in found], dtype=bool),
        producer=np.array([index[ref.name] for ref, _ in found], dtype=np.int64),
        value=np.repeat(np.arange(len(found)), [len(readers) for _, readers in found]).astype(np.int64),
        reader=np.array([r for _, readers in found for r in readers], dtype=np.int64),
    )
