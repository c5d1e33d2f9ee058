"""What a session keeps of past positions, keys and values above all: memory that grows with it.

Positions of a session are 0 .. length - 1, each written once; cutting the cache back only forgets, so a stage can
run positions again. Memory is taken in blocks of positions, first set aside (`reserve`), then allocated when a run needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from fusion.runtime.planes.attention import (
    Scored,
    all_attention,
    best_keys,
    most_scored,
    scored_attention,
    selected_attention,
    single_attention,
    supports_single,
)
from fusion.runtime.planes.input_sizes import HALF
from fusion.runtime.planes.recurrence import first_state, read

# Or an eighth of what a longer sequence has, so that growing costs little for each position.
BLOCK_POSITIONS = 64
KEPT_SLOPES = 4  # for the layers of a run, which have the same ones mostly
_KEY_BLOCK = 512  # keys that scaled_dot_product_attention takes at once on a CPU


@dataclass(frozen=True)
class KeptShape:
    """What one tensor of an attention node (its keys, its values, its bias) is for each position."""

    heads: int
    width: int
    dtype: torch.dtype

    def bytes(self, capacity: int) -> int:
        return self.heads * self.width * capacity * self.dtype.itemsize


@dataclass(eq=False)
class KeptSource:
    """Keys and values of a session's source, of `length` positions, by slot, once its encoder has run."""

    length: int
    bytes: int  # set aside for them
    kept: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class SessionCache:
    """The cache of one session, of at most `capacity` positions: tensors (1, heads, room, width) for each slot, of keys, of
    values and perhaps of a bias. `source`: what it keeps of what it was given to read, which does not grow."""

    def __init__(
        self,
        slots: Mapping[int, Sequence[KeptShape]],
        capacity: int,
        device: torch.device,
        source: KeptSource | None = None,
        state_bytes: int = 0,
    ) -> None:
        self.capacity = capacity
        self.source = source
        self._state_bytes = state_bytes  # of recurrences: two states each, set aside from the first on
        self.length = 0  # positions held
        self._device = device
        self._position_bytes = sum(shape.bytes(1) for shapes in slots.values() for shape in shapes)
        self._reserved = 0  # positions that memory is set aside for
        self._room = 0  # positions that it is allocated for
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
        # Of recurrences, by slot: positions and what those before came to, ascending. What is kept of positions says it too.
        self._states: dict[int, list[tuple[int, torch.Tensor]]] = {}

    @property
    def bytes(self) -> int:
        """Set aside."""
        source = 0 if self.source is None else self.source.bytes
        return self._reserved * self._position_bytes + self._state_bytes + source

    def reserve(self, positions: int) -> None:
        """Set memory aside for so many positions, rounded up to blocks; what is allocated already stays."""
        step = max(BLOCK_POSITIONS, 1 << max(0, positions.bit_length() - 4))
        blocks = -(-positions // step) * step
        self._reserved = max(self._room, min(self.capacity, blocks))

    def _empty(self, heads: int, positions: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, heads, positions, width, dtype=dtype, device=self._device)

    @property
    def addresses(self) -> torch.Tensor:
        """(slots, 3) int64, of slots that keep keys and values alone: where these two lie, and for how many positions."""
        if self._addresses is None:
            held = [(key.data_ptr(), value.data_ptr(), self._room) for key, value in self._memory.values()]
            self._addresses = torch.tensor(held, dtype=torch.int64).view(-1, 3)
        return self._addresses

    def _grow(self) -> None:
        """Allocate what is set aside, a slot after the other, so that little is there twice."""
        self._addresses = None
        for slot, tensors in self._memory.items():
            wider = []
            for old in tensors:
                new = self._empty(old.shape[1], self._reserved, old.shape[3], old.dtype)
                new[:, :, : self.length] = old[:, :, : self.length]
                wider.append(new)
            self._memory[slot] = tuple(wider)
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
        self._slopes.clear()
        self._keep_states(start)

    def _keep_states(self, positions: int) -> None:
        """Those of so many positions or fewer."""
        for slot, states in self._states.items():
            self._states[slot] = [(at, state) for at, state in states if at <= positions]

    @property
    def running(self) -> range:
        """The positions that run."""
        return range(self._start, self._end)

    @property
    def single(self) -> bool:
        """Whether each of these is to have the bits of a run of its own."""
        return self._singly or self._end - self._start == 1

    def memory(self, slot: int) -> Sequence[torch.Tensor]:
        """What a slot keeps, (1, heads, room, width) each."""
        return self._memory[slot]

    def commit(self) -> None:
        self.length = self._end

    def cut(self, positions: int) -> int:
        """Forget what is held beyond so many positions, and what is set aside and holds nothing; how many are held."""
        self.length = min(self.length, positions)
        self.reserve(0)
        self._keep_states(self.length)
        return self.length

    def copy(self, other: SessionCache, positions: int) -> int:
        """Hold the first so many positions of `other`, which has the same slots, as far as it holds them; how many."""
        self.begin(0, min(positions, other.length))
        for slot, tensors in self._memory.items():
            for own, copied in zip(tensors, other._memory[slot], strict=True):
                own[:, :, : self._end] = copied[:, :, : self._end]
        # No state is ever written to
        self._states = {slot: list(states) for slot, states in other._states.items()}
        self._keep_states(self._end)
        self.commit()
        return self.length

    def attend(
        self,
        query: torch.Tensor,  # (1, heads, count, width)
        new: Sequence[torch.Tensor],  # what the slot keeps, each (1, its heads, count, its width): keys first
        slot: int,
        scale: float | None,
        window: int | None,
        scored: Scored | None = None,
    ) -> torch.Tensor:
        """Store what is new, and attend causally to all positions that are held, or to the last `window`."""
        held = self._memory[slot]
        start, end = self._start, self._end
        if self.single and supports_single(query, held, scored):
            return single_attention(query, new, [held] * (end - start), self.running, scale, window, scored)
        for memory, values in zip(held, new, strict=True):
            memory[:, :, start:end] = values
        if not self._singly:
            return self._look(query, held, start, end, scale, window, scored)
        rows = zip(range(start, end), torch.split(query, 1, 2), strict=True)
        return torch.cat([self._look(row, held, at, at + 1, scale, window, scored) for at, row in rows], 2)

    def select(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        weights: torch.Tensor,
        slot: int,
        scale: float,
        most: int,
    ) -> torch.Tensor:
        """Store the new keys (1, 1, count, width); which of those held the queries see best."""
        (held,) = self._memory[slot]
        held[:, :, self._start : self._end] = key
        found = []
        for start, end in self._runs():
            of = slice(start - self._start, end - self._start)
            found.append(best_keys(query[:, :, of], held[:, :, :end], weights[:, :, of], scale, most, start))
        return torch.cat(found, 2)

    def attend_selected(
        self,
        query: torch.Tensor,  # (1, heads, count, width)
        new: Sequence[torch.Tensor],  # keys and values
        selected: torch.Tensor,  # (1, 1, count, most)
        slot: int,
        scale: float | None,
    ) -> torch.Tensor:
        """Store what is new, and attend to the positions that are selected."""
        held = self._memory[slot]
        for memory, values in zip(held, new, strict=True):
            memory[:, :, self._start : self._end] = values
        found = []
        for start, end in self._runs():
            of = slice(start - self._start, end - self._start)
            keys, values = (memory[:, :, :end] for memory in held)
            found.append(selected_attention(query[:, :, of], keys, values, selected[:, :, of], scale, start))
        return torch.cat(found, 2)

    def _runs(self) -> list[tuple[int, int]]:
        """The positions that run, as they are to be computed: one by one, or all at once."""
        return [(at, at + 1) for at in self.running] if self._singly else [(self._start, self._end)]

    def attend_source(
        self, query: torch.Tensor, slot: int, scale: float | None, scored: Scored | None = None
    ) -> torch.Tensor:
        """To all of the source, (1, heads, count, width)."""
        if self.source is None or slot not in self.source.kept:
            raise ValueError("the session's source has not been run")
        key, value = self.source.kept[slot]
        rows = torch.split(query, 1, 2) if self._singly else (query,)
        return torch.cat([all_attention(each, key, value, scale, scored) for each in rows], 2)

    def convolve(
        self,
        rows: torch.Tensor,  # (1, 1, count, channels)
        weight: torch.Tensor,  # (channels, 1, window)
        bias: torch.Tensor | None,
        slot: int,
    ) -> torch.Tensor:
        """Store the new rows, and sum each channel over the last positions, `window` of them, with zeros before the first."""
        (held,) = self._memory[slot]
        start, end = self._start, self._end
        held[:, :, start:end] = rows
        first = start + 1 - weight.shape[2]
        seen = functional.pad(held[:, :, max(0, first) : end].float(), (0, 0, max(0, -first), 0))
        # One product after the other, and not a kernel that may sum otherwise for another number of positions.
        total = torch.zeros_like(rows, dtype=torch.float32)
        for at, weights in enumerate(weight[:, 0].float().unbind(1)):
            total = total + seen[:, :, at : at + end - start] * weights
        if bias is not None:
            total = total + bias
        return total.to(rows.dtype)

    def recur(
        self,
        query: torch.Tensor,  # (1, key heads, count, width)
        new: Sequence[torch.Tensor],  # key, value, decay and perhaps beta, as of `fusion.recurrence`
        rates: torch.Tensor | None,
        slot: int,
    ) -> torch.Tensor:
        """Store what is new, and go on with the state of the positions before. Where there is none of just these, as after
        positions were forgotten, from the last one before it."""
        held = self._memory[slot]
        start, end = self._start, self._end
        for memory, values in zip(held, new, strict=True):
            memory[:, :, start:end] = values
        known = self._states.get(slot, ())
        at, state = known[-1] if known else (0, first_state(new))
        if at < start:
            _, state = read(None, [memory[:, :, at:start] for memory in held], rates, state)
        seen, after = read(query, new, rates, state)
        # That of before too: of several positions that are tried, the last ones are often taken back.
        self._states[slot] = [(start, state), (end, after)]
        return seen

    def _look(
        self,
        query: torch.Tensor,
        held: Sequence[torch.Tensor],
        start: int,
        end: int,
        scale: float | None,
        window: int | None,
        scored: Scored | None,
    ) -> torch.Tensor:
        """What the queries of positions [start, end) see."""
        count = end - start
        # Positions that no query of this run can see need not be read.
        first = 0 if window is None else max(0, start + 1 - window)
        if scored is None and count > 1 and query.dtype in HALF:
            # The library sums keys block by block, and rounds: a prompt in chunks is to have the bits of a whole one.
            first -= first % _KEY_BLOCK
        keys, values, *more = (tensor[:, :, first:end] for tensor in held)
        if scored is not None:
            mask = None if count == 1 else self._mask(first, window, query.device)
            return self._scored(
                query,
                keys,
                values,
                *more,
                scale=1.0 if scale is None else scale,
                mask=mask,
                scored=scored,
                first=first,
                ahead=start - first,
            )
        plain = start == 0 and (window is None or end <= window)
        mask = None if count == 1 or plain else self._mask(first, window, query.device)
        return functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=plain and count > 1,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )

    def _scored(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: torch.Tensor | None = None,  # the bias of each key, (1, heads or 1, length, 1)
        *,
        scale: float,
        mask: torch.Tensor | None,
        scored: Scored,
        first: int,
        ahead: int,
    ) -> torch.Tensor:
        """What the queries see of these keys, the first of which is at position `first`, `ahead` of which they begin. Of so many heads at a time that the
        scores of one position take no more memory than `most_scored` allows."""
        heads, length = query.shape[1], keys.shape[2]
        each, most = heads // keys.shape[1], most_scored(length)
        if heads > most:
            parts = []
            for at in range(0, heads, each):  # those that share their keys
                for start in range(at, at + each, most):
                    of = slice(start, min(start + most, at + each))
                    own = slice(at // each, at // each + 1)
                    bias = kept if kept is None or kept.shape[1] == 1 else kept[:, of]
                    part = self._scored(
                        query[:, of],
                        keys[:, own],
                        values[:, own],
                        bias,
                        scale=scale,
                        mask=mask,
                        scored=scored.of(of),
                        first=first,
                        ahead=ahead,
                    )
                    parts.append(part)
            return torch.cat(parts, 1)
        bias = None if kept is None else kept.transpose(2, 3)
        if scored.slopes is not None:
            far = self._far(scored.slopes, first, first + length, query)
            bias = far if bias is None else bias + far
        return scored_attention(query, keys, values, scale, mask, bias, scored, ahead)

    def _far(self, slopes: Sequence[float], first: int, end: int, query: torch.Tensor) -> torch.Tensor:
        """(1, heads, 1, end - first): slope * (j - last position). From the query's own position it differs by a number a
        row, which a softmax does not see; from the last one it is the same for all rows, and exact near by."""
        found = self._slopes.get((slopes, first, end, query.dtype))
        if found is None:
            each = torch.tensor(slopes, dtype=torch.float32, device=query.device)
            distance = torch.arange(first + 1 - end, 1, dtype=torch.float32, device=query.device)
            found = (each[:, None] * distance)[None, :, None].to(query.dtype)
            if len(self._slopes) == KEPT_SLOPES:
                self._slopes.clear()
            self._slopes[slopes, first, end, query.dtype] = found
        return found

    def _mask(self, first: int, window: int | None, device: torch.device) -> torch.Tensor:
        """(count, end - first) booleans, True where a query may look; one for all the slots of a run that read
        from the same key on."""
        found = self._masks.get((first, window))
        if found is None:
            queries = torch.arange(self._start, self._end, device=device)[:, None]
            positions = torch.arange(first, self._end, device=device)[None, :]
            found = positions <= queries
            if window is not None:
                found &= positions > queries - window
            self._masks[first, window] = found
        return found
