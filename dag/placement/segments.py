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

Row = npt.NDArray[np.float64]  # by bound
At = Any  # an index into the bounds, or an array of them
Rate = Any  # a number, or an array of them


@dataclass(frozen=True, eq=False)
class Segments:
    """`bounds` are 0, the candidate cuts, and the number of nodes; rows and matrices go by index into them."""

    bounds: tuple[int, ...]
    training: bool
    flops: Row  # before each bound, one microbatch, the forward pass
    backward_flops: Row  # 0 when serving
    moved_bytes: Row  # before each bound: read and written by ops, one microbatch, the forward pass
    held: MemoryTables
    forward_bytes: Row  # over each bound, one microbatch
    backward_bytes: Row

    def passes(self, first: At, last: At, flops_per_second: Rate, bytes_per_second: Rate) -> tuple[Row, Row]:
        """Seconds of forward and backward of the segments [first, last), one microbatch; arguments broadcast."""
        moved = (self.moved_bytes[last] - self.moved_bytes[first]) / bytes_per_second
        forward = (self.flops[last] - self.flops[first]) / flops_per_second + moved
        if not self.training:
            return forward, np.zeros_like(forward)
        flops = self.backward_flops[last] - self.backward_flops[first]
        return forward, flops / flops_per_second + 2 * moved  # backward moves about twice what forward does

    def updates(self, first: At, last: At, bytes_per_second: Rate) -> Row:
        """Seconds of the optimizer's work, once a step: it reads and writes weights, gradients and its own state."""
        if not self.training:
            return np.zeros_like(self.held.static_bytes[first, last])
        found: Row = 2 * self.held.static_bytes[first, last] / bytes_per_second
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
    forward, backward = crossings(graph, sizes, once)
    again = np.array([Ref(node.name) not in once for node in graph.nodes], dtype=np.float64)
    moved = again * np.array([c.moved_bytes for c in costs], dtype=np.float64)
    flops = again * np.array([c.forward_flops for c in costs], dtype=np.float64)
    backward_flops = np.array([c.backward_flops if training else 0 for c in costs], dtype=np.float64)
    return Segments(
        bounds=bounds,
        training=training,
        flops=_before(flops)[at],
        backward_flops=_before(backward_flops)[at],
        moved_bytes=_before(moved)[at],
        held=measure_memory(graph, bounds, sizes, training, memory),
        forward_bytes=forward[at].astype(np.float64),
        backward_bytes=backward[at].astype(np.float64),
    )


def _before(values: Row) -> Row:
    return np.concatenate([[0.0], np.cumsum(values)])
