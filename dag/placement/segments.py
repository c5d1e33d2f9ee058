"""What every run of nodes between two candidate cuts would cost as a stage: tables that placement searches."""

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
from fusion.dag.placement.speeds import UPDATE_NODES, UPDATE_TOUCHES, Rows, asked

Row = npt.NDArray[np.float64]  # by bound
At = Any  # an index into the bounds, or an array of them
Rate = Any  # a number, or an array of them


@dataclass(frozen=True, eq=False)
class Segments:
    """`bounds` are 0, the candidate cuts, and the number of nodes; rows and matrices go by index into them."""

    bounds: tuple[int, ...]
    training: bool
    flops: Row  # of nodes before each bound, one microbatch, both passes
    forward: Rows  # (KINDS, bounds) that nodes before each bound ask for in one microbatch (`speeds.asked`)
    backward: Rows  # 0 when serving
    tensors: Row  # that an optimizer updates, of nodes before each bound
    held: MemoryTables
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
            return np.zeros_like(self.held.static_bytes[first, last])
        touched = UPDATE_TOUCHES * self.held.static_bytes[first, last] * updated_byte
        found: Row = touched + UPDATE_NODES * (self.tensors[last] - self.tensors[first]) * node
        return found

    def memory(self, first: At, last: At, in_flight: At) -> Row:
        """Bytes that the segments need with so many microbatches under way."""
        return self.held.bytes(first, last, in_flight)


def measure(
    graph: Graph,
    cuts: Sequence[int],
    sizes: Mapping[str, int],
    training: bool,
    memory: MemoryConfig = MemoryConfig(),  # noqa: B008 - frozen
) -> Segments:
    """Remembered for the last few: a placement is measured again and again while its schedule and codecs are chosen."""
    return _measure(_Same(graph), tuple(cuts), tuple(sizes.items()), training, memory)


@dataclass(frozen=True, eq=False)
class _Same:
    """A graph that equals itself alone: to compare two would take as long as measuring them."""

    graph: Graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.graph is self.graph

    def __hash__(self) -> int:
        return id(self.graph)


@lru_cache(maxsize=4)
def _measure(
    same: _Same,
    cuts: tuple[int, ...],
    known: tuple[tuple[str, int], ...],
    training: bool,
    memory: MemoryConfig,
) -> Segments:
    graph, sizes = same.graph, dict(known)
    bounds = (0, *cuts, len(graph.nodes))
    at = np.array(bounds)
    costs = node_costs(graph, sizes)
    # What an encoder-decoder makes of its source comes once a session: a token does not wait for it.
    once = source_values(graph)
    forward, _ = crossings(graph, sizes, once)
    again = np.array([Ref(node.name) not in once for node in graph.nodes], dtype=np.float64)
    passes = asked(costs)
    flops = again * np.array([c.forward_flops for c in costs], dtype=np.float64)
    if training:
        flops = flops + np.array([c.backward_flops for c in costs], dtype=np.float64)
    return Segments(
        bounds=bounds,
        training=training,
        flops=_before(flops)[at],
        forward=_before(again * passes[0])[:, at],
        backward=_before(passes[1] * training)[:, at],
        tensors=_before(np.array([c.trainable_tensors for c in costs], dtype=np.float64))[at],
        held=measure_memory(graph, bounds, sizes, training, memory),
        forward_bytes=forward[at].astype(np.float64),
    )


def _before(values: Row) -> Row:
    """Sums along the last axis of what comes before each place, and of all."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


def _seconds(rows: Rows, first: At, last: At, seconds: Rate) -> Row:
    found = np.zeros(np.broadcast_shapes(np.shape(first), np.shape(last), np.shape(seconds[0])))
    for row, each in zip(rows, seconds, strict=True):
        if row[-1]:  # of kinds that the graph has none of there is nothing to add up
            found = found + (row[last] - row[first]) * each
    return found
