"""Loss against wall-clock time, one picture for each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DIVERGED = 1.5  # times the least loss at the end
Curve = Sequence[tuple[float, float]]


def draw(
    path: Path, title: str, across: str, curves: Mapping[str, Curve], level: float | None = None
) -> None:
    """Plot `curves`, points by name, with a line at `level`. Curves that end far above the best one leave the picture at its top."""
    figure, axes = pyplot.subplots(figsize=(10.0, 4.5), layout="constrained")
    styles = ("-", "--", ":", "-.")
    for number, (name, points) in enumerate(curves.items()):
        style: dict[str, Any] = {
            "linestyle": styles[number // 10 % len(styles)],
            "marker": ".",
            "markersize": 4,
        }
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, linewidth=1.3, **style)
    if level is not None:
        axes.axhline(level, color="grey", linewidth=0.8, linestyle=":")
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel("validation loss")
    if across.endswith("(log)"):
        axes.set_xscale("log")
    ends = [points[-1][1] for points in curves.values() if points]
    if ends and max(ends) > DIVERGED * min(ends):
        best = min(curves.values(), key=lambda points: points[-1][1])
        axes.set_ylim(0.98 * min(ends), max(DIVERGED * min(ends), 1.02 * best[0][1]))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
