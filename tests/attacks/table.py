"""Prints the verdicts as one table."""

from __future__ import annotations

from collections.abc import Sequence

from attacks.verdict import Verdict
from rich.console import Console
from rich.table import Table

WIDTH = 140


def show(verdicts: Sequence[Verdict]) -> None:
    table = Table(title="attacks on three peers that train and serve")
    for name in (
        "attack",
        "held",
        "job",
        "answers",
        "directory",
        "longest block",
        "memory",
        "set aside",
        "files",
        "attacker",
    ):
        table.add_column(name, justify="left" if name in ("attack", "held") else "right")
    for verdict in verdicts:
        table.add_row(
            verdict.attack,
            "no" if verdict.faults else "yes",
            f"{verdict.job_ratio:.2f}",
            f"{verdict.answer_ratio:.2f}",
            f"{verdict.honest}/{verdict.operations}",
            f"{verdict.block_seconds * 1000:.0f} ms",
            f"{verdict.growth_bytes / (1 << 20):+.0f} MiB",
            f"{verdict.lent_bytes / (1 << 20):.0f} MiB",
            f"{verdict.files:+d}",
            f"{verdict.share:.2f} cores",
            f"{verdict.quiet_cores:.2f} -> {verdict.cores:.2f} cores",
        )
    console = Console(width=WIDTH)
    console.print(table)
    for verdict in verdicts:
        for fault in verdict.faults:
            console.print(f"{verdict.attack}: {fault}", markup=False, highlight=False)
