"""A job as a command knows it, with a belief that the test makes up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """Stands for `fusion.runtime.belief.naming.Known`."""

    belief: Any
    manifest: Any = None

    @property
    def record(self) -> Any:
        return self.belief.record
