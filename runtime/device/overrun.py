"""Calls that take ten times their estimate, or that are estimated to take minutes: an operator cannot be interrupted, so a stage
with the first is ended, and one with the second is not begun. Pure.

Seconds of a call = FLOPs / measured rate + bytes moved / BYTES_PER_SECOND + nodes * NODE_SECONDS: a bound from above for what a
device usually does, not the estimate that placement goes by.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusion.dag.cutting.costs import stage_costs
from fusion.dag.cutting.stage import Stage

TIMES = 10.0
SPARE_SECONDS = 1.0  # that any call may take
# The longest estimate of one call, on this device: other jobs may have to wait for one operator of it. A stage of a billion parameters
# and 4096 positions, trained, is estimated at 330 s on a CPU of 75 GFLOP/s.
LONGEST_SECONDS = 600.0
IN_A_ROW = 3  # one may be late because the machine slept or was busy
BYTES_PER_SECOND = 1e9
NODE_SECONDS = 0.001


def call_seconds(stage: Stage, sizes: Mapping[str, int], flops_per_second: float) -> float:
    """An upper estimate of the longest call of a stage on one microbatch, forward or backward, on a device of that measured rate.
    `sizes`: of the graph's symbols, at most; all rows are routed to experts of this stage. Takes a while for a graph of
    thousands of nodes."""
    costs = stage_costs(stage, sizes, upper_bound=True)
    flops = sum(max(cost.forward_flops, cost.backward_flops) for cost in costs)
    # A backward pass reads the inputs and outputs of the forward
    moved = sum(2 * cost.moved_bytes for cost in costs)
    return flops / flops_per_second + moved / BYTES_PER_SECOND + len(costs) * NODE_SECONDS


class Overrun:
    """Watches the calls of one stage, of which none should take longer than `estimate_seconds`."""

    def __init__(self, estimate_seconds: float) -> None:
        self.estimate_seconds = estimate_seconds
        self.most_seconds = max(SPARE_SECONDS, TIMES * estimate_seconds)
        self._late = 0

    def took(self, seconds: float) -> bool:
        """Whether to end the stage, after a call of so many seconds."""
        self._late = self._late + 1 if seconds > self.most_seconds else 0
        return self._late >= IN_A_ROW
