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
from fusion.dag.rewrites.end_to_end import Along, end_to_end
from fusion.runtime.job.worker import rest
from fusion.runtime.planes.cache_shapes import slot_shapes
from fusion.runtime.planes.jax_plane.arrays import array, tensor
from fusion.runtime.planes.jax_plane.jax_cache import Attending, SessionArrays, Slots, rows_of
from fusion.runtime.planes.jax_plane.program import Program
from fusion.runtime.planes.plane import Piece, Tensors
from fusion.runtime.planes.stage_values import checked, output_keys, selected

MOST_COMPILED = 64  # combinations of rows and memory whose code is kept
_CPU = torch.device("cpu")


class JaxDecodingStage:
    """A stage being served. A stage without attention to a cache keeps nothing between runs."""

    together = False  # each piece is a run of its own

    def __init__(self, stage: Stage, variables: Tensors, device: jax.Device) -> None:
        self.stage = stage
        self._device = device
        if SOURCE in stage.graph.symbols:
            raise GraphError(
                f"the JAX plane does not run {SOURCE_ATTENTION}, nor what an encoder makes for it"
            )
        self._slots = slot_shapes(stage.graph)
        self.caches = bool(self._slots)
        self._layout = end_to_end(stage.graph) if self._slots else None
        last = frozenset[str]() if self._layout is None else self._layout.last
        self._program = Program(stage.graph, training=False, last=last)
        if self._slots and self._layout is None:
            self._program.sizes.require("sequence")
        self._variables = {v.name: array(checked(variables, v), device) for v in stage.graph.variables}
        self._keys = output_keys(stage)
        self._sessions: dict[str, SessionArrays] = {}
        self._retained: dict[int, SessionArrays] = {}
        self._compiled: OrderedDict[Any, Callable[..., tuple[list[Array], Slots]]] = OrderedDict()

    def open(self, session: str, capacity: int, source: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: at least 1 position, not {capacity}")
        self._sessions[session] = SessionArrays(self._slots, capacity, self._device)

    def reserve(self, session: str, positions: int) -> bool:
        cache = self._sessions.get(session)
        if cache is None:
            return False
        before = cache.bytes
        cache.reserve(positions)
        return cache.bytes != before

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

    def _cache(self, session: str) -> SessionArrays:
        cache = self._sessions.get(session)
        if cache is None:
            raise ValueError(f"session {session!r:.80} is not open")
        return cache

    def _run(self, piece: Piece, cache: SessionArrays) -> tuple[dict[str, torch.Tensor], Slots, int]:
        """What the piece gives, and what the session holds once it counts."""
        if piece.singly or piece.start < 0:
            raise ValueError("this stage runs positions of a sequence alone, and not singly")
        given = selected(self._program.inputs, piece.inputs, _CPU)
        count = 1
        if self._layout is not None:
            along = [self._layout.inputs[name] for name in self._program.inputs]
            count = self._positions(given, along)
            given = [
                _longer(value, axis, each, rows_of(count) - count)
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

    def _positions(self, given: Sequence[torch.Tensor], along: Sequence[Along]) -> int:
        """How many positions a piece has. ValueError where its values do not agree, or one has a part of a position."""
        found = set()
        for value, (axis, each), name in zip(given, along, self._program.inputs, strict=True):
            if value.dim() <= axis or value.shape[axis] % each or not value.shape[axis]:
                raise ValueError(f"input {name} has shape {tuple(value.shape)}: not {each} rows a position")
            found.add(value.shape[axis] // each)
        if len(found) > 1:
            raise ValueError(f"the inputs are of {min(found)} and of {max(found)} positions")
        return found.pop()

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

    def close(self, session: str) -> None:
        self._sessions.pop(session, None)

    def retain(self, session: str, name: int, positions: int) -> tuple[int, int]:
        cache = self._sessions.pop(session, None)
        if cache is None or not self._slots or not (held := cache.cut(positions)):
            return 0, 0
        self._retained[name] = cache
        return held, cache.bytes

    def resume(self, session: str, capacity: int, name: int, positions: int) -> int:
        self.open(session, capacity)
        cache = self._retained.pop(name, None)
        if cache is None:
            return 0
        cache.capacity = capacity
        self._sessions[session] = cache
        return cache.cut(min(positions, capacity))

    def copy(self, source: int | str, session: str, positions: int) -> int:
        other = self._sessions.get(source) if isinstance(source, str) else self._retained.get(source)
        return 0 if other is None else self._cache(session).copy(other, positions)

    def forget(self, name: int) -> None:
        self._retained.pop(name, None)

    def clear(self) -> None:
        self._sessions.clear()
        self._retained.clear()

    def used_bytes(self) -> int:
        return sum(cache.bytes for cache in self._sessions.values()) + self.retained_bytes()

    def retained_bytes(self) -> int:
        return sum(cache.bytes for cache in self._retained.values())


def _longer(value: torch.Tensor, axis: int, each: int, padding: int) -> torch.Tensor:
    """The last position, of `each` rows, again as often as positions are missing."""
    if not padding:
        return value
    last = value.narrow(axis, value.shape[axis] - each, each)
    return torch.cat([value, *[last] * padding], axis)
