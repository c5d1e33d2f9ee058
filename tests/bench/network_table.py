"""The results of `make bench-network` as figures and a table, from records and predictions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

Recorded = Mapping[str, Any]  # of one job, as it lies in the file of results


@dataclass(frozen=True, kw_only=True)
class Row:
    """The row of a case. Seconds are those of a step."""

    network: str
    scheduler: str
    codec: str
    peers: int
    codecs: str  # what the edges were sent with
    seconds: float  # median of all steps that count
    least_seconds: float  # of the medians of single jobs
    most_seconds: float
    jobs: int
    speed_up: float  # against the baseline of the network, medians of jobs that ran in turn
    sent_bytes: float
    model_seconds: float
    simulated_seconds: float
    apart_seconds: float  # simulated, with every peer a machine of its own
    apart_speed_up: float
    bound_seconds: float
    bottleneck: str
    loss: float  # of training, at the last step that all jobs of the network have
    ratio: (
        float  # the slowest dense link or line against the compute of its stage, as both were in these jobs
    )
    reached_seconds: float | None = None  # until the baseline's last validation loss
    reached_speed_up: float | None = None

    @property
    def error(self) -> float:
        """The simulator's relative error."""
        return self.simulated_seconds / self.seconds - 1.0

    @property
    def of_bound(self) -> float:
        return self.bound_seconds / self.seconds


def step_lengths(job: Recorded) -> list[float]:
    """The seconds of each step after the warm-up."""
    return [b - a for a, b in pairwise(job["ended_at"][job["warm_up"] - 1 :])]


def step_seconds(jobs: Sequence[Recorded]) -> float:
    """The median of all steps that count."""
    return median(length for job in jobs for length in step_lengths(job))


def bytes_a_step(jobs: Sequence[Recorded]) -> float:
    return median(
        (job["sent_bytes"][-1] - job["sent_bytes"][job["warm_up"] - 1])
        / (len(job["sent_bytes"]) - job["warm_up"])
        for job in jobs
    )


def stage_seconds(jobs: Sequence[Recorded]) -> list[float]:
    """The compute time of each stage in a step: lower quartiles, since other work of a peer only adds to it."""
    steps = [stages for job in jobs for stages in job["stage_seconds"][job["warm_up"] :]]
    return [sorted(step[s] for step in steps)[len(steps) // 4] for s in range(len(steps[0]))]


def speed_up(baseline: Sequence[Recorded], jobs: Sequence[Recorded]) -> float:
    """The median of the ratios of jobs that ran in the same round."""
    return median(step_seconds([a]) / step_seconds([b]) for a, b in zip(baseline, jobs, strict=False))


def time_to_loss(job: Recorded, loss: float) -> float | None:
    """The seconds from the first step's begin until the validation loss was at most `loss`, interpolated linearly; None if it
    never was."""
    before: tuple[float, float] | None = None
    for _, at, measured in job["validation"]:
        if measured <= loss:
            if before is None:
                return float(at)
            share = (before[1] - loss) / max(1e-12, before[1] - measured)
            return float(before[0] + share * (at - before[0]))
        before = (at, measured)
    return None


def simulator_error(rows: Sequence[Row]) -> tuple[float, float]:
    """The median and the largest absolute error over all cases."""
    errors = [abs(row.error) for row in rows]
    return median(errors), max(errors)


HEAD = (
    "network", "scheduler", "codec", "peers", "edges sent as", "step, s", "(jobs)", "speed-up", "MB a step",
    "simulated, s", "error", "apart, s", "speed-up", "bound, s", "of bound", "what binds", "loss", "to loss, s", "speed-up",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.network, row.scheduler, row.codec, str(row.peers), row.codecs,
        f"{row.seconds:.3f}", f"{row.least_seconds:.2f}-{row.most_seconds:.2f}, {row.jobs}",
        f"{row.speed_up:.2f}", f"{row.sent_bytes / 1e6:.2f}", f"{row.simulated_seconds:.3f}",
        f"{100 * row.error:+.0f} %", f"{row.apart_seconds:.3f}", f"{row.apart_speed_up:.2f}", f"{row.bound_seconds:.3f}", f"{row.of_bound:.2f}", row.bottleneck,
        f"{row.loss:.3f}", *(f"{v:.1f}" if v is not None else "" for v in (row.reached_seconds, row.reached_speed_up)),
    )  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    lines = [" | ".join(HEAD), "|".join("---" for _ in HEAD), *(" | ".join(cells(row)) for row in rows)]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines) + "\n"


def plain(rows: Sequence[Row]) -> str:
    table = [HEAD, *map(cells, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def in_words(rows: Sequence[Row]) -> list[str]:
    """The summary of the table."""
    middle, most = simulator_error(rows)
    found = [
        f"simulator against box: median error {100 * middle:.0f} %, largest {100 * most:.0f} %, {len(rows)} cases",
        f"of the bound: median {median(row.of_bound for row in rows):.2f}, "
        f"least {min(row.of_bound for row in rows):.2f}",
    ]
    for network in dict.fromkeys(row.network for row in rows):
        best = max((row for row in rows if row.network == network), key=lambda row: row.speed_up)
        found.append(
            f"network {network}: {best.speed_up:.2f} times the baseline with {best.scheduler}, {best.codec}; "
            f"the baseline's slowest line takes {best.ratio:.1f} times its stage's compute"
        )
    return found
