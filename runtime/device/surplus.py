"""When memory that nobody uses any more goes back to the system. Pure.

What a stage frees stays with the allocator of the process, in holes that its next values do not always fit: with activations of
some MiB a stage took two and a half times what was set aside for it, and kept that while it had nothing to compute. What is
returned is zeroed page by page when it is used again, so nothing is where stages keep to what they have.
"""

from __future__ import annotations

SPARE_BYTES = 16 << 20  # above what is set aside: Python's own needs change as well


class Surplus:
    """`base_bytes`: what the process holds while nothing is set aside for any stage."""

    def __init__(self, base_bytes: int) -> None:
        self._base_bytes = base_bytes
        self._left_bytes = 0  # by the last return: what more does not help against is tried once

    def is_due(self, resident_bytes: int, set_aside_bytes: int) -> bool:
        self._left_bytes = min(self._left_bytes, resident_bytes)
        return resident_bytes > max(self._base_bytes + set_aside_bytes, self._left_bytes) + SPARE_BYTES

    def returned(self, resident_bytes: int) -> None:
        """So much is held after a return."""
        self._left_bytes = resident_bytes
