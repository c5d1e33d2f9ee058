"""What every run of nodes between two candidate cuts would cost as a stage: tables that placement searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fusion.dag.costs import node_costs
from fusion.dag.cuts import crossings, value_bytes
from fusion.dag.ir import DTYPE_BYTES, Graph, Ref

Row = npt.NDArray[np.float64]  # by bound
Matrix = npt.NDArray[np.float64]  # by first and last bound


@dataclass(frozen=True, eq=False)
class Segments:
    """`bounds` are 0, the candidate cuts, and the number of nodes; rows and matrices go by index into them."""

    bounds: tuple[int, ...]
    training: bool
    flops: Row  # before each bound, one microbatch, both passes when training
    moved_bytes: Row  # before each bound: read and written by ops, one microbatch
    kept_bytes: Row  # before each bound: activations kept for backward, or the KV cache, one microbatch
    weight_bytes: Matrix  # weights of the segment, each once
    state_bytes: Matrix  # their gradients and optimizer state
    forward_bytes: Row  # over each bound, one microbatch
    backward_bytes: Row

    def seconds(self, flops_per_second: float, bytes_per_second: float, microbatches: int) -> Matrix:
        """Time of each segment for one microbatch, with its share of the optimizer's work, which is done once."""
        per_step = 2 * (self.weight_bytes + self.state_bytes) if self.training else 0.0
        moved = _between(self.moved_bytes) + per_step / microbatches
        found: Matrix = _between(self.flops) / flops_per_second + moved / bytes_per_second
        return found

    def memory(self, in_flight: int) -> Matrix:
        """Bytes that a segment holds with `in_flight` microbatches under way."""
        return self._static + in_flight * _between(self.kept_bytes)

    @cached_property
    def _static(self) -> Matrix:
        return self.weight_bytes + self.state_bytes


def measure(graph: Graph, cuts: Sequence[int], sizes: Mapping[str, int], training: bool) -> Segments:
    bounds = (0, *cuts, len(graph.nodes))
    at = np.array(bounds)
    costs = node_costs(graph, sizes)
    forward, backward = crossings(graph, sizes)
    moved = np.array([c.moved_bytes * (3 if training else 1) for c in costs], dtype=np.float64)
    flops = np.array(
        [c.forward_flops + (c.backward_flops if training else 0) for c in costs], dtype=np.float64
    )
    kept = np.array([c.saved_bytes for c in costs], dtype=np.float64) if training else _cache(graph, sizes)
    weights, state = _weights(graph, bounds, sizes, training)
    return Segments(
        bounds=bounds,
        training=training,
        flops=_before(flops)[at],
        moved_bytes=_before(moved)[at],  # backward moves about twice what forward does
        kept_bytes=_before(kept)[at],
        weight_bytes=weights,
        state_bytes=state,
        forward_bytes=forward[at].astype(np.float64),
        backward_bytes=backward[at].astype(np.float64),
    )


def _before(values: Row) -> Row:
    return np.concatenate([[0.0], np.cumsum(values)])


def _between(before: Row) -> Matrix:
    return before[None, :] - before[:, None]


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
    size = len(bounds)
    weights, state = np.zeros((size, size)), np.zeros((size, size))
    at = np.array(bounds)
    for variable in graph.variables:
        bytes_ = value_bytes(variable.type, sizes)
        trained = training and variable.trainable and variable.kind == "parameter"
        reads = graph.uses.get(Ref(variable.name), ())
        # Segment [a, b) counts it once: at the first of its readers in [a, b).
        before = -1
        for reader in reads:
            held = np.outer((at > before) & (at <= reader), at > reader) * float(bytes_)
            weights += held
            if trained:
                state += (
                    held + 2 * held * 4 / DTYPE_BYTES[variable.type.dtype]
                )  # gradient, two moments of AdamW
            before = reader
    return weights, state
