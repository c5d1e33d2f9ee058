"""A table of the values that may cross a cut, which gives the edges of `fusion.dag.cutting.cuts.split` for any cuts."""

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
    """Values that one node produces and another reads, in the order of their producers; and their uses, by value."""

    names: tuple[str, ...]  # by value: the name of its edge
    dtypes: tuple[str, ...]
    elements: Indices  # one microbatch
    element_bytes: Indices
    gradient: npt.NDArray[np.bool_]  # whether its gradient is sent back
    producer: Indices  # the index of its node
    value: Indices  # by use: the value
    reader: Indices  # by use: the index of the node that reads it

    def edges(self, cuts: Sequence[int]) -> tuple[Indices, Indices, Indices]:
        """Value, producing stage and consuming stage of each edge of these cuts, ordered by value and consumer."""
        bounds = np.asarray(cuts, dtype=np.int64)
        producers = np.searchsorted(bounds, self.producer, side="right")[self.value]
        consumers = np.searchsorted(bounds, self.reader, side="right")
        crosses = producers < consumers
        stages = len(bounds) + 1
        pairs = np.unique(self.value[crosses] * stages + consumers[crosses])
        value, consumer = pairs // stages, pairs % stages
        return value, np.searchsorted(bounds, self.producer[value], side="right"), consumer


def crossing(graph: Graph, sizes: Mapping[str, int]) -> Crossing:
    repeated, gradient, index = repeatable(graph), with_gradient(graph), graph.node_index
    live = {node.name for node in needed(graph, roots(graph))}

    def runs_once(node: Node) -> bool:
        return node.name in live and node.name not in repeated

    values: list[tuple[Ref, list[int]]] = []
    for ref, readers in graph.uses.items():
        if ref.name in index and runs_once(graph.nodes[index[ref.name]]):
            reader_list = [r for r in readers if runs_once(graph.nodes[r])]
            if reader_list:
                values.append((ref, reader_list))
    values.sort(key=lambda item: (index[item[0].name], item[0].index))
    types = [graph.types[ref] for ref, _ in values]
    per_session = source_values(graph)  # of an encoder: sent before the first microbatch
    element_bytes = np.array([DTYPE_BYTES[t.dtype] for t in types], dtype=np.int64)
    return Crossing(
        names=tuple(edge_name(ref) for ref, _ in values),
        dtypes=tuple(t.dtype for t in types),
        elements=np.array(
            [
                0 if ref in per_session else value_bytes(t, sizes)
                for (ref, _), t in zip(values, types, strict=True)
            ],
            dtype=np.int64,
        )
        // np.maximum(element_bytes, 1),
        element_bytes=element_bytes,
        gradient=np.array([ref in gradient for ref, _ in values], dtype=bool),
        producer=np.array([index[ref.name] for ref, _ in values], dtype=np.int64),
        value=np.repeat(np.arange(len(values)), [len(readers) for _, readers in values]).astype(np.int64),
        reader=np.array([r for _, readers in values for r in readers], dtype=np.int64),
    )
