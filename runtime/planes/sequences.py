"""One run of a program over pieces of several sequences, laid end to end: who attends to what, where each piece ends, and the operators
that read what a sequence keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fusion.runtime.planes.attention import Scored, all_attention, single_attention, supports_single
from fusion.runtime.planes.kv_cache import SessionCache

Part = Callable[[torch.Tensor], torch.Tensor]  # of a tensor along the rows, those of one piece


class Sequences:
    """The state of such a run. `lengths`: positions of each piece; `rows`: of all that runs, of which those beyond the pieces
    are padding."""

    def __init__(
        self, caches: Sequence[SessionCache], lengths: Sequence[int], rows: int, ends: torch.Tensor
    ) -> None:
        self._caches = caches
        self._lengths = lengths
        self._rows = rows
        self._ends = ends
        self._single = bool(caches) and all(cache.single for cache in caches)
        self._positions = [position for cache in caches for position in cache.running]

    def attend(
        self,
        query: torch.Tensor,  # (1, heads, rows, width)
        new: Sequence[torch.Tensor],  # what the slot keeps, each (1, its heads, rows, its width)
        slot: int,
        scale: float | None,
        window: int | None,
        scored: Scored | None = None,
    ) -> torch.Tensor:
        """Each piece to its own sequence, as it would alone."""
        if self._single and supports_single(query, self._caches[0].memory(slot), scored):
            rows = partial(torch.narrow, dim=2, start=0, length=len(self._positions))
            kept = [memory for cache in self._caches for memory in [cache.memory(slot)] * len(cache.running)]
            found = single_attention(
                rows(query), [*map(rows, new)], kept, self._positions, scale, window, scored
            )
            return self._filled([found])
        return self._each(
            lambda cache, part: cache.attend(part(query), [*map(part, new)], slot, scale, window, scored)
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
        """For each piece of its own sequence's keys, as it would be alone."""
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
        """Each piece to its own sequence, as it would alone."""
        return self._each(
            lambda cache, part: cache.attend_selected(
                part(query), [*map(part, new)], part(selected), slot, scale
            )
        )

    def attend_source(
        self, query: torch.Tensor, slot: int, scale: float | None, scored: Scored | None = None
    ) -> torch.Tensor:
        """Each piece to its own sequence's source."""
        return self._each(lambda cache, part: cache.attend_source(part(query), slot, scale, scored))

    def convolve(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slot: int
    ) -> torch.Tensor:
        """Each piece of (1, 1, rows, channels) behind its own sequence, as it would be alone."""
        return self._each(lambda cache, part: cache.convolve(part(rows), weight, bias, slot))

    def recur(
        self, query: torch.Tensor, new: Sequence[torch.Tensor], rates: torch.Tensor | None, slot: int
    ) -> torch.Tensor:
        """Each piece of (1, key heads, rows, width) behind its own sequence, as it would be alone."""
        return self._each(lambda cache, part: cache.recur(part(query), [*map(part, new)], rates, slot))

    def _each(self, run: Callable[[SessionCache, Part], torch.Tensor]) -> torch.Tensor:
        """What `run` makes of each piece, one behind the other along dimension 2, and the last position again for the padding."""
        if len(self._lengths) == 1 and self._lengths[0] == self._rows:
            return run(self._caches[0], lambda values: values)
        found, at = list[torch.Tensor](), 0
        for cache, count in zip(self._caches, self._lengths, strict=True):
            found.append(run(cache, partial(torch.narrow, dim=2, start=at, length=count)))
            at += count
        return self._filled(found)

    def _filled(self, found: list[torch.Tensor]) -> torch.Tensor:
        """These along dimension 2, and the last position again for the padding."""
        missing = self._rows - sum(self._lengths)
        if missing:
            found.append(found[-1][:, :, -1:].expand(-1, -1, missing, -1))
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def last(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """The last positions of each piece, as many as are shown of it."""
        return values.index_select(axis, self._ends)


def last_position(values: torch.Tensor, axis: int, sequences: Sequences) -> torch.Tensor:
    """What stands for the cut to the last position (`fusion.dag.rewrites.last_position`)."""
    return sequences.last(values, axis)


Attends = SessionCache | Sequences  # one sequence, or several of a run


def cached_convolution(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slot: int, state: Attends
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
    state: Attends,
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
    state: Attends,
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
    state: Attends,
) -> torch.Tensor:
    """`fusion.cached_attention_scored`."""
    new = (key, value) if bias is None else (key, value, bias)
    scored = Scored(sinks, softcap, None if slopes is None else tuple(slopes))
    return state.attend(query, new, slot, scale, window, scored)


def cached_attention_relative(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    slot: int,
    scale: float,
    buckets: list[int],
    state: Attends,
) -> torch.Tensor:
    """`fusion.cached_attention_relative`."""
    relative = table[torch.tensor(buckets, device=table.device)].to(query.dtype)
    return state.attend(query, (key, value), slot, scale, None, Scored(relative=relative))


def cached_selection(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    slot: int,
    scale: float,
    count: int,
    state: Attends,
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
    state: Attends,
) -> torch.Tensor:
    """`fusion.cached_attention_selected`."""
    return state.attend_selected(query, (key, value), selected, slot, scale)


def source_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    slot: int,
    scale: float | None,
    state: Attends,
) -> torch.Tensor:
    """`fusion.source_attention`; without `key` and `value`, to those that each session keeps."""
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
    state: Attends,
) -> torch.Tensor:
    """`fusion.source_attention_scored`; without `key` and `value`, to those that each session keeps."""
    scored = Scored(softcap=softcap)
    if key is None or value is None:
        return state.attend_source(query, slot, scale, scored)
    return all_attention(query, key, value, scale, scored)
