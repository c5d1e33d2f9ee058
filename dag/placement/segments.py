"""The cost of every run of nodes between two candidate cuts as a stage: tables that placement searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion.dag.cutting.costs import node_costs
from fusion.dag.cutting.cuts import crossings
from fusion.dag.cutting.memory import MemoryConfig, MemoryTables, measure_memory
from fusion.dag.cutting.source import source_values
from fusion.dag.ir.graph import Graph, Ref
from fusion.dag.placement.speeds import UPDATE_NODES, UPDATE_TOUCHES, Rows, demands

Row = npt.NDArray[np.float64]  # by bound
At = Any  # an index into the bounds, or an array of them
Rate = Any  # a number, or an array of them


@dataclass(frozen=True, eq=False)
class Segments:
    """`bounds` are 0, the candidate cuts, and the number of nodes; rows and `first`, `last` are indices into them."""

    bounds: tuple[int, ...]
    training: bool
    flops: Row  # of nodes before each bound, one microbatch, both passes
    forward: Rows  # (KINDS, bounds) work of the nodes before each bound, one microbatch (`speeds.demands`)
    backward: Rows  # 0 when serving
    tensors: Row  # trainable ones of the nodes before each bound
    memory_tables: MemoryTables
    forward_bytes: Row  # over each bound, one microbatch

    def passes(self, first: At, last: At, seconds: Rate) -> tuple[Row, Row]:
        """Seconds of forward and backward of the segments [first, last), one microbatch; arguments broadcast, the first axis of
        `seconds` being that of `Speeds.seconds`."""
        forward = _seconds(self.forward, first, last, seconds)
        return forward, _seconds(self.backward, first, last, seconds) if self.training else np.zeros_like(
            forward
        )

    def updates(self, first: At, last: At, updated_byte: Rate, node: Rate) -> Row:
        """Seconds of the gradients' norm and the optimizer's work, once a step; `updated_byte` and `node` as in `Speeds`."""
        if not self.training:
            return np.zeros_like(self.memory_tables.static_bytes[first, last])
        moved = UPDATE_TOUCHES * self.memory_tables.static_bytes[first, last] * updated_byte
        seconds: Row = moved + UPDATE_NODES * (self.tensors[last] - self.tensors[first]) * node
        return seconds

    def memory(self, first: At, last: At, in_flight: At) -> Row:
        """Bytes that the segments need with `in_flight` microbatches."""
        return self.memory_tables.bytes(first, last, in_flight)


def measure(
    graph: Graph,
    cuts: Sequence[int],
    sizes: Mapping[str, int],
    training: bool,
    memory: MemoryConfig = MemoryConfig(),  # noqa: B008 - frozen
) -> Segments:
    """The segments between `cuts`. The last few results are cached: schedules and codecs are chosen for one placement."""
    return _measure(_ById(graph), tuple(cuts), tuple(sizes.items()), training, memory)


@dataclass(frozen=True, eq=False)
class _ById:
    """A graph as a cache key, compared by identity: comparing two graphs would take as long as measuring one."""

    graph: Graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.graph is self.graph

    def __hash__(self) -> int:
        return id(self.graph)


@lru_cache(maxsize=4)
def _measure(
    by_id: _ById,
    cuts: tuple[int, ...],
    size_items: tuple[tuple[str, int], ...],
    training: bool,
    memory: MemoryConfig,
) -> Segments:
    graph, sizes = by_id.graph, dict(size_items)
    bounds = (0, *cuts, len(graph.nodes))
    at = np.array(bounds)
    costs = node_costs(graph, sizes)
    # An encoder runs once a session: no token waits for it.
    per_session = source_values(graph)
    forward, _ = crossings(graph, sizes, per_session)
    per_microbatch = np.array([Ref(node.name) not in per_session for node in graph.nodes], dtype=np.float64)
    passes = demands(costs)
    flops = per_microbatch * np.array([c.forward_flops for c in costs], dtype=np.float64)
    if training:
        flops = flops + np.array([c.backward_flops for c in costs], dtype=np.float64)
    return Segments(
        bounds=bounds,
        training=training,
        flops=_prefix_sums(flops)[at],
        forward=_prefix_sums(per_microbatch * passes[0])[:, at],
        backward=_prefix_sums(passes[1] * training)[:, at],
        tensors=_prefix_sums(np.array([c.trainable_tensors for c in costs], dtype=np.float64))[at],
        memory_tables=measure_memory(graph, bounds, sizes, training, memory),
        forward_bytes=forward[at].astype(np.float64),
    )


def _prefix_sums(values: Row) -> Row:
    """Exclusive prefix sums along the last axis, and the total as the last entry."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


def _seconds(rows: Rows, first: At, last: At, seconds: Rate) -> Row:
    total = np.zeros(np.broadcast_shapes(np.shape(first), np.shape(last), np.shape(seconds[0])))
    for row, each in zip(rows, seconds, strict=True):
        if row[-1]:  # skip kinds of work that the graph has none of
            total = total + (row[last] - row[first]) * each
    return total
