"""The state of a batched run: pieces of several sequences, concatenated (a ragged batch), each with its own cache; and the operators that
read caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fusion.runtime.planes.attention import ScoreMods, all_attention, single_attention, supports_single
from fusion.runtime.planes.kv_cache import SessionCache

SelectRows = Callable[[torch.Tensor], torch.Tensor]  # narrows a tensor to the rows of one piece


class Sequences:
    """The state of a batched run. `lengths`: positions of each piece; `rows`: all rows, those after the pieces are padding; `logit_rows`:
    rows to compute logits for."""

    def __init__(
        self, caches: Sequence[SessionCache], lengths: Sequence[int], rows: int, logit_rows: torch.Tensor
    ) -> None:
        self._caches = caches
        self._lengths = lengths
        self._rows = rows
        self._logit_rows = logit_rows
        self._single = bool(caches) and all(cache.runs_singly for cache in caches)
        self._positions = [position for cache in caches for position in cache.run_positions]

    def attend(
        self,
        query: torch.Tensor,  # (1, heads, rows, width)
        new: Sequence[torch.Tensor],  # for the tensors of the slot: each (1, its heads, rows, its width)
        slot: int,
        scale: float | None,
        window: int | None,
        score_mods: ScoreMods | None = None,
    ) -> torch.Tensor:
        """Each piece attends to its own sequence."""
        if self._single and supports_single(query, self._caches[0].memory(slot), score_mods):
            rows = partial(torch.narrow, dim=2, start=0, length=len(self._positions))
            caches = [
                memory for cache in self._caches for memory in [cache.memory(slot)] * len(cache.run_positions)
            ]
            output = single_attention(
                rows(query), [*map(rows, new)], caches, self._positions, scale, window, score_mods
            )
            return self._padded([output])
        return self._each(
            lambda cache, part: cache.attend(part(query), [*map(part, new)], slot, scale, window, score_mods)
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
        """Each piece selects keys of its own sequence."""
        return self._each(
            lambda cache, part: cache.select(part(query), part(key), part(weights), slot, scale, most)
        )

    def attend_selected(
        self,
        query: torch.Tensor,
        new: Sequence[torch.Tensor],
        selected: torch.Tensor,
        slot: int,
        scale: float | None,
    ) -> torch.Tensor:
        """Each piece attends to its own sequence."""
        return self._each(
            lambda cache, part: cache.attend_selected(
                part(query), [*map(part, new)], part(selected), slot, scale
            )
        )

    def attend_source(
        self, query: torch.Tensor, slot: int, scale: float | None, score_mods: ScoreMods | None = None
    ) -> torch.Tensor:
        """Each piece attends to the source of its own sequence."""
        return self._each(lambda cache, part: cache.attend_source(part(query), slot, scale, score_mods))

    def convolve(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slot: int
    ) -> torch.Tensor:
        """Each piece of `rows` (1, 1, rows, channels) continues its own sequence."""
        return self._each(lambda cache, part: cache.convolve(part(rows), weight, bias, slot))

    def recur(
        self, query: torch.Tensor, new: Sequence[torch.Tensor], rates: torch.Tensor | None, slot: int
    ) -> torch.Tensor:
        """Each piece of `query` (1, key heads, rows, width) continues its own sequence."""
        return self._each(lambda cache, part: cache.recur(part(query), [*map(part, new)], rates, slot))

    def _each(self, run: Callable[[SessionCache, SelectRows], torch.Tensor]) -> torch.Tensor:
        """Concatenate the results of `run` for each piece along dimension 2, padded with the last position."""
        if len(self._lengths) == 1 and self._lengths[0] == self._rows:
            return run(self._caches[0], lambda values: values)
        outputs, first = list[torch.Tensor](), 0
        for cache, count in zip(self._caches, self._lengths, strict=True):
            outputs.append(run(cache, partial(torch.narrow, dim=2, start=first, length=count)))
            first += count
        return self._padded(outputs)

    def _padded(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate along dimension 2, and pad with the last position."""
        missing = self._rows - sum(self._lengths)
        if missing:
            parts.append(parts[-1][:, :, -1:].expand(-1, -1, missing, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def last(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """The rows of each piece that logits are computed for."""
        return values.index_select(axis, self._logit_rows)


def last_position(values: torch.Tensor, axis: int, sequences: Sequences) -> torch.Tensor:
    """Replaces the cut to the last position (`fusion.dag.rewrites.last_position`)."""
    return sequences.last(values, axis)


AttentionState = SessionCache | Sequences  # of one sequence, or of a batched run


def cached_convolution(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slot: int, state: AttentionState
) -> torch.Tensor:
    """`fusion.cached_convolution`."""
    return state.convolve(rows, weight, bias, slot)


def cached_recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    rates: torch.Tensor | None,
    slot: int,
    state: AttentionState,
) -> torch.Tensor:
    """`fusion.cached_recurrence`."""
    new = (key, value, decay) if beta is None else (key, value, decay, beta)
    return state.recur(query, new, rates, slot)


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot: int,
    scale: float | None,
    window: int | None,
    state: AttentionState,
) -> torch.Tensor:
    """`fusion.cached_attention`."""
    return state.attend(query, (key, value), slot, scale, window)


def cached_attention_scored(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    slot: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    slopes: list[float] | None,
    state: AttentionState,
) -> torch.Tensor:
    """`fusion.cached_attention_scored`."""
    new = (key, value) if bias is None else (key, value, bias)
    score_mods = ScoreMods(sinks, softcap, None if slopes is None else tuple(slopes))
    return state.attend(query, new, slot, scale, window, score_mods)


def cached_attention_relative(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    slot: int,
    scale: float,
    buckets: list[int],
    state: AttentionState,
) -> torch.Tensor:
    """`fusion.cached_attention_relative`."""
    relative = table[torch.tensor(buckets, device=table.device)].to(query.dtype)
    return state.attend(query, (key, value), slot, scale, None, ScoreMods(relative=relative))


def cached_selection(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    slot: int,
    scale: float,
    count: int,
    state: AttentionState,
) -> torch.Tensor:
    """`fusion.cached_selection`."""
    return state.select(query, key, weights, slot, scale, count)


def cached_attention_selected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    selected: torch.Tensor,
    slot: int,
    scale: float | None,
    state: AttentionState,
) -> torch.Tensor:
    """`fusion.cached_attention_selected`."""
    return state.attend_selected(query, (key, value), selected, slot, scale)


def source_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    slot: int,
    scale: float | None,
    state: AttentionState,
) -> torch.Tensor:
    """`fusion.source_attention`; without `key` and `value`, those of each session's source."""
    if key is None or value is None:
        return state.attend_source(query, slot, scale)
    return all_attention(query, key, value, scale)


def source_attention_scored(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    slot: int,
    scale: float,
    softcap: float | None,
    state: AttentionState,
) -> torch.Tensor:
    """`fusion.source_attention_scored`; without `key` and `value`, those of each session's source."""
    score_mods = ScoreMods(softcap=softcap)
    if key is None or value is None:
        return state.attend_source(query, slot, scale, score_mods)
    return all_attention(query, key, value, scale, score_mods)
