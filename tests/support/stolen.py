"""Measures the share of this machine's cores that others on its host use, which spoils measurements."""

from __future__ import annotations

import psutil

MOST_STOLEN = 0.05  # of the time the cores were wanted: more, and what was measured is disturbed


class Stolen:
    """The share of cores that other machines on this host use ("steal" time)."""

    def __init__(self) -> None:
        self._before = self._times()

    def share(self) -> float:
        """Stolen time over the time in which this machine wanted its cores, since this object was created."""
        stolen, wanted = (now - then for now, then in zip(self._times(), self._before, strict=True))
        return stolen / wanted if wanted > 0 else 0.0

    @staticmethod
    def _times() -> tuple[float, float]:
        times = psutil.cpu_times()
        stolen = float(getattr(times, "steal", 0.0))
        return stolen, stolen + times.user + times.nice + times.system
