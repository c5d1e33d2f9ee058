"""Tables that a module keeps as buffers and a few nodes make as well: causal masks, and positions that are counted."""

from __future__ import annotations

import torch


def counts(table: torch.Tensor) -> bool:
    """Whether a row of whole numbers counts 0, 1, 2, ..., whatever dimensions of 1 it has besides."""
    if table.dtype != torch.int64 or table.is_meta or table.numel() < 2 or table.numel() != max(table.shape):
        return False
    return torch.equal(table.flatten(), torch.arange(table.numel()))


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
