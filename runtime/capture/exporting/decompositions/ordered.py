"""Values that are chosen by their order, as look-ups of what is sorted or compared: the gradient goes where torch's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def median(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of the two in the middle, or NaN where there is one: it is sorted behind all numbers."""
    ordered, places = self.sort(dim)
    last = self.shape[dim] - 1
    middle = torch.full_like(places.narrow(dim, 0, 1), last // 2)
    if self.is_floating_point():
        middle = torch.where(ordered.narrow(dim, last, 1).isnan(), last, middle)
    return _at(ordered, places, dim, middle, keepdim)


def nanmedian(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    ordered, places = self.sort(dim)
    middle = ((self.isnan().logical_not().sum(dim, True) - 1).clamp(min=0) / 2).floor().to(torch.int64)
    return _at(ordered, places, dim, middle, keepdim)


def median_of_all(self: Tensor) -> Tensor:
    """Its gradient is shared by all elements that are as large."""
    return _shared(self, median(self.flatten(), 0)[0])


def nanmedian_of_all(self: Tensor) -> Tensor:
    return _shared(self, nanmedian(self.flatten(), 0)[0])


def kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    ordered, places = self.sort(dim)
    return _at(ordered, places, dim, torch.full_like(places.narrow(dim, 0, 1), k - 1), keepdim)


def largest_so_far(precedes: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """cummax or cummin, in as many steps as the size has binary digits: after each, an element knows of twice as many before it."""

    def of(self: Tensor, dim: int) -> Any:
        size = self.shape[dim]
        if not isinstance(size, int):
            return NotImplemented
        lead = [1] * self.dim()
        lead[dim] = size
        best, places = self, torch.arange(size).view(lead).expand(self.shape)
        for step in _steps(size):
            ours, theirs = best.narrow(dim, step, size - step), best.narrow(dim, 0, size - step)
            taken = precedes(theirs, ours)
            if self.is_floating_point():
                taken = taken | (theirs.isnan() & ours.isnan().logical_not())
            behind = torch.where(
                taken, places.narrow(dim, 0, size - step), places.narrow(dim, step, size - step)
            )
            places = torch.cat([places.narrow(dim, 0, step), behind], dim)
            best = torch.cat([best.narrow(dim, 0, step), torch.where(taken, theirs, ours)], dim)
        return self.gather(dim, places), places

    return of


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


def _at(ordered: Tensor, places: Tensor, dim: int, middle: Tensor, keepdim: bool) -> tuple[Tensor, Tensor]:
    value, place = ordered.gather(dim, middle), places.gather(dim, middle)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _shared(self: Tensor, value: Tensor) -> Tensor:
    alike = self == value
    apart = torch.where(alike, self - value.detach(), torch.zeros_like(self))
    return value.detach() + apart.sum() / alike.sum()
