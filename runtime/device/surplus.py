"""When free memory of the process is returned to the system. Pure.

Memory that a stage frees stays with the process's allocator, in holes that its next values do not always fit: with activations of
some MiB a stage took two and a half times its reservation, and kept that while it was idle. Returned memory is zeroed page by page
when it is used again, so none is returned while stages keep to their reservations, or where there is little to return: with stages
of 48 to 98 MiB each return freed 5 to 20 MiB, up to twenty times a second, and took a tenth of a step with PyTorch, a fifth with
JAX.
"""

from __future__ import annotations

SPARE_BYTES = 16 << 20  # above the reservations: Python's own needs vary as well


class Surplus:
    """`base_bytes`: bytes of the process without reservations; `lent_bytes`: the most that may be reserved; `working_bytes`: as in
    `fusion.runtime.planes.plane.Plane`."""

    def __init__(self, base_bytes: int, lent_bytes: int, working_bytes: int) -> None:
        self._base_bytes = base_bytes
        self._working_bytes = min(working_bytes, lent_bytes)
        self._left_bytes = 0  # after the last return: another would free no more of it

    def is_due(self, resident_bytes: int, reserved_bytes: int) -> bool:
        self._left_bytes = min(self._left_bytes, resident_bytes)
        needed = max(reserved_bytes, self._working_bytes) if reserved_bytes else 0
        return resident_bytes > max(self._base_bytes + needed, self._left_bytes) + SPARE_BYTES

    def returned(self, resident_bytes: int) -> None:
        """The process holds `resident_bytes` after a return."""
        self._left_bytes = resident_bytes
