"""The memory of a run of nodes as a stage: the one formula, for every run between two bounds at once.

Training: parameters, gradients and optimizer state, activations saved for backward of each microbatch in flight, the peak of
live values, and residuals of error feedback. Serving: parameters, the KV cache, and the peak of live values.
Values that several nodes read or save count once in each stage, as `fusion.dag.cutting.cuts.split` assigns them.

A table is a sum of bytes over rectangles of (first, last) bounds: each adds its bytes at two corners, and cumulative sums
fill it. Bounds are indices. Buffers of codecs and fragmentation are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion.dag.cutting.costs import (
    FLOAT32_BYTES,
    bound_types,
    cast_once,
    differentiable,
    scratch_bytes,
    stashed,
    storages,
    type_bytes,
)
from fusion.dag.cutting.crossing import crossing
from fusion.dag.cutting.positional import repeatable
from fusion.dag.ir.graph import Graph, Ref, TensorType
from fusion.dag.ir.opset import kept
from fusion.dag.ir.opset_recurrence import state_bytes
from fusion.dag.ir.opset_spec import elements

Row = npt.NDArray[np.float64]  # by node, or by bound
Matrix = npt.NDArray[np.float64]  # by first and last bound
At = Any  # an index into the bounds, or an array of them
Types = Mapping[Ref, TensorType]


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What memory depends on, beside the graph and the sizes of a microbatch."""

    # float32 numbers for each trainable element: AdamW 2, SGD with momentum 1, plain SGD 0.
    optimizer_slots: int = 2
    error_feedback: bool = False  # whether codecs keep residuals of gradients
    chunk: int | None = None  # positions of a prefill chunk when serving; None: all
    positions: int | None = None  # of a session when serving; None: as the sizes
    first_bytes: int = 0  # extra bytes of the first stage

    def __post_init__(self) -> None:
        if self.optimizer_slots < 0 or (self.chunk is not None and self.chunk < 1):
            raise ValueError("optimizer_slots must be at least 0, chunk at least 1")


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryTables:
    static_bytes: Matrix  # weights; in training also their gradients and optimizer state
    kept_bytes: Matrix  # activations of one microbatch saved for backward, or the KV cache
    working_bytes: Matrix  # the peak of live values, and residuals of error feedback

    def bytes(self, first: At, last: At, in_flight: At) -> Matrix:
        """Bytes of the stages [first, last) with `in_flight` microbatches between forward and backward; arguments broadcast."""
        total: Matrix = (
            self.static_bytes[first, last]
            + in_flight * self.kept_bytes[first, last]
            + self.working_bytes[first, last]
        )
        return total


def measure_memory(
    graph: Graph,
    bounds: Sequence[int],
    sizes: Mapping[str, int],
    training: bool,
    config: MemoryConfig,
    needs_gradient: Collection[Ref] = (),
) -> MemoryTables:
    """The tables for `bounds`, which are 0, some cuts, and the number of nodes. `sizes` are those of one microbatch, or, in serving,
    the largest ones, for which every dimension is bounded from above; `needs_gradient`: the inputs that get a gradient, if the
    graph is a stage of another."""
    if not training and config.positions is not None:
        sizes = {**sizes, "sequence": config.positions}
    types = bound_types(graph, sizes, upper_bound=not training)
    measure, running = _Measure(graph, bounds, types, training, needs_gradient), types
    if not training and config.chunk is not None and "sequence" in sizes:
        chunk = {**sizes, "sequence": min(sizes["sequence"], config.chunk)}
        running = bound_types(graph, chunk, upper_bound=True)
    working = measure.working(running)
    if training and config.error_feedback:
        working += measure.residuals(sizes)
    static = measure.static(config.optimizer_slots)
    static[0, 1:] += config.first_bytes
    return MemoryTables(
        static_bytes=static,
        kept_bytes=measure.stash() if training else measure.cache(),
        working_bytes=working,
    )


class _Rectangles:
    """Sums bytes over rectangles of a (first, last) table."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._corners: list[tuple[int, int, float]] = []

    def add(self, firsts: tuple[int, int], least_last: int, bytes_: float) -> None:
        """Add to all entries with a first bound in [low, high) and a last bound of at least `least_last`."""
        low, high = firsts
        self._corners += ((low, least_last, bytes_), (high, least_last, -bytes_))

    def holders(self, blocks: Sequence[int], after: int, bytes_: float) -> None:
        """Add once to every run that begins after block `after` and contains one of the blocks `blocks`."""
        for block in blocks:
            self.add((after + 1, block + 1), block + 1, bytes_)
            after = block

    def matrix(self) -> Matrix:
        corners = np.zeros((self._size, self._size))
        inside = [m for m in self._corners if m[0] < self._size and m[1] < self._size]
        if inside:
            low, high, bytes_ = zip(*inside, strict=True)
            np.add.at(corners, (low, high), bytes_)
        sums: Matrix = np.cumsum(np.cumsum(corners, axis=0), axis=1)
        return sums


class _Measure:
    """Measures a graph. A block is the nodes between two neighbouring bounds; inputs are in block -1."""

    def __init__(
        self,
        graph: Graph,
        bounds: Sequence[int],
        types: Types,
        training: bool,
        needs_gradient: Collection[Ref],
    ) -> None:
        self._needs_gradient = needs_gradient
        self._graph, self._types, self._training = graph, types, training
        self._bounds = np.array(bounds)
        self._size = len(bounds)
        blocks = np.searchsorted(self._bounds, np.arange(len(graph.nodes)), side="right") - 1
        self._block: list[int] = blocks.tolist()
        self._storages = storages(graph)
        self._casts = cast_once(graph) if training else frozenset()
        self._variables = {*self._casts, *(Ref(v.name) for v in graph.variables)}

    def static(self, slots: int) -> Matrix:
        table = _Rectangles(self._size)
        for variable in self._graph.variables:
            type_ = self._types[Ref(variable.name)]
            bytes_ = type_bytes(type_)
            readers = self._graph.uses.get(Ref(variable.name), ())
            if not readers:  # the first stage keeps it, frozen
                table.add((0, 1), 0, bytes_)
            elif self._training and variable.trainable and variable.kind == "parameter":
                bytes_ += bytes_ + slots * FLOAT32_BYTES * elements(type_)
            table.holders([self._block[r] for r in readers], -1, bytes_)
        for cast in self._casts:
            table.holders([self._block[self._graph.node_index[cast.name]]], -1, type_bytes(self._types[cast]))
        return table.matrix()

    def stash(self) -> Matrix:
        """Bytes that autograd saves of one microbatch."""
        needs_gradient = differentiable(self._graph, self._needs_gradient)
        own_bytes, keepers = np.zeros(len(self._graph.nodes)), dict[Ref, list[int]]()
        for i, node in enumerate(self._graph.nodes):
            own_bytes[i], values = stashed(node, self._types, needs_gradient, self._storages)
            for value in values - self._variables:
                keepers.setdefault(value, []).append(self._block[i])
        table = _Rectangles(self._size)
        for value, blocks in keepers.items():
            table.holders(blocks, -1, type_bytes(self._types[value]))
        return table.matrix() + self._sums_of_runs(own_bytes)

    def cache(self) -> Matrix:
        """Bytes of the keys, values and states of one session of the given sizes."""
        cache_bytes = np.zeros(len(self._graph.nodes))
        for i, node in enumerate(self._graph.nodes):
            cache = kept(node)
            if cache is not None:
                cache_bytes[i] = sum(type_bytes(self._types[ref]) for ref in cache[1])
                cache_bytes[i] += state_bytes(self._types, node)
        return self._sums_of_runs(cache_bytes)

    def working(self, types: Types) -> Matrix:
        """The peak of live values, each dropped after its last use, and of temporaries. Exact, except that a value from outside the
        stage that later stages read too counts to the end of the stage."""
        graph = self._graph
        touches: dict[Ref, list[int]] = {Ref(i.name): [-1] for i in graph.inputs}
        for i, node in enumerate(graph.nodes):
            for ref in (*node.refs(), *(Ref(node.name, r) for r in range(len(node.results)))):
                touches.setdefault(self._storages[ref], []).append(i)
        results = {self._storages[ref] for ref in graph.outputs}
        alive, skips = np.zeros(len(graph.nodes) + 2), _Rectangles(self._size)
        for value, nodes in touches.items():
            if value in self._variables:
                continue
            bytes_, last = type_bytes(types[value]), nodes[-1]
            end = len(graph.nodes) if value in results else last + 1
            alive[max(0, nodes[0])] += bytes_
            alive[end] -= bytes_
            # A stage between two that use the value does not hold it, nor does one after the last.
            blocks = [self._block[n] if n >= 0 else -1 for n in nodes]
            for block, next_block in zip(
                blocks, [*blocks[1:], self._size if value in results else None], strict=True
            ):
                if next_block is not None and next_block > block + 1:
                    skips.add((block + 1, next_block), 0, bytes_)
                    skips.add((block + 1, next_block), next_block + 1, -bytes_)
        needs_gradient = differentiable(graph, self._needs_gradient) if self._training else frozenset[Ref]()
        for i, node in enumerate(graph.nodes):
            bytes_ = scratch_bytes(node, types, self._storages, needs_gradient)
            alive[i] += bytes_
            alive[i + 1] -= bytes_
        peaks = np.maximum.reduceat(np.cumsum(alive), self._bounds[:-1])
        peak_table = np.zeros((self._size, self._size))
        for first in range(self._size - 1):
            peak_table[first, first + 1 :] = np.maximum.accumulate(peaks[first:])
        return peak_table - skips.matrix() + self._dense_copies(types)

    def _dense_copies(self, types: Types) -> Matrix:
        """Bytes of the dense copies of expanded values that are sent to later stages or are results."""
        graph, table = self._graph, _Rectangles(self._size)
        expanded = [
            ref
            for ref in graph.types
            if ref.name in graph.node_index
            and type_bytes(types[ref]) > type_bytes(types[self._storages[ref]])
        ]
        sent = Counter(graph.outputs)
        repeated = repeatable(graph) if expanded and self._size > 2 else frozenset[str]()
        for ref in expanded:
            producer, bytes_ = self._block[graph.node_index[ref.name]], type_bytes(types[ref])
            if ref in sent:
                table.add((0, producer + 1), producer + 1, bytes_ * sent[ref])
            elif ref.name not in repeated:
                last_reader = max(
                    (self._block[reader] for reader in graph.uses.get(ref, ())), default=producer
                )
                table.add((0, producer + 1), producer + 1, bytes_)
                table.add((0, producer + 1), last_reader + 1, -bytes_)
        return table.matrix()

    def residuals(self, sizes: Mapping[str, int]) -> Matrix:
        """Residuals of error feedback: for the gradients that a stage sends back, and for those of variables that it shares."""
        table, values = _Rectangles(self._size), crossing(self._graph, sizes)
        readers: dict[int, list[int]] = {}
        for value, reader in zip(values.value.tolist(), values.reader.tolist(), strict=True):
            readers.setdefault(value, []).append(self._block[reader])
        for value, blocks in readers.items():
            if values.gradient[value]:
                bytes_ = FLOAT32_BYTES * int(values.elements[value])
                table.holders(blocks, self._block[values.producer[value]], bytes_)
        for variable in self._graph.variables:
            type_ = self._types[Ref(variable.name)]
            blocks = [self._block[r] for r in self._graph.uses.get(Ref(variable.name), ())]
            shared = variable.trainable and variable.kind == "parameter" and "float" in type_.dtype
            if blocks and shared:
                bytes_ = FLOAT32_BYTES * elements(type_)
                table.holders(blocks, -1, bytes_)
                # A stage with all readers does not share the variable
                table.add((0, blocks[0] + 1), blocks[-1] + 1, -bytes_)
        return table.matrix()

    def _sums_of_runs(self, bytes_by_node: Row) -> Matrix:
        """Sums over the nodes of each run."""
        prefix_sums = np.concatenate([[0.0], np.cumsum(bytes_by_node)])[self._bounds]
        sums: Matrix = prefix_sums[None, :] - prefix_sums[:, None]
        return sums
