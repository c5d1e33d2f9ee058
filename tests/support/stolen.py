"""How much of this machine others have: what is measured meanwhile says little about us."""

from __future__ import annotations

import psutil

MOST_STOLEN = 0.05  # of the time the cores were wanted: more, and what was measured is disturbed


class Stolen:
    """What other machines on this one's host have of its cores."""

    def __init__(self) -> None:
        self._before = self._times()

    def share(self) -> float:
        """Of the time since this was made for which the cores were wanted here."""
        stolen, wanted = (now - then for now, then in zip(self._times(), self._before, strict=True))
        return stolen / wanted if wanted > 0 else 0.0

    @staticmethod
    def _times() -> tuple[float, float]:
        times = psutil.cpu_times()
        stolen = float(getattr(times, "steal", 0.0))
        return stolen, stolen + times.user + times.nice + times.system
