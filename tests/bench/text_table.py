"""Rows as text, for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def text_of(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines, with aligned cells."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
