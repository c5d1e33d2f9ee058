"""Reductions into the positions that an index names, made of scatter_add and masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

_MAX_TARGETS = 256  # target positions: the mask has a row for each, which takes memory


def scatter_reduce(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:  # fmt: skip
    if reduce in ("sum", "mean"):
        base = self if include_self else self.scatter(dim, index, 0)
        total = base.scatter_add(dim, index, src)
        if reduce == "sum":
            return total
        if not self.is_floating_point():
            return NotImplemented
        ones = torch.ones_like(self)
        counts = ones if include_self else ones.scatter(dim, index, 0)
        return total / counts.scatter_add(dim, index, torch.ones_like(src)).clamp(min=1)
    return _by_mask(self, dim, index, src, reduce, include_self)


def index_reduce(self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:  # fmt: skip
    view_shape = [1] * source.dim()
    view_shape[dim] = source.shape[dim]
    return scatter_reduce(
        self, dim, index.view(view_shape).expand(source.shape), source, reduce, include_self=include_self
    )


def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The first elements of `source`, in order, where `mask` is set."""
    if self.shape != mask.shape:
        self, mask = torch.broadcast_tensors(self, mask)  # type: ignore[no-untyped-call]
    position = (mask.flatten().cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.flatten().index_select(0, position).reshape(self.shape), self)


def _by_mask(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool) -> Any:
    count, dim = self.shape[dim], dim % self.dim()
    if not isinstance(count, int) or count > _MAX_TARGETS or not self.is_floating_point():
        return NotImplemented
    for at, size in enumerate(index.shape):
        if at != dim and not statically_known_true(size == self.shape[at]):
            return NotImplemented
    # (.., target, source, ..)
    view_shape = [1] * (self.dim() + 1)
    view_shape[dim] = count
    is_target = index.unsqueeze(dim) == torch.arange(count).view(view_shape)
    source = src[tuple(slice(0, size) for size in index.shape)].unsqueeze(dim)
    neutral = {"amax": float("-inf"), "amin": float("inf")}.get(reduce, 1.0)
    values, old = torch.where(is_target, source, torch.full_like(source, neutral)), self.unsqueeze(dim + 1)
    if reduce == "prod":
        product = values.prod(dim + 1)
        return self * product if include_self else torch.where(is_target.any(dim + 1), product, self)
    extreme = getattr(torch, reduce)
    if include_self:
        return extreme(torch.cat([old, values], dim + 1), dim + 1)
    # torch counts the old value among equal values that share the gradient, even with include_self=False.
    equal = old.detach() == extreme(values.detach(), dim + 1, True)
    shares = torch.where(equal, old.detach(), torch.full_like(old, neutral))
    return torch.where(is_target.any(dim + 1), extreme(torch.cat([shares, values], dim + 1), dim + 1), self)
