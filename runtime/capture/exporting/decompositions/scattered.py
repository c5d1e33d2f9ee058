"""What is added, multiplied or compared at places that an index names, made of sums at such places and of masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

MOST_PLACES = 256  # of a mask with a row for each: more would take too much memory


def scatter_reduce(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:  # fmt: skip
    if reduce in ("sum", "mean"):
        own = self if include_self else self.scatter(dim, index, 0)
        total = own.scatter_add(dim, index, src)
        if reduce == "sum":
            return total
        if not self.is_floating_point():
            return NotImplemented
        ones = torch.ones_like(self)
        counted = ones if include_self else ones.scatter(dim, index, 0)
        return total / counted.scatter_add(dim, index, torch.ones_like(src)).clamp(min=1)
    return _by_mask(self, dim, index, src, reduce, include_self)


def index_reduce(self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:  # fmt: skip
    lead = [1] * source.dim()
    lead[dim] = source.shape[dim]
    return scatter_reduce(
        self, dim, index.view(lead).expand(source.shape), source, reduce, include_self=include_self
    )


def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The first numbers of `source`, one behind the other, where `mask` is."""
    if self.shape != mask.shape:
        self, mask = torch.broadcast_tensors(self, mask)  # type: ignore[no-untyped-call]
    place = (mask.flatten().cumsum(0) - 1).clamp(min=0)
    return torch.where(mask, source.flatten().index_select(0, place).reshape(self.shape), self)


def _by_mask(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool) -> Any:
    count, dim = self.shape[dim], dim % self.dim()
    if not isinstance(count, int) or count > MOST_PLACES or not self.is_floating_point():
        return NotImplemented
    for at, size in enumerate(index.shape):
        if at != dim and not statically_known_true(size == self.shape[at]):
            return NotImplemented
    # (.., place, source, ..)
    lead = [1] * (self.dim() + 1)
    lead[dim] = count
    there = index.unsqueeze(dim) == torch.arange(count).view(lead)
    source = src[tuple(slice(0, size) for size in index.shape)].unsqueeze(dim)
    none = {"amax": float("-inf"), "amin": float("inf")}.get(reduce, 1.0)
    values, own = torch.where(there, source, torch.full_like(source, none)), self.unsqueeze(dim + 1)
    if reduce == "prod":
        made = values.prod(dim + 1)
        return self * made if include_self else torch.where(there.any(dim + 1), made, self)
    extreme = getattr(torch, reduce)
    if include_self:
        return extreme(torch.cat([own, values], dim + 1), dim + 1)
    # torch counts what was there among those that share the gradient of a value as large, also where it is left out.
    alike = own.detach() == extreme(values.detach(), dim + 1, True)
    shares = torch.where(alike, own.detach(), torch.full_like(own, none))
    return torch.where(there.any(dim + 1), extreme(torch.cat([shares, values], dim + 1), dim + 1), self)
