"""Causal masks that a module keeps as buffers, tables of booleans: a few nodes make the same."""

from __future__ import annotations

import torch


def triangle_window(table: torch.Tensor) -> int | None:
    """How many positions each row of a square table of booleans sees at most: itself and those just before it. None for
    any other tensor."""
    if table.dtype != torch.bool or table.is_meta or table.dim() < 2 or table.numel() != table.shape[-1] ** 2:
        return None
    square = table.reshape(table.shape[-2:])
    if square.shape[0] != square.shape[1]:
        return None
    window = int(square[-1].sum())
    seen = torch.ones_like(square).tril().triu(1 - window)
    return window if torch.equal(square, seen) else None
