"""A stage of a served model in JAX: pieces of sessions one after the other, each with keys and values of its own.

Where the graph treats positions one by one (`fusion.dag.rewrites.end_to_end`), a piece is run with as many rows as the next power
of two, so that few programs are compiled; the last position stands in for those that are missing. Others are run as long as they are.
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
from fusion.runtime.planes.jax_plane.jax_cache import Attending, SessionArrays, Slots, rows_of
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

MOST_COMPILED = 64  # combinations of rows and memory whose code is kept
_CPU = torch.device("cpu")


class JaxDecodingStage(Sessions[SessionArrays]):
    """A stage being served. A stage without attention to a cache keeps nothing between runs."""

    batched = False
    compiles = True
    chunk_invariant = True  # of 36 prompts in bfloat16, cut in three ways, none had other logits (CPU)

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
        """ValueError for an unknown session, one that comes twice, a gap before `start`, positions beyond the capacity, or
        positions `singly`."""
        caches = [self._cache(piece.session) for piece in pieces]
        if len(set(map(id, caches))) < len(caches):
            raise ValueError("a session runs one piece at a time")
        found = []
        for piece, cache in zip(pieces, caches, strict=True):
            found.append(self._run(piece, cache))
            rest()  # others need not wait for the end of all pieces
        for (_, memory, end), cache in zip(found, caches, strict=True):
            if self._slots:
                cache.commit(memory, end)
        return [outputs for outputs, _, _ in found]

    def _run(self, piece: Piece, cache: SessionArrays) -> tuple[dict[str, torch.Tensor], Slots, int]:
        """What the piece gives, and what the session holds once it counts."""
        if piece.singly or piece.start < 0:
            raise ValueError("this stage runs positions of a sequence alone, and not singly")
        given = ordered_inputs(self._program.inputs, piece.inputs, _CPU)
        count = 1
        if self._layout is not None:
            along = [self._layout.inputs[name] for name in self._program.inputs]
            count = count_positions(given, along, self._program.inputs)
            if not count:
                raise ValueError("a piece has at least one position")
            given = [
                concatenated([value], axis, each, rows_of(count) - count)
                for value, (axis, each) in zip(given, along, strict=True)
            ]
        elif self._slots:
            count = self._program.sizes.size(given, "sequence")
        dimensions = self._program.sizes.dimensions(given)
        if self._slots:
            cache.begin(piece.start, count)
        shapes = tuple(tuple(value.shape) for value in given)
        compiled = self._program_for((shapes, cache.room), dimensions)
        inputs = [array(value, self._device) for value in given]
        outputs, memory = compiled(self._variables, inputs, cache.memory, piece.start, count - 1)
        found = {key: tensor(value) for key, value in zip(self._keys, outputs, strict=True)}
        if self._layout is not None:
            for key, (axis, each), end in zip(
                self._keys, self._layout.outputs, self._layout.ends, strict=True
            ):
                if not end:
                    found[key] = found[key].narrow(axis, 0, count * each)
        return found, memory, piece.start + count

    def _program_for(self, key: Any, dimensions: Sequence[int]) -> Callable[..., tuple[list[Array], Slots]]:
        if key not in self._compiled:
            if len(self._compiled) >= MOST_COMPILED:
                self._compiled.popitem(last=False)

            def run(
                variables: dict[str, Array], inputs: list[Array], memory: Slots, start: Array, last: Array
            ) -> tuple[list[Array], Slots]:
                state = Attending(memory, start, last)
                outputs, _ = self._program.run(inputs, variables, dimensions, state)
                return outputs, state.memory

            self._compiled[key] = jax.jit(run)
        self._compiled.move_to_end(key)
        return self._compiled[key]
