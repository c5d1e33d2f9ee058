"""Loss against wall-clock time, one picture for each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Curve = Sequence[tuple[float, float]]


def draw(
    path: Path, title: str, across: str, curves: Mapping[str, Curve], level: float | None = None
) -> None:
    """`curves`: points by name; `level` is marked by a line."""
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
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
