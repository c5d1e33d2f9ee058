"""Checks the tensors of a step for numbers that are not finite, in steps where that is asked for."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusion.runtime.training.step.faults import RECEIVED, SENT


class FiniteCheck:
    """`see` is called by the device's thread only."""

    def __init__(self) -> None:
        self.looks = False
        self._found: set[str] = set()

    def begin(self, *, look: bool) -> None:
        """A step begins. `look`: check its tensors."""
        self.looks, self._found = look, set()

    def see(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Check `tensors`, if this step is checked. `what`: a constant of `fusion.runtime.training.step.faults`. An activation may be
        infinite (a mask), but not NaN."""
        if not self.looks or what in self._found:
            return
        bad = torch.isnan if what in (RECEIVED, SENT) else lambda tensor: ~torch.isfinite(tensor)
        if any(bool(bad(tensor).any()) for tensor in tensors if tensor.is_floating_point()):
            self._found.add(what)

    @property
    def not_finite(self) -> tuple[str, ...]:
        """The kinds of tensors in which this step had such numbers."""
        return tuple(sorted(self._found))
