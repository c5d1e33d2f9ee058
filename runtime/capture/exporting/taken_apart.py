"""Operators that torch does not take apart, or with strides and writes in place, which the op-set has no place for: the same of
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = _places(self, offset, dim1, dim2)
    return self.movedim((dim1, dim2), (-2, -1))[..., rows, columns]


def _diagonal_scatter(self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    moved = self.movedim((dim1, dim2), (-2, -1))
    at: list[Tensor | None] = [*([None] * (self.dim() - 2)), *_places(self, offset, dim1, dim2)]
    return torch.ops.aten.index_put(moved, at, src).movedim((-2, -1), (dim1, dim2))  # type: ignore[no-any-return]


def _places(of: Tensor, offset: int, dim1: int, dim2: int) -> tuple[Tensor, Tensor]:
    """The rows and the columns of a diagonal, so many to the right of the first element."""
    down, right = max(-offset, 0), max(offset, 0)
    count = torch.arange(max(min(of.shape[dim1] - down, of.shape[dim2] - right), 0))
    return count + down, count + right


def _diag(self: Tensor, diagonal: int = 0) -> Tensor:
    return _diagonal(self, diagonal) if self.dim() == 2 else torch.diag_embed(self, diagonal)


def _with_mean(plain: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """torch.var or torch.std, and the mean besides."""

    def both(self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        along = list(range(self.dim())) if dim is None else dim
        less = int(unbiased) if correction is None else correction
        return plain(self, along, correction=less, keepdim=keepdim), torch.mean(self, along, keepdim)

    return both


TAKEN_APART: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.diagonal.default: _diagonal,
    torch.ops.aten.diagonal_scatter.default: _diagonal_scatter,
    torch.ops.aten.diag.default: _diag,
    torch.ops.aten.trace.default: lambda self: _diagonal(self).sum(),
    torch.ops.aten.var_mean.dim: _with_mean(torch.var),
    torch.ops.aten.var_mean.correction: _with_mean(torch.var),
    torch.ops.aten.std_mean.dim: _with_mean(torch.std),
    torch.ops.aten.std_mean.correction: _with_mean(torch.std),
}
