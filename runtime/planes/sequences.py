"""One run of a program over pieces of several sequences, laid end to end: who attends to what, and where each piece ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.runtime.planes.kv_cache import Scored, SessionCache


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
        lengths, at = self._lengths, 0
        if len(lengths) == 1 and lengths[0] == self._rows:
            return self._caches[0].attend(query, new, slot, scale, window, scored)
        found = []
        for cache, count in zip(self._caches, lengths, strict=True):
            own = [values.narrow(2, at, count) for values in new]
            found.append(cache.attend(query.narrow(2, at, count), own, slot, scale, window, scored))
            at += count
        if at < self._rows:
            found.append(found[-1][:, :, -1:].expand(-1, -1, self._rows - at, -1))
        return torch.cat(found, 2)

    def attend_source(self, query: torch.Tensor, slot: int, scale: float | None) -> torch.Tensor:
        """Each piece to its own sequence's source."""
        if len(self._lengths) == 1 and self._lengths[0] == self._rows:
            return self._caches[0].attend_source(query, slot, scale)
        parts = torch.split(query[:, :, : sum(self._lengths)], list(self._lengths), 2)
        found = [
            cache.attend_source(part, slot, scale) for cache, part in zip(self._caches, parts, strict=True)
        ]
        if (padding := self._rows - sum(self._lengths)) > 0:
            found.append(found[-1][:, :, -1:].expand(-1, -1, padding, -1))
        return torch.cat(found, 2)

    def convolve(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slot: int
    ) -> torch.Tensor:
        """Each piece of (1, 1, rows, channels) behind its own sequence, as it would be alone."""
        found = []
        at = 0
        for cache, count in zip(self._caches, self._lengths, strict=True):
            found.append(cache.convolve(rows.narrow(2, at, count), weight, bias, slot))
            at += count
        if at < self._rows:
            found.append(found[-1][:, :, -1:].expand(-1, -1, self._rows - at, -1))
        return torch.cat(found, 2)

    def recur(
        self, query: torch.Tensor, new: Sequence[torch.Tensor], rates: torch.Tensor | None, slot: int
    ) -> torch.Tensor:
        """Each piece of (1, key heads, rows, width) behind its own sequence, as it would be alone."""
        found = []
        at = 0
        for cache, count in zip(self._caches, self._lengths, strict=True):
            own = [values.narrow(2, at, count) for values in new]
            found.append(cache.recur(query.narrow(2, at, count), own, rates, slot))
            at += count
        if at < self._rows:
            found.append(found[-1][:, :, -1:].expand(-1, -1, self._rows - at, -1))
        return torch.cat(found, 2)

    def last(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """The last position of each piece, or all of one whose positions run singly."""
        return values.index_select(axis, self._ends)


def last_position(values: torch.Tensor, axis: int, sequences: Sequences) -> torch.Tensor:
    """What stands for the cut to the last position (`fusion.dag.rewrites.last_position`)."""
    return sequences.last(values, axis)
