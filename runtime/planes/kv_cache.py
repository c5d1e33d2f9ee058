"""Keys and values of past positions: preallocated memory for each session, and the attention that reads it.

Positions of a session are 0 .. length - 1, each written once; cutting the cache back only forgets, so a stage can
run positions again. Memory is reserved when a session opens, never while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional


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
    """The cache of one session: a pair of (1, heads, capacity, width) tensors for each slot."""

    def __init__(self, slots: Mapping[int, SlotShape], capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.length = 0  # positions held
        self.bytes = sum(shape.bytes(capacity) for shape in slots.values())
        self._memory = {
            slot: (
                torch.zeros(1, s.heads, capacity, s.key_width, dtype=s.dtype, device=device),
                torch.zeros(1, s.heads, capacity, s.value_width, dtype=s.dtype, device=device),
            )
            for slot, s in slots.items()
        }
        self._start = 0
        self._end = 0
        self._masks: dict[int | None, torch.Tensor] = {}

    def begin(self, start: int, count: int) -> None:
        """Positions [start, start + count) run next; what was held from `start` on is forgotten. ValueError where
        that leaves a gap or passes the capacity."""
        if not 0 <= start <= self.length:
            raise ValueError(f"the cache holds {self.length} positions: it cannot go on at position {start}")
        if start + count > self.capacity:
            raise ValueError(f"the session has room for {self.capacity} positions, not {start + count}")
        self._start, self._end = start, start + count
        self.length = start  # until the run has written what follows
        self._masks.clear()

    def commit(self) -> None:
        self.length = self._end

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
        count = end - start
        keys[:, :, start:end] = key
        values[:, :, start:end] = value
        # Positions that no query of this run can see need not be read.
        first = 0 if window is None else max(0, start + 1 - window)
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
