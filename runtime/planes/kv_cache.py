"""Keys and values of past positions: memory of each session, which grows with it, and the attention that reads it.

Positions of a session are 0 .. length - 1, each written once; cutting the cache back only forgets, so a stage can
run positions again. Memory is taken in blocks of positions, first set aside (`reserve`), then allocated when a run needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

BLOCK_POSITIONS = (
    64  # and an eighth of what a longer sequence has, so that growing costs little for each position
)
_HALF = frozenset({torch.bfloat16, torch.float16})
_KEY_BLOCK = 512  # keys that scaled_dot_product_attention takes at once on a CPU


@dataclass(frozen=True)
class SlotShape:
    """What one attention node keeps for each position."""

    heads: int  # of keys and values
    key_width: int
    value_width: int
    dtype: torch.dtype

    def bytes(self, capacity: int) -> int:
        return self.heads * (self.key_width + self.value_width) * capacity * self.dtype.itemsize


class SessionCache:
    """The cache of one session, of at most `capacity` positions: a pair of (1, heads, room, width) tensors for each slot."""

    def __init__(self, slots: Mapping[int, SlotShape], capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.length = 0  # positions held
        self._slots = slots
        self._device = device
        self._position_bytes = sum(shape.bytes(1) for shape in slots.values())
        self._reserved = 0  # positions that memory is set aside for
        self._room = 0  # positions that it is allocated for
        self._memory = {
            slot: (self._empty(shape.heads, 0, shape.key_width, shape.dtype),
                   self._empty(shape.heads, 0, shape.value_width, shape.dtype))
            for slot, shape in slots.items()
        }  # fmt: skip
        self._start = 0
        self._end = 0
        self._singly = False
        self._masks: dict[int | None, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Set aside."""
        return self._reserved * self._position_bytes

    def reserve(self, positions: int) -> None:
        """Set memory aside for so many positions, rounded up to blocks; what is allocated already stays."""
        step = max(BLOCK_POSITIONS, 1 << max(0, positions.bit_length() - 4))
        blocks = -(-positions // step) * step
        self._reserved = max(self._room, min(self.capacity, blocks))

    def _empty(self, heads: int, positions: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, heads, positions, width, dtype=dtype, device=self._device)

    def _grow(self) -> None:
        """Allocate what is set aside, a slot after the other, so that little is there twice."""
        for slot, pair in self._memory.items():
            wider = []
            for old in pair:
                new = self._empty(old.shape[1], self._reserved, old.shape[3], old.dtype)
                new[:, :, : self.length] = old[:, :, : self.length]
                wider.append(new)
            self._memory[slot] = (wider[0], wider[1])
        self._room = self._reserved

    def begin(self, start: int, count: int, *, singly: bool = False) -> None:
        """Positions [start, start + count) run next; what was held from `start` on is forgotten. `singly`: with the bits that
        each would have in a run of its own. ValueError where that leaves a gap or passes the capacity."""
        if not 0 <= start <= self.length:
            raise ValueError(f"the cache holds {self.length} positions: it cannot go on at position {start}")
        if start + count > self.capacity:
            raise ValueError(f"the session has room for {self.capacity} positions, not {start + count}")
        self._start, self._end, self._singly = start, start + count, singly
        if self._end > self._reserved:
            self.reserve(self._end)
        if self._end > self._room:
            self._grow()
        self.length = start  # until the run has written what follows
        self._masks.clear()

    def commit(self) -> None:
        self.length = self._end

    def cut(self, positions: int) -> int:
        """Forget what is held beyond so many positions, and what is set aside and holds nothing; how many are held."""
        self.length = min(self.length, positions)
        self.reserve(0)
        return self.length

    def copy(self, other: SessionCache, positions: int) -> int:
        """Hold the first so many positions of `other`, which has the same slots, as far as it holds them; how many."""
        self.begin(0, min(positions, other.length))
        for slot, pair in self._memory.items():
            for mine, theirs in zip(pair, other._memory[slot], strict=True):
                mine[:, :, : self._end] = theirs[:, :, : self._end]
        self.commit()
        return self.length

    def attend(
        self,
        query: torch.Tensor,  # (1, heads, count, width)
        key: torch.Tensor,  # (1, key heads, count, width)
        value: torch.Tensor,
        slot: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store the new keys and values, and attend causally to all that are held, or to the last `window`."""
        keys, values = self._memory[slot]
        start, end = self._start, self._end
        keys[:, :, start:end] = key
        values[:, :, start:end] = value
        if not self._singly:
            return self._look(query, keys, values, start, end, scale, window)
        rows = zip(range(start, end), torch.split(query, 1, 2), strict=True)
        return torch.cat([self._look(row, keys, values, at, at + 1, scale, window) for at, row in rows], 2)

    def _look(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
        end: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """What the queries of positions [start, end) see."""
        count = end - start
        # Positions that no query of this run can see need not be read.
        first = 0 if window is None else max(0, start + 1 - window)
        if count > 1 and query.dtype in _HALF:
            # The library sums keys block by block, and rounds: a prompt in chunks is to have the bits of a whole one.
            first -= first % _KEY_BLOCK
        plain = start == 0 and (window is None or end <= window)
        mask = None if count == 1 or plain else self._mask(first, window, query.device)
        return functional.scaled_dot_product_attention(
            query,
            keys[:, :, first:end],
            values[:, :, first:end],
            attn_mask=mask,
            is_causal=plain and count > 1,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )

    def _mask(self, first: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(count, end - first) booleans, True where a query may look; one for all the slots of a run."""
        found = self._masks.get(window)
        if found is None:
            queries = torch.arange(self._start, self._end, device=device)[:, None]
            positions = torch.arange(first, self._end, device=device)[None, :]
            found = positions <= queries
            if window is not None:
                found &= positions > queries - window
            self._masks[window] = found
        return found


class Attends(Protocol):
    """One sequence, or several of a run (`fusion.runtime.planes.sequences`)."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slot: int,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor: ...


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot: int,
    scale: float | None,
    window: int | None,
    state: Attends,
) -> torch.Tensor:
    """`fusion.cached_attention`."""
    return state.attend(query, key, value, slot, scale, window)
