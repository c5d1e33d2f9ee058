"""The highest few along a size that is free, of which there may be fewer: `x.topk(min(k, x.shape[-1]))`.

How many these are depends on the size, which no shape of a graph can say. Where a model makes nothing but a mask of their places, with
`scatter`, the mask can be made of as many places as there are: of the first k as they are, and of the highest again for the rest.
While a model is exported, its code gets that for `min`, `topk` and `scatter` of such numbers; whatever else it does with them is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.job.errors import CaptureError

_ELSE = "the model takes the highest few along a size that is free, and makes something else than a mask of their places"


@dataclass(frozen=True)
class AtMost:
    """The smaller of a size that is free and a number, which may be either."""

    size: Any
    most: int

    def __index__(self) -> int:  # as without this: it fixes the size, which torch refuses
        return int(min(self.size, self.most))


@dataclass(frozen=True)
class Places:
    """Of the highest `AtMost.most` along the last dimension; `order`: of all, from the highest on."""

    order: Tensor
    most: int

    def to(self, *_: Any, **__: Any) -> Places:
        return self

    long = int = to

    def new_ones(self, *size: Any, **named: Any) -> Tensor:
        return self.order.new_ones(*size, **named)

    def new_zeros(self, *size: Any, **named: Any) -> Tensor:
        return self.order.new_zeros(*size, **named)

    def scattered(self) -> Tensor:
        """As many as there are, none but those."""
        first = torch.arange(self.order.shape[-1]) < self.most
        return torch.where(first, self.order, self.order[..., :1])

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"{_ELSE}{line_of_caller()}")


@dataclass(frozen=True)
class Highest:
    """What `topk` gives."""

    indices: Places

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"{_ELSE}{line_of_caller()}")


@contextmanager
def sizes_at_most(module: nn.Module) -> Iterator[None]:
    """While open, `min` of a size that is free and a number is an `AtMost` in the code of every part of the module."""
    code = {type(part).__module__ for part in module.modules()} & sys.modules.keys()
    scopes = [vars(sys.modules[name]) for name in sorted(code) if "min" not in vars(sys.modules[name])]
    for scope in scopes:
        scope["min"] = _smaller
    try:
        yield
    finally:
        for scope in scopes:
            del scope["min"]


def _smaller(*given: Any, **named: Any) -> Any:
    if len(given) == 2 and not named:
        free = [each for each in given if isinstance(each, torch.SymInt)]
        known = [each for each in given if type(each) is int]
        if len(free) == len(known) == 1 and known[0] > 0:
            if statically_known_true(free[0] <= known[0]):
                return free[0]
            if statically_known_true(free[0] >= known[0]):
                return known[0]
            return AtMost(free[0], known[0])
    return min(*given, **named)


def topk(plain: Callable[..., Any]) -> Callable[..., Any]:
    def highest(input: Tensor, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True, **named: Any) -> Any:  # fmt: skip
        if not isinstance(k, AtMost):
            return plain(input, k, dim, largest, sorted, **named)
        if named or largest is not True or dim not in (-1, input.dim() - 1):
            raise CaptureError(f"{_ELSE}{line_of_caller()}")
        if not statically_known_true(input.shape[-1] == k.size):
            raise CaptureError(f"{_ELSE}{line_of_caller()}")
        return Highest(Places(plain(input, k.size, -1, True, True).indices, k.most))

    return highest


def scatter(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scattered(input: Tensor, dim: Any, index: Any, *more: Any, **named: Any) -> Tensor:
        if not isinstance(index, Places):
            return plain(input, dim, index, *more, **named)
        value = named.get("value", more[0] if more else None)
        same = dim in (-1, input.dim() - 1) and input.dim() == index.order.dim()
        if not same or not isinstance(value, (bool, int, float)) or len(more) + len(named) != 1:
            raise CaptureError(f"{_ELSE}{line_of_caller()}")
        return plain(input, dim, index.scattered(), value)

    return scattered
