"""The KV cache of a session: keys and values of past positions, and states of recurrences and convolutions.

A session has positions 0 .. length - 1. A cut forgets the last ones, so a stage can run positions again. Memory is reserved in blocks of
positions (`reserve`), and allocated when a run needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from fusion.runtime.planes.attention import (
    ScoreMods,
    all_attention,
    max_score_rows,
    score_mod_attention,
    selected_attention,
    single_attention,
    supports_single,
    top_keys,
)
from fusion.runtime.planes.products.half import HALF
from fusion.runtime.planes.recurrence import initial_state, scan

# A longer sequence grows by an eighth, so that growing has a constant amortised cost.
BLOCK_POSITIONS = 64
MAX_CACHED_SLOPES = 4  # layers of a model mostly have the same ones
_SDPA_KEY_BLOCK = 512  # key block of scaled_dot_product_attention on a CPU


@dataclass(frozen=True)
class CacheShape:
    """The shape of one position of a cached tensor (keys, values or bias) of an attention node."""

    heads: int
    width: int
    dtype: torch.dtype

    def bytes(self, capacity: int) -> int:
        return self.heads * self.width * capacity * self.dtype.itemsize


@dataclass(eq=False)
class SourceCache:
    """Keys and values of a session's source of `length` positions, by slot; empty until its encoder has run."""

    length: int
    bytes: int  # reserved
    keys_and_values: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class SessionCache:
    """The cache of one session of at most `capacity` positions: for each slot tensors (1, heads, allocated positions, width) of keys,
    values and perhaps a bias. `source`: cached keys and values of an encoder's output, which do not grow."""

    def __init__(
        self,
        slots: Mapping[int, Sequence[CacheShape]],
        capacity: int,
        device: torch.device,
        source: SourceCache | None = None,
        state_bytes: int = 0,
    ) -> None:
        self.capacity = capacity
        self.source = source
        self._state_bytes = state_bytes  # of recurrences: two states each, reserved from the start
        self.length = 0  # positions in the cache
        self._device = device
        self._position_bytes = sum(shape.bytes(1) for shapes in slots.values() for shape in shapes)
        self._reserved = 0  # positions
        self._allocated = 0  # positions
        self._memory = {
            slot: tuple(self._empty(shape.heads, 0, shape.width, shape.dtype) for shape in shapes)
            for slot, shapes in slots.items()
        }
        self._addresses: torch.Tensor | None = None
        self._start = 0
        self._end = 0
        self._singly = False
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}  # by first key and window
        self._slopes: dict[tuple[Sequence[float], int, int, torch.dtype], torch.Tensor] = {}
        # By slot of a recurrence: (position, state before it), ascending. `_memory` has the inputs to recompute other states.
        self._states: dict[int, list[tuple[int, torch.Tensor]]] = {}

    @property
    def bytes(self) -> int:
        """Reserved bytes."""
        source = 0 if self.source is None else self.source.bytes
        return self._reserved * self._position_bytes + self._state_bytes + source

    def reserve(self, positions: int) -> None:
        """Reserve memory for `positions`, rounded up to blocks; allocated memory stays."""
        step = max(BLOCK_POSITIONS, 1 << max(0, positions.bit_length() - 4))
        blocks = -(-positions // step) * step
        self._reserved = max(self._allocated, min(self.capacity, blocks))

    def _empty(self, heads: int, positions: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, heads, positions, width, dtype=dtype, device=self._device)

    @property
    def addresses(self) -> torch.Tensor:
        """(slots, 3) int64 for slots of keys and values only: their two addresses, and the positions allocated."""
        if self._addresses is None:
            rows = [
                (key.data_ptr(), value.data_ptr(), self._allocated) for key, value in self._memory.values()
            ]
            self._addresses = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        return self._addresses

    def _grow(self) -> None:
        """Allocate the reserved memory, one slot after another, so that little exists twice."""
        self._addresses = None
        for slot, tensors in self._memory.items():
            grown = []
            for old in tensors:
                new = self._empty(old.shape[1], self._reserved, old.shape[3], old.dtype)
                new[:, :, : self.length] = old[:, :, : self.length]
                grown.append(new)
            self._memory[slot] = tuple(grown)
        self._allocated = self._reserved

    def begin(self, start: int, count: int, *, singly: bool = False) -> None:
        """Begin a run of positions [start, start + count); cached positions from `start` on are forgotten. `singly`: each position has the
        bits of a run by itself. ValueError where that leaves a gap or exceeds the capacity."""
        if not 0 <= start <= self.length:
            raise ValueError(f"the cache holds {self.length} positions: it cannot go on at position {start}")
        if start + count > self.capacity:
            raise ValueError(f"the session has room for {self.capacity} positions, not {start + count}")
        self._start, self._end, self._singly = start, start + count, singly
        if self._end > self._reserved:
            self.reserve(self._end)
        if self._end > self._allocated:
            self._grow()
        self.length = start  # until the run is committed
        self._masks.clear()
        self._slopes.clear()
        self._cut_states(start)

    def _cut_states(self, positions: int) -> None:
        """Forget the states after `positions`."""
        for slot, states in self._states.items():
            self._states[slot] = [(position, state) for position, state in states if position <= positions]

    @property
    def run_positions(self) -> range:
        """The positions of this run."""
        return range(self._start, self._end)

    @property
    def runs_singly(self) -> bool:
        """Whether each position of this run must have the bits of a run by itself."""
        return self._singly or self._end - self._start == 1

    def memory(self, slot: int) -> Sequence[torch.Tensor]:
        """The cached tensors of a slot, (1, heads, allocated positions, width) each."""
        return self._memory[slot]

    def commit(self) -> None:
        self.length = self._end

    def cut(self, positions: int) -> int:
        """Forget positions beyond `positions`, and reserved memory that is not allocated. Returns the positions left."""
        self.length = min(self.length, positions)
        self.reserve(0)
        self._cut_states(self.length)
        return self.length

    def copy(self, other: SessionCache, positions: int) -> int:
        """Copy the first `positions` of `other`, which has the same slots. Returns how many there were."""
        self.begin(0, min(positions, other.length))
        for slot, tensors in self._memory.items():
            for own, source in zip(tensors, other._memory[slot], strict=True):
                own[:, :, : self._end] = source[:, :, : self._end]
        # States are immutable
        self._states = {slot: list(states) for slot, states in other._states.items()}
        self._cut_states(self._end)
        self.commit()
        return self.length

    def attend(
        self,
        query: torch.Tensor,  # (1, heads, count, width)
        new: Sequence[torch.Tensor],  # for the tensors of the slot: each (1, its heads, count, its width)
        slot: int,
        scale: float | None,
        window: int | None,
        score_mods: ScoreMods | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values, and attend causally to all cached positions, or to the last `window`."""
        cached = self._memory[slot]
        start, end = self._start, self._end
        if self.runs_singly and supports_single(query, cached, score_mods):
            return single_attention(
                query, new, [cached] * (end - start), self.run_positions, scale, window, score_mods
            )
        for memory, values in zip(cached, new, strict=True):
            memory[:, :, start:end] = values
        if not self._singly:
            return self._attend_cached(query, cached, start, end, scale, window, score_mods)
        rows = zip(range(start, end), torch.split(query, 1, 2), strict=True)
        return torch.cat(
            [self._attend_cached(row, cached, at, at + 1, scale, window, score_mods) for at, row in rows], 2
        )

    def select(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        weights: torch.Tensor,
        slot: int,
        scale: float,
        most: int,
    ) -> torch.Tensor:
        """Store the new keys (1, 1, count, width), and return the positions that the queries select, as in `top_keys`."""
        (cached,) = self._memory[slot]
        cached[:, :, self._start : self._end] = key
        selected = []
        for start, end in self._runs():
            run = slice(start - self._start, end - self._start)
            selected.append(
                top_keys(query[:, :, run], cached[:, :, :end], weights[:, :, run], scale, most, start)
            )
        return torch.cat(selected, 2)

    def attend_selected(
        self,
        query: torch.Tensor,  # (1, heads, count, width)
        new: Sequence[torch.Tensor],  # keys and values
        selected: torch.Tensor,  # (1, 1, count, most)
        slot: int,
        scale: float | None,
    ) -> torch.Tensor:
        """Store the new keys and values, and attend to the selected positions."""
        cached = self._memory[slot]
        for memory, values in zip(cached, new, strict=True):
            memory[:, :, self._start : self._end] = values
        outputs = []
        for start, end in self._runs():
            run = slice(start - self._start, end - self._start)
            keys, values = (memory[:, :, :end] for memory in cached)
            outputs.append(
                selected_attention(query[:, :, run], keys, values, selected[:, :, run], scale, start)
            )
        return torch.cat(outputs, 2)

    def _runs(self) -> list[tuple[int, int]]:
        """The runs to compute: one for each position, or one for all."""
        return (
            [(position, position + 1) for position in self.run_positions]
            if self._singly
            else [(self._start, self._end)]
        )

    def attend_source(
        self, query: torch.Tensor, slot: int, scale: float | None, score_mods: ScoreMods | None = None
    ) -> torch.Tensor:
        """Attend to all of the source; `query` is (1, heads, count, width)."""
        if self.source is None or slot not in self.source.keys_and_values:
            raise ValueError("the session's source has not been run")
        key, value = self.source.keys_and_values[slot]
        rows = torch.split(query, 1, 2) if self._singly else (query,)
        return torch.cat([all_attention(each, key, value, scale, score_mods) for each in rows], 2)

    def convolve(
        self,
        rows: torch.Tensor,  # (1, 1, count, channels)
        weight: torch.Tensor,  # (channels, 1, window)
        bias: torch.Tensor | None,
        slot: int,
    ) -> torch.Tensor:
        """Store the new rows, and sum each channel over the last `window` positions, with zeros before the first (causal convolution)."""
        (cached,) = self._memory[slot]
        start, end = self._start, self._end
        cached[:, :, start:end] = rows
        first = start + 1 - weight.shape[2]
        inputs = functional.pad(cached[:, :, max(0, first) : end].float(), (0, 0, max(0, -first), 0))
        # One product after another: the reduction order of a kernel may depend on the number of positions.
        total = torch.zeros_like(rows, dtype=torch.float32)
        for offset, weights in enumerate(weight[:, 0].float().unbind(1)):
            total = total + inputs[:, :, offset : offset + end - start] * weights
        if bias is not None:
            total = total + bias
        return total.to(rows.dtype)

    def recur(
        self,
        query: torch.Tensor,  # (1, key heads, count, width)
        new: Sequence[torch.Tensor],  # key, value, decay and perhaps beta, as in `fusion.recurrence`
        rates: torch.Tensor | None,
        slot: int,
    ) -> torch.Tensor:
        """Store the new inputs, and continue from the state before `start`. Where that was forgotten, it is recomputed from the last state
        before it."""
        cached = self._memory[slot]
        start, end = self._start, self._end
        for memory, values in zip(cached, new, strict=True):
            memory[:, :, start:end] = values
        states = self._states.get(slot, ())
        position, state = states[-1] if states else (0, initial_state(new))
        if position < start:
            _, state = scan(None, [memory[:, :, position:start] for memory in cached], rates, state)
        output, end_state = scan(query, new, rates, state)
        # The state before the run too: speculative positions are often rolled back.
        self._states[slot] = [(start, state), (end, end_state)]
        return output

    def _attend_cached(
        self,
        query: torch.Tensor,
        cached: Sequence[torch.Tensor],
        start: int,
        end: int,
        scale: float | None,
        window: int | None,
        score_mods: ScoreMods | None,
    ) -> torch.Tensor:
        """The attention of queries [start, end) to the cached positions."""
        count = end - start
        # Positions before the window of every query are not read.
        first = 0 if window is None else max(0, start + 1 - window)
        if score_mods is None and count > 1 and query.dtype in HALF:
            # The library reduces keys block by block: aligned, a prompt in chunks has the bits of a whole one.
            first -= first % _SDPA_KEY_BLOCK
        keys, values, *bias = (tensor[:, :, first:end] for tensor in cached)
        if score_mods is not None:
            mask = None if count == 1 else self._mask(first, window, query.device)
            return self._attend_with_mods(
                query,
                keys,
                values,
                *bias,
                scale=1.0 if scale is None else scale,
                mask=mask,
                score_mods=score_mods,
                first=first,
                query_offset=start - first,
            )
        causal = start == 0 and (window is None or end <= window)
        mask = None if count == 1 or causal else self._mask(first, window, query.device)
        return functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal and count > 1,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )

    def _attend_with_mods(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_bias: torch.Tensor | None = None,  # the bias of each key, (1, heads or 1, length, 1)
        *,
        scale: float,
        mask: torch.Tensor | None,
        score_mods: ScoreMods,
        first: int,
        query_offset: int,
    ) -> torch.Tensor:
        """Attention with score modifications to keys from position `first` on; the queries start `query_offset` positions later. Computes
        as many heads at a time as `max_score_rows` allows for one position."""
        heads, length = query.shape[1], keys.shape[2]
        group_heads, max_heads = heads // keys.shape[1], max_score_rows(length)
        if heads > max_heads:
            parts = []
            for group_start in range(0, heads, group_heads):  # of heads that share keys
                for start in range(group_start, group_start + group_heads, max_heads):
                    query_heads = slice(start, min(start + max_heads, group_start + group_heads))
                    key_head = slice(group_start // group_heads, group_start // group_heads + 1)
                    bias = (
                        key_bias if key_bias is None or key_bias.shape[1] == 1 else key_bias[:, query_heads]
                    )
                    part = self._attend_with_mods(
                        query[:, query_heads],
                        keys[:, key_head],
                        values[:, key_head],
                        bias,
                        scale=scale,
                        mask=mask,
                        score_mods=score_mods.for_heads(query_heads),
                        first=first,
                        query_offset=query_offset,
                    )
                    parts.append(part)
            return torch.cat(parts, 1)
        bias = None if key_bias is None else key_bias.transpose(2, 3)
        if score_mods.slopes is not None:
            slope_bias = self._slope_bias(score_mods.slopes, first, first + length, query)
            bias = slope_bias if bias is None else bias + slope_bias
        return score_mod_attention(query, keys, values, scale, mask, bias, score_mods, query_offset)

    def _slope_bias(self, slopes: Sequence[float], first: int, end: int, query: torch.Tensor) -> torch.Tensor:
        """(1, heads, 1, end - first): slope * (key position - last position). ALiBi counts from the query's own position; the difference is
        constant in a row, so the softmax is the same. This is the same for all rows, and exact near the end."""
        bias = self._slopes.get((slopes, first, end, query.dtype))
        if bias is None:
            slope_tensor = torch.tensor(slopes, dtype=torch.float32, device=query.device)
            distance = torch.arange(first + 1 - end, 1, dtype=torch.float32, device=query.device)
            bias = (slope_tensor[:, None] * distance)[None, :, None].to(query.dtype)
            if len(self._slopes) == MAX_CACHED_SLOPES:
                self._slopes.clear()
            self._slopes[slopes, first, end, query.dtype] = bias
        return bias

    def _mask(self, first: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(count, end - first) booleans, True where a query sees a key; shared by all slots with the same first key."""
        mask = self._masks.get((first, window))
        if mask is None:
            queries = torch.arange(self._start, self._end, device=device)[:, None]
            positions = torch.arange(first, self._end, device=device)[None, :]
            mask = positions <= queries
            if window is not None:
                mask &= positions > queries - window
            self._masks[first, window] = mask
        return mask
