"""What a run of nodes needs in memory as a stage: the one formula, for every run between two bounds at once.

Training: parameters, gradients and optimizer state, activations kept for backward of each microbatch in flight, values
alive at once while nodes run, and what error feedback keeps. Serving: parameters, the KV cache, and values alive at once.
What several nodes read or keep counts once in each stage, as `fusion.dag.cutting.cuts.split` would give it to each.

A table is a sum of bytes over rectangles of (first, last) bounds: each adds its bytes at two corners, and cumulative sums
spread them. Bounds go by index. Codecs' buffers and what an allocator wastes are not counted.
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
    """What memory depends on beside the graph and the sizes of a microbatch."""

    # Float32 numbers for each trainable element: AdamW 2, SGD with momentum 1, plain SGD 0.
    optimizer_slots: int = 2
    error_feedback: bool = False  # what codecs leave out of a gradient is kept for the next one
    chunk: int | None = None  # positions that run at once when serving; None: all
    positions: int | None = None  # of a session when serving; None: as many as the sizes say
    first_bytes: int = 0  # that the first stage needs beside what is counted here

    def __post_init__(self) -> None:
        if self.optimizer_slots < 0 or (self.chunk is not None and self.chunk < 1):
            raise ValueError("optimizer_slots must be at least 0, chunk at least 1")


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryTables:
    static_bytes: Matrix  # weights, each once; when training also their gradients and optimizer state
    kept_bytes: Matrix  # of one microbatch: activations kept for backward, or the KV cache
    working_bytes: Matrix  # values alive at once, and the residuals of error feedback

    def bytes(self, first: At, last: At, in_flight: At) -> Matrix:
        """Of the stages [first, last) with so many microbatches between forward and backward; arguments broadcast."""
        found: Matrix = (
            self.static_bytes[first, last]
            + in_flight * self.kept_bytes[first, last]
            + self.working_bytes[first, last]
        )
        return found


def measure_memory(
    graph: Graph,
    bounds: Sequence[int],
    sizes: Mapping[str, int],
    training: bool,
    config: MemoryConfig,
    needing: Collection[Ref] = (),
) -> MemoryTables:
    """`bounds` are 0, some cuts, and the number of nodes; `sizes` those of one microbatch, or, when serving, the largest ones: what
    grows as a size falls is then counted at its most too; `needing` the inputs that get a gradient, where the graph is a stage
    of another."""
    if not training and config.positions is not None:
        sizes = {**sizes, "sequence": config.positions}
    types = bound_types(graph, sizes, most=not training)
    found, running = _Measure(graph, bounds, types, training, needing), types
    if not training and config.chunk is not None and "sequence" in sizes:
        chunk = {**sizes, "sequence": min(sizes["sequence"], config.chunk)}
        running = bound_types(graph, chunk, most=True)
    working = found.working(running)
    if training and config.error_feedback:
        working += found.residuals(sizes)
    static = found.static(config.optimizer_slots)
    static[0, 1:] += config.first_bytes
    return MemoryTables(
        static_bytes=static,
        kept_bytes=found.stash() if training else found.cache(),
        working_bytes=working,
    )


class _Rectangles:
    """Sums bytes over rectangles of a (first, last) table."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._marks: list[tuple[int, int, float]] = []

    def add(self, firsts: tuple[int, int], least_last: int, bytes_: float) -> None:
        """To all entries whose first bound is in the range [low, high) and whose last is at least `least_last`."""
        low, high = firsts
        self._marks += ((low, least_last, bytes_), (high, least_last, -bytes_))

    def holders(self, nodes: Sequence[int], after: int, bytes_: float) -> None:
        """To every run of blocks that begins after block `after` and has one of these blocks, once."""
        for block in nodes:
            self.add((after + 1, block + 1), block + 1, bytes_)
            after = block

    def matrix(self) -> Matrix:
        marks = np.zeros((self._size, self._size))
        inside = [m for m in self._marks if m[0] < self._size and m[1] < self._size]
        if inside:
            low, high, bytes_ = zip(*inside, strict=True)
            np.add.at(marks, (low, high), bytes_)
        found: Matrix = np.cumsum(np.cumsum(marks, axis=0), axis=1)
        return found


class _Measure:
    """Nodes go by the block between two neighbouring bounds that they are in; inputs by block -1."""

    def __init__(
        self, graph: Graph, bounds: Sequence[int], types: Types, training: bool, needing: Collection[Ref]
    ) -> None:
        self._needing = needing
        self._graph, self._types, self._training = graph, types, training
        self._bounds = np.array(bounds)
        self._size = len(bounds)
        blocks = np.searchsorted(self._bounds, np.arange(len(graph.nodes)), side="right") - 1
        self._block: list[int] = blocks.tolist()
        self._storages = storages(graph)
        self._once = cast_once(graph) if training else frozenset()
        self._variables = {*self._once, *(Ref(v.name) for v in graph.variables)}

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
        for cast in self._once:
            table.holders([self._block[self._graph.node_index[cast.name]]], -1, type_bytes(self._types[cast]))
        return table.matrix()

    def stash(self) -> Matrix:
        """What autograd keeps of one microbatch."""
        needing = differentiable(self._graph, self._needing)
        own, keepers = np.zeros(len(self._graph.nodes)), dict[Ref, list[int]]()
        for i, node in enumerate(self._graph.nodes):
            own[i], values = stashed(node, self._types, needing, self._storages)
            for value in values - self._variables:
                keepers.setdefault(value, []).append(self._block[i])
        table = _Rectangles(self._size)
        for value, blocks in keepers.items():
            table.holders(blocks, -1, type_bytes(self._types[value]))
        return table.matrix() + self._between(own)

    def cache(self) -> Matrix:
        """Keys, values and states of one session as long as the sizes say."""
        own = np.zeros(len(self._graph.nodes))
        for i, node in enumerate(self._graph.nodes):
            cache = kept(node)
            if cache is not None:
                own[i] = sum(type_bytes(self._types[ref]) for ref in cache[1])
                own[i] += state_bytes(self._types, node)
        return self._between(own)

    def working(self, types: Types) -> Matrix:
        """At most, of values alive at once when each is dropped after its last use, and of what the node that runs takes: exactly
        that, but for a value from outside the stage that stages after it read too, which counts to its end."""
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
            # Stages between two that have it do not, nor do those after the last that does.
            blocks = [self._block[n] if n >= 0 else -1 for n in nodes]
            for here, there in zip(
                blocks, [*blocks[1:], self._size if value in results else None], strict=True
            ):
                if there is not None and there > here + 1:
                    skips.add((here + 1, there), 0, bytes_)
                    skips.add((here + 1, there), there + 1, -bytes_)
        needing = differentiable(graph, self._needing) if self._training else frozenset[Ref]()
        for i, node in enumerate(graph.nodes):
            bytes_ = scratch_bytes(node, types, self._storages, needing)
            alive[i] += bytes_
            alive[i + 1] -= bytes_
        peaks = np.maximum.reduceat(np.cumsum(alive), self._bounds[:-1])
        found = np.zeros((self._size, self._size))
        for first in range(self._size - 1):
            found[first, first + 1 :] = np.maximum.accumulate(peaks[first:])
        return found - skips.matrix() + self._written_out(types)

    def _written_out(self, types: Types) -> Matrix:
        """Of expanded values that are sent, to later stages or as results: number by number."""
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
            made, bytes_ = self._block[graph.node_index[ref.name]], type_bytes(types[ref])
            if ref in sent:
                table.add((0, made + 1), made + 1, bytes_ * sent[ref])
            elif ref.name not in repeated:
                read = max((self._block[reader] for reader in graph.uses.get(ref, ())), default=made)
                table.add((0, made + 1), made + 1, bytes_)
                table.add((0, made + 1), read + 1, -bytes_)
        return table.matrix()

    def residuals(self, sizes: Mapping[str, int]) -> Matrix:
        """Of the gradients that a stage sends back, and of those of the variables that it shares with others."""
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
                # A stage with all its readers shares nothing
                table.add((0, blocks[0] + 1), blocks[-1] + 1, -bytes_)
        return table.matrix()

    def _between(self, own: Row) -> Matrix:
        """Sums over the nodes of each run of what only they use."""
        before = np.concatenate([[0.0], np.cumsum(own)])[self._bounds]
        found: Matrix = before[None, :] - before[:, None]
        return found
