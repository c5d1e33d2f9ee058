"""A job as a command knows it, where what is believed of it is made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """As `fusion.runtime.belief.naming.Known`."""

    belief: Any
    manifest: Any = None

    @property
    def record(self) -> Any:
        return self.belief.record
