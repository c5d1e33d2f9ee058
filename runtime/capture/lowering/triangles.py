"""Tables that a module keeps as buffers and that a few nodes can compute: causal masks and position counts."""

from __future__ import annotations

import torch


def is_count(table: torch.Tensor) -> bool:
    """Whether the elements of an int64 tensor, with at most one dimension other than 1, are 0, 1, 2, ..."""
    if table.dtype != torch.int64 or table.is_meta or table.numel() < 2 or table.numel() != max(table.shape):
        return False
    return torch.equal(table.flatten(), torch.arange(table.numel()))


def triangle_window(table: torch.Tensor) -> int | None:
    """The window of a causal mask: how many positions, itself and those before it, each row of a square boolean table sees at most. None for
    any other tensor."""
    if table.dtype != torch.bool or table.is_meta or table.dim() < 2 or table.numel() != table.shape[-1] ** 2:
        return None
    square = table.reshape(table.shape[-2:])
    if square.shape[0] != square.shape[1]:
        return None
    window = int(square[-1].sum())
    banded = torch.ones_like(square).tril().triu(1 - window)
    return window if torch.equal(square, banded) else None
