"""What every run of nodes between two candidate cuts would cost as a stage: tables that placement searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion.dag.cutting.costs import node_costs
from fusion.dag.cutting.cuts import crossings, value_bytes
from fusion.dag.ir.graph import DTYPE_BYTES, Graph, Ref

Row = npt.NDArray[np.float64]  # by bound
Matrix = npt.NDArray[np.float64]  # by first and last bound
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
    kept_bytes: Row  # before each bound: activations kept for backward, or the KV cache, one microbatch
    weight_bytes: Matrix  # weights of the segment, each once
    state_bytes: Matrix  # their gradients and optimizer state
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
            return np.zeros_like(self.static_bytes[first, last])
        found: Row = 2 * self.static_bytes[first, last] / bytes_per_second
        return found

    def memory(self, first: At, last: At, in_flight: At) -> Row:
        """Bytes that the segments hold with so many microbatches under way."""
        kept = self.kept_bytes[last] - self.kept_bytes[first]
        found: Row = self.static_bytes[first, last] + in_flight * kept
        return found

    @cached_property
    def static_bytes(self) -> Matrix:
        return self.weight_bytes + self.state_bytes


def measure(graph: Graph, cuts: Sequence[int], sizes: Mapping[str, int], training: bool) -> Segments:
    bounds = (0, *cuts, len(graph.nodes))
    at = np.array(bounds)
    costs = node_costs(graph, sizes)
    forward, backward = crossings(graph, sizes)
    moved = np.array([c.moved_bytes for c in costs], dtype=np.float64)
    flops = np.array([c.forward_flops for c in costs], dtype=np.float64)
    backward_flops = np.array([c.backward_flops if training else 0 for c in costs], dtype=np.float64)
    kept = np.array([c.saved_bytes for c in costs], dtype=np.float64) if training else _cache(graph, sizes)
    weights, state = _weights(graph, bounds, sizes, training)
    return Segments(
        bounds=bounds,
        training=training,
        flops=_before(flops)[at],
        backward_flops=_before(backward_flops)[at],
        moved_bytes=_before(moved)[at],
        kept_bytes=_before(kept)[at],
        weight_bytes=weights,
        state_bytes=state,
        forward_bytes=forward[at].astype(np.float64),
        backward_bytes=backward[at].astype(np.float64),
    )


def _before(values: Row) -> Row:
    return np.concatenate([[0.0], np.cumsum(values)])


def _cache(graph: Graph, sizes: Mapping[str, int]) -> Row:
    """Keys and values of one session as long as the sizes say."""
    kept = np.zeros(len(graph.nodes))
    for i, node in enumerate(graph.nodes):
        if node.op == "fusion.cached_attention":
            kept[i] = sum(value_bytes(graph.types[a], sizes) for a in node.args[1:3] if isinstance(a, Ref))
    return kept


def _weights(
    graph: Graph, bounds: Sequence[int], sizes: Mapping[str, int], training: bool
) -> tuple[Matrix, Matrix]:
    """Bytes of the variables that each segment reads, and of what training adds to them."""
    size, at = len(bounds), np.array(bounds)
    # Held by the segments [first, last): marked where that begins and ends, summed up below.
    weights, state = np.zeros((size, size)), np.zeros((size, size))
    for variable in graph.variables:
        bytes_ = float(value_bytes(variable.type, sizes))
        trained = training and variable.trainable and variable.kind == "parameter"
        # Gradient, and two moments of AdamW.
        extra = bytes_ * (1 + 8 / DTYPE_BYTES[variable.type.dtype]) if trained else 0.0
        # Segment [first, last) counts it once: at the first of its readers there.
        before = -1
        for reader in graph.uses.get(Ref(variable.name), ()):
            low, high = np.searchsorted(at, [before, reader], side="right")
            for table, value in ((weights, bytes_), (state, extra)):
                table[low, high] += value
                table[high, high] -= value
            before = reader
    return _marked(weights), _marked(state)


def _marked(marks: Matrix) -> Matrix:
    found: Matrix = np.cumsum(np.cumsum(marks, axis=0), axis=1)
    return found
