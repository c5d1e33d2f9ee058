"""Dropout in JAX: masks are inputs of a run, drawn as those of torch are (`fusion.runtime.planes.dropout`)."""

from __future__ import annotations

from collections.abc import Mapping

from jax import Array

from fusion.dag.ir.graph import Node
from fusion.runtime.planes.jax_plane.contracting import attention
from fusion.runtime.planes.jax_plane.program import DROPOUT_PROBABILITY, Arguments


class Dropped:
    """The state of a training run. `kept`: whether each element is kept, by node name."""

    def __init__(self, kept: Mapping[str, Array]) -> None:
        self._kept = kept

    def run(self, node: Node, args: Arguments) -> Array:
        p, kept = args[DROPOUT_PROBABILITY[node.op]], self._kept[node.name]
        factor = 0.0 if p >= 1 else 1.0 / (1.0 - p)

        def dropped(x: Array) -> Array:
            return x * (kept.reshape(x.shape).astype(x.dtype) * factor)

        if node.op == "fusion.dropout":
            return dropped(args[0])
        query, key, value, mask, _, *rest = args
        return attention(query, key, value, mask, dropped, *rest)

    def last(self, values: Array, axis: int) -> Array:
        raise AssertionError("nobody cuts to the last position in training")
