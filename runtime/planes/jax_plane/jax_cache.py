"""The KV cache of a session in JAX: arrays of keys and values of each attention, which no run changes. A run takes them, with more rows
than positions where it is padded, and returns their replacements.

Rows and memory have few sizes, as each combination of them is compiled once. Allocated positions beyond the length have undefined
values; no query sees them before they are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax

from fusion.dag.ir.graph import Node
from fusion.runtime.planes.jax_plane.contracting import attention_weights, grouped, plain_scores
from fusion.runtime.planes.jax_plane.program import Arguments
from fusion.runtime.planes.kv_cache import BLOCK_POSITIONS, CacheShape

Slots = Mapping[int, tuple[Array, ...]]  # (1, heads, allocated positions, width) each


def row_count(positions: int) -> int:
    """Rows to run for `positions`: the next power of two."""
    return 1 << max(0, positions - 1).bit_length()


def capacity_for(positions: int) -> int:
    """Positions to allocate for `positions`: a power of two or three quarters of one, at least BLOCK_POSITIONS; 0 for none."""
    if positions <= 0:
        return 0
    capacity = max(BLOCK_POSITIONS, 1 << (positions - 1).bit_length())
    return capacity * 3 // 4 if capacity > BLOCK_POSITIONS and positions <= capacity * 3 // 4 else capacity


@dataclass(eq=False)
class SessionArrays:
    """The cache of one session of at most `capacity` positions."""

    shapes: Mapping[int, Sequence[CacheShape]]
    capacity: int
    device: jax.Device
    length: int = 0  # positions in the cache
    reserved: int = 0  # positions
    memory: Slots = field(default_factory=dict)

    @property
    def allocated(self) -> int:
        """Positions that memory is allocated for."""
        return next((tensors[0].shape[2] for tensors in self.memory.values()), 0)

    @property
    def bytes(self) -> int:
        """Reserved bytes."""
        position_bytes = sum(shape.bytes(1) for shapes in self.shapes.values() for shape in shapes)
        return position_bytes * max(self.reserved, self.allocated)

    def reserve(self, positions: int) -> None:
        self.reserved = capacity_for(positions)

    def begin(self, start: int, count: int) -> None:
        """Begin a run of positions [start, start + count); cached positions from `start` on are forgotten. ValueError where that leaves a
        gap or exceeds the capacity."""
        if not 0 <= start <= self.length:
            raise ValueError(f"the cache holds {self.length} positions: it cannot go on at position {start}")
        if start + count > self.capacity:
            raise ValueError(f"the session has room for {self.capacity} positions, not {start + count}")
        self.reserved = max(self.reserved, capacity_for(start + count))
        if self.reserved > self.allocated:
            self._grow()
        self.length = start  # until the run is committed

    def _grow(self) -> None:
        if not self.memory:
            self.memory = {
                slot: tuple(
                    jnp.zeros((1, s.heads, self.reserved, s.width), jax_dtype(s), device=self.device)
                    for s in shapes
                )
                for slot, shapes in self.shapes.items()
            }
            return
        padding = [(0, 0), (0, 0), (0, self.reserved - self.allocated), (0, 0)]
        self.memory = {
            slot: tuple(jnp.pad(each, padding) for each in tensors) for slot, tensors in self.memory.items()
        }

    def commit(self, memory: Slots, end: int) -> None:
        self.memory, self.length = memory, end

    def cut(self, positions: int) -> int:
        """Forget positions beyond `positions`, and reserved memory that is not allocated. Returns the positions left."""
        self.length = min(self.length, positions)
        self.reserved = 0
        return self.length

    def copy(self, other: SessionArrays, positions: int) -> int:
        """Take the first `positions` of `other`. Returns how many there were. The arrays are shared until a run replaces them."""
        self.memory = other.memory
        self.length = min(positions, other.length, self.capacity)
        return self.length


def jax_dtype(shape: CacheShape) -> jnp.dtype:
    return jnp.dtype(str(shape.dtype).removeprefix("torch."))


class CacheState:
    """The state of one run, whose rows are the positions from `start` on; `last` is the row of the last position. `memory` becomes the new
    cache of the session."""

    def __init__(self, memory: Slots, start: Array, last: Array) -> None:
        self.memory = dict(memory)
        self._start = start
        self._last = last

    def last(self, values: Array, axis: int) -> Array:
        return lax.dynamic_slice_in_dim(values, self._last, 1, axis % values.ndim)

    def run(self, node: Node, args: Arguments) -> Array:
        if node.op == "fusion.cached_attention":
            query, key, value, slot, scale, window = args
            cached = self._store(slot, (key, value))
            scores = plain_scores(query, grouped(cached[0], query.shape[1]), scale)
            return self._attend(scores, cached[1], window)
        if node.op == "fusion.cached_attention_selected":
            query, key, value, selected, slot, scale = args
            cached = self._store(slot, (key, value))
            scores = plain_scores(query, grouped(cached[0], query.shape[1]), scale)
            return self._attend(scores, cached[1], None, selected_positions=selected[0, 0])
        query, key, value, bias, sinks, slot, scale, window, softcap, slopes = args
        cached = self._store(slot, (key, value) if bias is None else (key, value, bias))
        # (1, heads, rows, allocated); each step in the dtype of the scores, as models write it.
        scores = query @ jnp.swapaxes(grouped(cached[0], query.shape[1]), -1, -2) * scale
        if softcap is not None:
            scores = jnp.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + jnp.swapaxes(cached[2], 2, 3)
        if slopes is not None:
            distance = jnp.arange(scores.shape[-1]) - self._row_positions(scores)[:, None]
            scores = scores + (jnp.asarray(slopes, jnp.float32)[:, None, None] * distance).astype(
                scores.dtype
            )
        return self._attend(scores, cached[1], window, sinks)

    def _store(self, slot: int, new: Sequence[Array]) -> tuple[Array, ...]:
        self.memory[slot] = tuple(
            self._store_rows(cached, values.astype(cached.dtype))
            for cached, values in zip(self.memory[slot], new, strict=True)
        )
        return self.memory[slot]

    def _store_rows(self, cached: Array, values: Array) -> Array:
        rows = values.shape[2]
        if rows == 1:
            return lax.dynamic_update_slice_in_dim(cached, values, self._start, 2)
        # Padding rows beyond the memory are dropped; the others are undefined until they are written again.
        return cached.at[:, :, self._start + jnp.arange(rows)].set(values, mode="drop", unique_indices=True)

    def _row_positions(self, scores: Array) -> Array:
        """The positions of the rows."""
        return self._start + jnp.arange(scores.shape[-2])

    def _attend(
        self,
        scores: Array,
        values: Array,
        window: int | None,
        sinks: Array | None = None,
        selected_positions: Array | None = None,
    ) -> Array:
        queries, keys = self._row_positions(scores)[:, None], jnp.arange(scores.shape[-1])[None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        if selected_positions is not None:
            visible = _selected(visible, selected_positions)
        scores = jnp.where(visible, scores, -jnp.inf)
        length = scores.shape[-1]
        if sinks is not None:
            sink_scores = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sink_scores.astype(scores.dtype)], -1)
        weights = attention_weights(scores)[..., :length].astype(values.dtype)
        return weights @ grouped(values, scores.shape[1])


def _selected(visible: Array, selected_positions: Array) -> Array:
    """Visible keys (rows, allocated) that are among the selected positions (rows, count) of the row; numbers out of range select nothing.
    Padding rows may select none: they attend to all visible keys, as NaN in a cache would spread."""
    rows, length = jnp.arange(selected_positions.shape[0])[:, None], visible.shape[1]
    chosen = (
        jnp.zeros_like(visible)
        .at[rows, jnp.where(selected_positions < 0, length, selected_positions)]
        .set(True, mode="drop")
    )
    chosen &= visible
    return jnp.where(chosen.any(1, keepdims=True), chosen, visible)
