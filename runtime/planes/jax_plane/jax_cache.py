"""What a session of a served stage keeps of its positions, in JAX: the keys and values of each attention, in arrays that no run
changes. A run is given them, perhaps with more rows than it has positions, and gives back those that take their place.

Rows and memory come in few sizes, as each combination of them is compiled once. Positions beyond those that a session holds are
there and have no meaning: no query sees them before they are written.
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

Slots = Mapping[int, tuple[Array, ...]]  # (1, heads, room, width) each


def rows_of(positions: int) -> int:
    """How many rows are run for so many positions: a power of two."""
    return 1 << max(0, positions - 1).bit_length()


def room_for(positions: int) -> int:
    """Positions that memory is taken for: a power of two or half as much again, of BLOCK_POSITIONS at least; 0 for none."""
    if positions <= 0:
        return 0
    most = max(BLOCK_POSITIONS, 1 << (positions - 1).bit_length())
    return most * 3 // 4 if most > BLOCK_POSITIONS and positions <= most * 3 // 4 else most


@dataclass(eq=False)
class SessionArrays:
    """Of one session, of at most `capacity` positions."""

    shapes: Mapping[int, Sequence[CacheShape]]
    capacity: int
    device: jax.Device
    length: int = 0  # positions held
    reserved: int = 0  # positions that memory is set aside for
    memory: Slots = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Positions that memory is allocated for."""
        return next((tensors[0].shape[2] for tensors in self.memory.values()), 0)

    @property
    def bytes(self) -> int:
        """Set aside."""
        each = sum(shape.bytes(1) for shapes in self.shapes.values() for shape in shapes)
        return each * max(self.reserved, self.room)

    def reserve(self, positions: int) -> None:
        self.reserved = room_for(positions)

    def begin(self, start: int, count: int) -> None:
        """Positions [start, start + count) run next; what was held from `start` on is forgotten. ValueError where that leaves a gap
        or passes the capacity."""
        if not 0 <= start <= self.length:
            raise ValueError(f"the cache holds {self.length} positions: it cannot go on at position {start}")
        if start + count > self.capacity:
            raise ValueError(f"the session has room for {self.capacity} positions, not {start + count}")
        self.reserved = max(self.reserved, room_for(start + count))
        if self.reserved > self.room:
            self._grow()
        self.length = start  # until the run has written what follows

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
        more = [(0, 0), (0, 0), (0, self.reserved - self.room), (0, 0)]
        self.memory = {
            slot: tuple(jnp.pad(each, more) for each in tensors) for slot, tensors in self.memory.items()
        }

    def commit(self, memory: Slots, end: int) -> None:
        self.memory, self.length = memory, end

    def cut(self, positions: int) -> int:
        """Forget what is held beyond so many positions, and what is set aside and holds nothing; how many are held."""
        self.length = min(self.length, positions)
        self.reserved = 0
        return self.length

    def copy(self, other: SessionArrays, positions: int) -> int:
        """Hold the first so many positions of `other`, as far as it holds them; how many. Arrays are shared until a run has
        given others in their place."""
        self.memory = other.memory
        self.length = min(positions, other.length, self.capacity)
        return self.length


def jax_dtype(shape: CacheShape) -> jnp.dtype:
    return jnp.dtype(str(shape.dtype).removeprefix("torch."))


class Attending:
    """The state of one run: rows that come to the positions from `start` on, `last` being the row of the last position. `memory`
    becomes what the session holds afterwards."""

    def __init__(self, memory: Slots, start: Array, last: Array) -> None:
        self.memory = dict(memory)
        self._start = start
        self._last = last

    def last(self, values: Array, axis: int) -> Array:
        return lax.dynamic_slice_in_dim(values, self._last, 1, axis % values.ndim)

    def run(self, node: Node, args: Arguments) -> Array:
        if node.op == "fusion.cached_attention":
            query, key, value, slot, scale, window = args
            held = self._written(slot, (key, value))
            scores = plain_scores(query, grouped(held[0], query.shape[1]), scale)
            return self._seen(scores, held[1], window)
        if node.op == "fusion.cached_attention_selected":
            query, key, value, selected, slot, scale = args
            held = self._written(slot, (key, value))
            scores = plain_scores(query, grouped(held[0], query.shape[1]), scale)
            return self._seen(scores, held[1], None, places=selected[0, 0])
        query, key, value, bias, sinks, slot, scale, window, softcap, slopes = args
        held = self._written(slot, (key, value) if bias is None else (key, value, bias))
        # (1, heads, rows, room), and each step in the dtype of the scores, as models write it out.
        scores = query @ jnp.swapaxes(grouped(held[0], query.shape[1]), -1, -2) * scale
        if softcap is not None:
            scores = jnp.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + jnp.swapaxes(held[2], 2, 3)
        if slopes is not None:
            far = jnp.arange(scores.shape[-1]) - self._positions(scores)[:, None]
            scores = scores + (jnp.asarray(slopes, jnp.float32)[:, None, None] * far).astype(scores.dtype)
        return self._seen(scores, held[1], window, sinks)

    def _written(self, slot: int, new: Sequence[Array]) -> tuple[Array, ...]:
        self.memory[slot] = tuple(
            self._set(held, values.astype(held.dtype))
            for held, values in zip(self.memory[slot], new, strict=True)
        )
        return self.memory[slot]

    def _set(self, held: Array, values: Array) -> Array:
        rows = values.shape[2]
        if rows == 1:
            return lax.dynamic_update_slice_in_dim(held, values, self._start, 2)
        # Of rows that only fill up, those beyond the memory are dropped; the others have no meaning until they are written anew.
        return held.at[:, :, self._start + jnp.arange(rows)].set(values, mode="drop", unique_indices=True)

    def _positions(self, scores: Array) -> Array:
        """Of the rows."""
        return self._start + jnp.arange(scores.shape[-2])

    def _seen(
        self,
        scores: Array,
        values: Array,
        window: int | None,
        sinks: Array | None = None,
        places: Array | None = None,
    ) -> Array:
        at, keys = self._positions(scores)[:, None], jnp.arange(scores.shape[-1])[None]
        visible = keys <= at
        if window is not None:
            visible &= keys > at - window
        if places is not None:
            visible = _selected(visible, places)
        scores = jnp.where(visible, scores, -jnp.inf)
        length = scores.shape[-1]
        if sinks is not None:
            more = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, more.astype(scores.dtype)], -1)
        weights = attention_weights(scores)[..., :length].astype(values.dtype)
        return weights @ grouped(values, scores.shape[1])


def _selected(visible: Array, places: Array) -> Array:
    """Of the keys that are visible (rows, room), those among the places (rows, count) of the row; other numbers are no place. Rows
    that only fill up may have none: they see all then, as what is not a number would reach others through what is kept of them."""
    rows, room = jnp.arange(places.shape[0])[:, None], visible.shape[1]
    shown = jnp.zeros_like(visible).at[rows, jnp.where(places < 0, room, places)].set(True, mode="drop")
    shown &= visible
    return jnp.where(shown.any(1, keepdims=True), shown, visible)
