"""A decoding stage in JAX: pieces run one after another, each with the KV cache of its session.

Where the graph treats positions one by one (`fusion.dag.rewrites.end_to_end`), a piece is padded to the next power of two with copies of
its last position, so that few programs are compiled. Other graphs run at their own length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax import Array

from fusion.dag.cutting.source import SOURCE, SOURCE_ATTENTION
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.errors import GraphError
from fusion.dag.rewrites.end_to_end import end_to_end
from fusion.runtime.job.worker import rest
from fusion.runtime.planes.jax_plane.arrays import array, tensor
from fusion.runtime.planes.jax_plane.jax_cache import CacheState, SessionArrays, Slots, row_count
from fusion.runtime.planes.jax_plane.program import Program
from fusion.runtime.planes.plane import Piece, Tensors
from fusion.runtime.planes.sessions import Sessions, slot_shapes
from fusion.runtime.planes.stage_values import (
    checked_variable,
    concatenated,
    count_positions,
    ordered_inputs,
    output_keys,
)

MAX_COMPILED = 64  # programs, by rows and allocated memory
_CPU = torch.device("cpu")


class JaxDecodingStage(Sessions[SessionArrays]):
    """A decoding stage. A stage without attention to a cache keeps nothing between runs."""

    batched = False
    compiles = True
    chunk_invariant = True  # of 36 prompts in bfloat16, each cut in three ways, none had other logits (CPU)

    def __init__(self, stage: Stage, variables: Tensors, device: jax.Device) -> None:
        super().__init__()
        self.stage = stage
        self._device = device
        if SOURCE in stage.graph.symbols:
            raise GraphError(
                f"the JAX plane does not run {SOURCE_ATTENTION}, nor what an encoder makes for it"
            )
        self._slots = slot_shapes(stage.graph)
        self.has_cache = bool(self._slots)
        self._layout = end_to_end(stage.graph) if self._slots else None
        last = frozenset[str]() if self._layout is None else self._layout.last
        self._program = Program(stage.graph, training=False, last=last)
        if self._slots and self._layout is None:
            self._program.sizes.require("sequence")
        self._variables = {
            v.name: array(checked_variable(variables, v), device) for v in stage.graph.variables
        }
        self._keys = output_keys(stage)
        self._compiled: OrderedDict[Any, Callable[..., tuple[list[Array], Slots]]] = OrderedDict()

    def _new(self, capacity: int, source: int) -> SessionArrays:
        return SessionArrays(self._slots, capacity, self._device)

    def _retains(self, cache: SessionArrays) -> bool:
        return bool(self._slots)

    def run(self, pieces: Sequence[Piece]) -> list[dict[str, torch.Tensor]]:
        """ValueError for a session that is unknown or comes twice, a gap before `start`, positions beyond the capacity, or positions
        `singly`."""
        caches = [self._cache(piece.session) for piece in pieces]
        if len(set(map(id, caches))) < len(caches):
            raise ValueError("a session runs one piece at a time")
        results = []
        for piece, cache in zip(pieces, caches, strict=True):
            results.append(self._run(piece, cache))
            rest()  # between pieces, other work may run
        for (_, memory, end), cache in zip(results, caches, strict=True):
            if self._slots:
                cache.commit(memory, end)
        return [outputs for outputs, _, _ in results]

    def _run(self, piece: Piece, cache: SessionArrays) -> tuple[dict[str, torch.Tensor], Slots, int]:
        """The results of the piece, and the cache and length of the session once it is committed."""
        if piece.singly or piece.start < 0:
            raise ValueError("this stage runs positions of a sequence alone, and not singly")
        inputs = ordered_inputs(self._program.inputs, piece.inputs, _CPU)
        count = 1
        if self._layout is not None:
            axes = [self._layout.inputs[name] for name in self._program.inputs]
            count = count_positions(inputs, axes, self._program.inputs)
            if not count:
                raise ValueError("a piece has at least one position")
            inputs = [
                concatenated([value], axis, rows, row_count(count) - count)
                for value, (axis, rows) in zip(inputs, axes, strict=True)
            ]
        elif self._slots:
            count = self._program.sizes.size(inputs, "sequence")
        dimensions = self._program.sizes.dimensions(inputs)
        if self._slots:
            cache.begin(piece.start, count)
        shapes = tuple(tuple(value.shape) for value in inputs)
        compiled = self._program_for((shapes, cache.allocated), dimensions)
        arrays = [array(value, self._device) for value in inputs]
        outputs, memory = compiled(self._variables, arrays, cache.memory, piece.start, count - 1)
        results = {key: tensor(value) for key, value in zip(self._keys, outputs, strict=True)}
        if self._layout is not None:
            for key, (axis, rows), only_logit_rows in zip(
                self._keys, self._layout.outputs, self._layout.ends, strict=True
            ):
                if not only_logit_rows:
                    results[key] = results[key].narrow(axis, 0, count * rows)
        return results, memory, piece.start + count

    def _program_for(self, key: Any, dimensions: Sequence[int]) -> Callable[..., tuple[list[Array], Slots]]:
        if key not in self._compiled:
            if len(self._compiled) >= MAX_COMPILED:
                self._compiled.popitem(last=False)

            def run(
                variables: dict[str, Array], inputs: list[Array], memory: Slots, start: Array, last: Array
            ) -> tuple[list[Array], Slots]:
                state = CacheState(memory, start, last)
                outputs, _ = self._program.run(inputs, variables, dimensions, state)
                return outputs, state.memory

            self._compiled[key] = jax.jit(run)
        self._compiled.move_to_end(key)
        return self._compiled[key]
