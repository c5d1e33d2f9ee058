"""Tables of which position sees which, and rows that count, are known by their values."""

from __future__ import annotations

import torch

from fusion.runtime.capture.lowering.triangles import is_count, triangle_window


def test_causal_tables_and_windows_are_known() -> None:
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    assert triangle_window(causal) == triangle_window(causal.view(1, 1, 9, 9)) == 9
    assert triangle_window(causal ^ causal.tril(-4)) == 4


def test_whatever_else_is_not() -> None:
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    almost = causal.clone()
    almost[5, 0] = False
    for table in (almost, causal.t(), causal.float(), causal[:8], causal.expand(2, 9, 9), causal.to("meta")):
        assert triangle_window(table) is None


def test_rows_that_count_are_known() -> None:
    row = torch.arange(9)
    assert is_count(row) and is_count(row.view(1, 9)) and is_count(row.view(9, 1))
    for other in (row + 1, row * 2, row.float(), row.view(3, 3), row.expand(2, 9), row[:1], row.to("meta")):
        assert not is_count(other)
