"""One run of a program over pieces of several sequences, laid end to end: who attends to what, and where each piece ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fusion.runtime.planes.attention import Scored
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
        return self._each(
            lambda cache, part: cache.attend(part(query), [*map(part, new)], slot, scale, window, scored)
        )

    def attend_source(self, query: torch.Tensor, slot: int, scale: float | None) -> torch.Tensor:
        """Each piece to its own sequence's source."""
        return self._each(lambda cache, part: cache.attend_source(part(query), slot, scale))

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
        if at < self._rows:
            found.append(found[-1][:, :, -1:].expand(-1, -1, self._rows - at, -1))
        return torch.cat(found, 2)

    def last(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """The last positions of each piece, as many as are shown of it."""
        return values.index_select(axis, self._ends)


def last_position(values: torch.Tensor, axis: int, sequences: Sequences) -> torch.Tensor:
    """What stands for the cut to the last position (`fusion.dag.rewrites.last_position`)."""
    return sequences.last(values, axis)
