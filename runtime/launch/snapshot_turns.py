"""A training job whose newest snapshot is served while it goes on: which of them, and when. Pure.

Each replacement costs bandwidth and, until the previous model has stopped, twice the memory. So replacements take at most a share of
the time, however often the job takes snapshots: those between are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LOOK_SECONDS = 5.0  # between two reads of the job's record
REST = 4.0  # pause after a replacement, in times of its duration

Turn = Literal["serve", "wait", "end"]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is believed of the job."""

    snapshot_step: int | None  # of its newest durable snapshot; None: there is none yet
    over: bool


def turn(seen: Seen, served: int | None, now: float, rested_at: float, *, tried: int | None = None) -> Turn:
    """What to do now. `served`: the step of the snapshot that is served, None while none is; `rested_at`: when the next may follow;
    `tried`: the step of the last one that could not be served, which is skipped while the job goes on. The last snapshot of a
    job that is over is always served, without waiting."""
    newest = seen.snapshot_step
    if newest is None or (served is not None and newest <= served):
        return "end" if seen.over else "wait"
    if served is None or seen.over:
        return "serve"
    return "serve" if now >= rested_at and (tried is None or newest > tried) else "wait"


def rest_until(began: float, ended: float) -> float:
    """When another snapshot may follow one that took from `began` to `ended`."""
    return ended + REST * max(0.0, ended - began)
