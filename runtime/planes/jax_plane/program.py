"""A graph as one JAX function: its nodes in order, called from a table by the op-set's names.

JAX traces it once for each combination of shapes and compiles the trace. No text of a graph is looked up but in that table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array, lax

from fusion.dag.cutting.mode import computed, in_mode
from fusion.dag.cutting.positional import written_buffers
from fusion.dag.ir.dims import Dim, Poly
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Arg, DType, Graph, Node, Ref
from fusion.dag.ir.opset import spec
from fusion.dag.ir.opset_pointwise import KEEP
from fusion.runtime.planes.input_sizes import InputSizes, polynomials
from fusion.runtime.planes.jax_plane.arrays import JAX_DTYPES
from fusion.runtime.planes.jax_plane.contracting import CONTRACTING, batch_norm
from fusion.runtime.planes.jax_plane.in_range import in_range
from fusion.runtime.planes.jax_plane.moving import MOVING
from fusion.runtime.planes.jax_plane.pointwise import POINTWISE
from fusion.runtime.planes.jax_plane.reducing import REDUCING
from fusion.runtime.planes.jax_plane.windows import WINDOWS, require_small_dilated_windows

TABLE = {**POINTWISE, **MOVING, **REDUCING, **CONTRACTING, **WINDOWS}
Arguments = tuple[Any, ...]


class RunState(Protocol):
    """The state of a run: dropout masks, or caches."""

    def run(self, node: Node, args: Arguments) -> Array:
        """The result of a node with an operator in STATEFUL."""

    def last(self, values: Array, axis: int) -> Array:
        """The last position of the sequence: replaces the cut to it."""


STATEFUL = frozenset({
    "fusion.dropout", "fusion.dropout_attention", "fusion.cached_attention", "fusion.cached_attention_scored",
    "fusion.cached_attention_selected",
})  # fmt: skip


DROPOUT_PROBABILITY = {"fusion.dropout": 1, "fusion.dropout_attention": 4}  # its index among the arguments


class Program:
    """`inputs`: names, in order. `last`: nodes that keep the last position of a sequence. Without `training`, dropout is off and running
    statistics are used. GraphError for an operator that this plane lacks."""

    def __init__(self, graph: Graph, *, training: bool, last: frozenset[str] = frozenset()) -> None:
        for node in graph.nodes:
            if node.op not in TABLE and node.op not in STATEFUL:
                raise GraphError(f"the JAX plane does not run {node.op:.100}")
            require_small_dilated_windows(node)
        self.graph = graph
        self.inputs = tuple(i.name for i in graph.inputs)
        self._mask_shapes = (
            [(node, _mask_shape(graph, node)) for node in graph.nodes if node.op in DROPOUT_PROBABILITY]
            if training
            else []
        )
        shapes = (shape for _, shape in self._mask_shapes)
        used = (polynomials(args) for args in (*(node.args for node in graph.nodes), *shapes))
        self._dimensions = tuple(dict.fromkeys(chain.from_iterable(used)))
        self.sizes = InputSizes(graph, self._dimensions)
        self.written = tuple(sorted(ref.name for ref in written_buffers(graph))) if training else ()
        self._training = training
        self._computed = computed(graph, training=training)
        self._last = last

    def dtype(self, ref: Ref) -> np.dtype:
        return JAX_DTYPES[self.graph.types[ref].dtype]

    def dropout_masks(self, dimensions: Sequence[int]) -> Iterator[tuple[str, int, float]]:
        """For each node with a dropout mask: its name, the elements of the mask, and the probability of 0."""
        sizes = dict(zip(self._dimensions, dimensions, strict=True))
        for node, shape in self._mask_shapes:
            p = node.args[DROPOUT_PROBABILITY[node.op]]
            assert isinstance(p, (int, float))
            yield node.name, prod(sizes[d] if isinstance(d, Poly) else d for d in shape), p

    def run(
        self,
        inputs: Sequence[Array],
        variables: Mapping[str, Array],
        dimensions: Sequence[int],
        state: RunState | None,
    ) -> tuple[list[Array], dict[str, Array]]:
        """The outputs, and the new values of the buffers `written`. To be traced: `dimensions`, of `sizes`, are numbers."""
        sizes = dict(zip(self._dimensions, dimensions, strict=True))
        values = {Ref(name): value for name, value in zip(self.inputs, inputs, strict=True)}
        values.update((Ref(name), value) for name, value in variables.items())
        for node in self.graph.nodes:
            if node.name not in self._computed:
                continue
            op, node_args = in_mode(node, training=self._training)
            args = tuple(_value(arg, values, sizes) for arg in node_args)
            result = self._call(node, op, args, values, state)
            for i, type_ in enumerate(node.results):
                value = result[i] if isinstance(result, (tuple, list)) else result
                value = in_range(op, args, value.astype(JAX_DTYPES[type_.dtype]))
                values[Ref(node.name, i)] = value
        outputs = [values[ref] for ref in self.graph.outputs]
        updates = {node.args[0]: Ref(node.name) for node in self.graph.nodes if node.op == KEEP}
        return outputs, {name: values[updates.get(Ref(name), Ref(name))] for name in self.written}

    def _call(
        self, node: Node, op: str, args: Arguments, values: dict[Ref, Array], state: RunState | None
    ) -> Any:
        """The result of a node whose operator is `op` in this mode."""
        if self._training and not spec(op).differentiable:
            args = jax.tree.map(lambda arg: lax.stop_gradient(arg) if isinstance(arg, Array) else arg, args)
        if node.name in self._last:
            assert state is not None
            return state.last(*args[:2])
        if op in STATEFUL:
            assert state is not None
            return state.run(node, args)
        if op == "aten.batch_norm":
            output, *statistics = batch_norm(*args)
            for ref, updated in zip(node.args[3:5], statistics, strict=True):
                if updated is not None and isinstance(ref, Ref):
                    values[ref] = updated.astype(values[ref].dtype)
            return output
        return TABLE[op](*args)


def _mask_shape(graph: Graph, node: Node) -> tuple[Dim, ...]:
    """The shape of the dropout mask of a node."""
    shape = node.results[0].shape
    if node.op == "fusion.dropout":
        return shape
    key = node.args[1]
    assert isinstance(key, Ref)
    return (*shape[:-1], graph.types[key].shape[-2])  # of the scores


def _value(arg: Arg, values: Mapping[Ref, Array], sizes: Mapping[Poly, int]) -> Any:
    if isinstance(arg, Ref):
        return values[arg]
    if isinstance(arg, Poly):
        return sizes[arg]
    if isinstance(arg, DType):
        return JAX_DTYPES[arg.name]
    if type(arg) is tuple:
        return [_value(each, values, sizes) for each in arg]
    return arg
