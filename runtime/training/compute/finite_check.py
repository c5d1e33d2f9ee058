"""Which tensors of a step had a number that is not finite, where the step is run with a look at all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fusion.runtime.training.step.faults import RECEIVED, SENT


class FiniteCheck:
    """Looks at nothing unless it was told to; `see` is called by the device's thread only."""

    def __init__(self) -> None:
        self.looks = False
        self._found: set[str] = set()

    def begin(self, *, look: bool) -> None:
        """A step begins."""
        self.looks, self._found = look, set()

    def see(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """`what`: a word of `fusion.runtime.training.step.faults`. An activation may be infinite (a mask), but not NaN."""
        if not self.looks or what in self._found:
            return
        bad = torch.isnan if what in (RECEIVED, SENT) else lambda tensor: ~torch.isfinite(tensor)
        if any(bool(bad(tensor).any()) for tensor in tensors if tensor.is_floating_point()):
            self._found.add(what)

    @property
    def not_finite(self) -> tuple[str, ...]:
        """What was seen in this step."""
        return tuple(sorted(self._found))
