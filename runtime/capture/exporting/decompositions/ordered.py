"""Values that are selected by order, gathered by index after a sort or comparisons: the gradient goes to the same elements as torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def median(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of the two middle values, or NaN where there is one: NaN sorts after all numbers."""
    ordered, indices = self.sort(dim)
    last = self.shape[dim] - 1
    middle = torch.full_like(indices.narrow(dim, 0, 1), last // 2)
    if self.is_floating_point():
        middle = torch.where(ordered.narrow(dim, last, 1).isnan(), last, middle)
    return _gathered(ordered, indices, dim, middle, keepdim)


def nanmedian(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    ordered, indices = self.sort(dim)
    middle = ((self.isnan().logical_not().sum(dim, True) - 1).clamp(min=0) / 2).floor().to(torch.int64)
    return _gathered(ordered, indices, dim, middle, keepdim)


def median_of_all(self: Tensor) -> Tensor:
    """The gradient is shared by all elements equal to the median."""
    return _shared_gradient(self, median(self.flatten(), 0)[0])


def nanmedian_of_all(self: Tensor) -> Tensor:
    return _shared_gradient(self, nanmedian(self.flatten(), 0)[0])


def kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    ordered, indices = self.sort(dim)
    return _gathered(ordered, indices, dim, torch.full_like(indices.narrow(dim, 0, 1), k - 1), keepdim)


def running_extreme(precedes: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """cummax or cummin by doubling steps, log2(size) of them: each step doubles the range that an element has seen."""

    def run(self: Tensor, dim: int) -> Any:
        size = self.shape[dim]
        if not isinstance(size, int):
            return NotImplemented
        view_shape = [1] * self.dim()
        view_shape[dim] = size
        best, indices = self, torch.arange(size).view(view_shape).expand(self.shape)
        for step in _steps(size):
            later, earlier = best.narrow(dim, step, size - step), best.narrow(dim, 0, size - step)
            taken = precedes(earlier, later)
            if self.is_floating_point():
                taken = taken | (earlier.isnan() & later.isnan().logical_not())
            later_indices = torch.where(
                taken, indices.narrow(dim, 0, size - step), indices.narrow(dim, step, size - step)
            )
            indices = torch.cat([indices.narrow(dim, 0, step), later_indices], dim)
            best = torch.cat([best.narrow(dim, 0, step), torch.where(taken, earlier, later)], dim)
        return self.gather(dim, indices), indices

    return run


def logcumsumexp(self: Tensor, dim: int) -> Any:
    size = self.shape[dim]
    if not isinstance(size, int):
        return NotImplemented
    for step in _steps(size):
        both = torch.logaddexp(self.narrow(dim, step, size - step), self.narrow(dim, 0, size - step))
        self = torch.cat([self.narrow(dim, 0, step), both], dim)
    return self


def _steps(size: int) -> list[int]:
    return [1 << i for i in range((size - 1).bit_length())]


def _gathered(
    ordered: Tensor, indices: Tensor, dim: int, middle: Tensor, keepdim: bool
) -> tuple[Tensor, Tensor]:
    value, index = ordered.gather(dim, middle), indices.gather(dim, middle)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _shared_gradient(self: Tensor, value: Tensor) -> Tensor:
    """The value, with its gradient shared by all elements equal to it."""
    equal = self == value
    offsets = torch.where(equal, self - value.detach(), torch.zeros_like(self))
    return value.detach() + offsets.sum() / equal.sum()
