"""The order in which a stage runs the forward and backward passes of a step's microbatches, as data.

No schedule can deadlock, whatever edges skip stages: stages may run in any interleaving in which an action waits for
the values it reads, and sending never waits. `gpipe` is GPipe (arXiv 1811.06965); `one_f_one_b` is the
non-interleaved 1F1B of PipeDream-Flush (arXiv 2006.09503), which keeps fewer microbatches in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class Action:
    kind: Literal["forward", "backward"]
    microbatch: int


def actions(schedule: Schedule, stage: int, stages: int, microbatches: int, depth: int) -> tuple[Action, ...]:
    """What the stage runs in a step, in order; `depth`: see `one_f_one_b`."""
    if schedule == "gpipe":
        return gpipe(stage, stages, microbatches)
    return one_f_one_b(stage, stages, microbatches, depth)


def gpipe(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """All forward passes, then all backward passes, in the same order in every stage."""
    _check(stage, stages, microbatches, depth=1)
    forward = (Action("forward", m) for m in range(microbatches))
    return (*forward, *(Action("backward", m) for m in range(microbatches)))


def one_f_one_b(stage: int, stages: int, microbatches: int, depth: int = 1) -> tuple[Action, ...]:
    """Warm-up forward passes to fill the stages after this one, then one backward pass after each forward pass.

    `depth` > 1 multiplies the microbatches in flight, for links whose latency is not small against the time of a stage;
    see `in_flight`.
    """
    _check(stage, stages, microbatches, depth)
    ahead = in_flight(stage, stages, microbatches, depth) - 1
    order = [Action("forward", m) for m in range(ahead)]
    for m in range(microbatches):
        if ahead + m < microbatches:
            order.append(Action("forward", ahead + m))
        order.append(Action("backward", m))
    return tuple(order)


def in_flight(stage: int, stages: int, microbatches: int, depth: int = 1) -> int:
    """The most microbatches whose activations a stage holds at once under `one_f_one_b`."""
    # It falls from stage to stage, never rises: else a stage would wait for a microbatch that waits for it.
    return min(microbatches, 1 + (stages - 1 - stage) * depth)


def _check(stage: int, stages: int, microbatches: int, depth: int) -> None:
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not in [0, {stages})")
    if microbatches < 1 or depth < 1:
        raise ValueError(f"microbatches and depth must be at least 1, not {microbatches} and {depth}")
