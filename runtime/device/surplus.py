"""When memory that nobody uses any more goes back to the system. Pure.

What a stage frees stays with the allocator of the process, in holes that its next values do not always fit: with activations of
some MiB a stage took two and a half times what was set aside for it, and kept that while it had nothing to compute. What is
returned is zeroed page by page when it is used again, so nothing is where stages keep to what they have, nor where there is little
to return: of stages of 48 to 98 MiB each return got 5 to 20 MiB back, up to twenty times a second, and took a tenth of a step
with PyTorch, a fifth with JAX.
"""

from __future__ import annotations

SPARE_BYTES = 16 << 20  # above what is set aside: Python's own needs change as well


class Surplus:
    """`base_bytes`: what the process holds while nothing is set aside for any stage; `lent_bytes`: the most that may be set aside;
    `working_bytes`: as `fusion.runtime.planes.plane.Plane` has it."""

    def __init__(self, base_bytes: int, lent_bytes: int, working_bytes: int) -> None:
        self._base_bytes = base_bytes
        self._working_bytes = min(working_bytes, lent_bytes)
        self._left_bytes = 0  # by the last return: what more does not help against is tried once

    def is_due(self, resident_bytes: int, set_aside_bytes: int) -> bool:
        self._left_bytes = min(self._left_bytes, resident_bytes)
        needed = max(set_aside_bytes, self._working_bytes) if set_aside_bytes else 0
        return resident_bytes > max(self._base_bytes + needed, self._left_bytes) + SPARE_BYTES

    def returned(self, resident_bytes: int) -> None:
        """So much is held after a return."""
        self._left_bytes = resident_bytes
