"""The k highest along a free size that may be smaller than k: `x.topk(min(k, x.shape[-1]))`.

Their number depends on the size, which no shape of a graph can express. A model that only scatters a mask to their indices can be captured:
the mask is made of as many indices as there are elements, the first k as they are and the highest again for the rest. While a model is
exported, its code gets `AtMost` from `min`, and `topk` and `scatter` accept it; any other use is refused.
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

_OTHER_USE = "the model takes the highest few along a size that is free, and makes something else than a mask of their places"


@dataclass(frozen=True)
class AtMost:
    """The smaller of a free size and a number, either of which it may be."""

    size: Any
    most: int

    def __index__(self) -> int:  # as an int would: this fixes the size, which torch refuses
        return int(min(self.size, self.most))


@dataclass(frozen=True)
class TopIndices:
    """The indices of the `most` highest along the last dimension. `order`: all indices, highest value first."""

    order: Tensor
    most: int

    def to(self, *_: Any, **__: Any) -> TopIndices:
        return self

    long = int = to

    def new_ones(self, *size: Any, **named: Any) -> Tensor:
        return self.order.new_ones(*size, **named)

    def new_zeros(self, *size: Any, **named: Any) -> Tensor:
        return self.order.new_zeros(*size, **named)

    def repeated(self) -> Tensor:
        """The first `most` indices, then the highest one repeated, as many in all as there are elements."""
        is_top = torch.arange(self.order.shape[-1]) < self.most
        return torch.where(is_top, self.order, self.order[..., :1])

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"{_OTHER_USE}{line_of_caller()}")


@dataclass(frozen=True)
class TopK:
    """The result of `topk`."""

    indices: TopIndices

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"{_OTHER_USE}{line_of_caller()}")


@contextmanager
def sizes_at_most(module: nn.Module) -> Iterator[None]:
    """While open, `min` of a free size and a number is an `AtMost` in the modules that define the parts of `module`."""
    modules = {type(part).__module__ for part in module.modules()} & sys.modules.keys()
    scopes = [vars(sys.modules[name]) for name in sorted(modules) if "min" not in vars(sys.modules[name])]
    for scope in scopes:
        scope["min"] = _min
    try:
        yield
    finally:
        for scope in scopes:
            del scope["min"]


def _min(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 2 and not kwargs:
        free = [each for each in args if isinstance(each, torch.SymInt)]
        numbers = [each for each in args if type(each) is int]
        if len(free) == len(numbers) == 1 and numbers[0] > 0:
            if statically_known_true(free[0] <= numbers[0]):
                return free[0]
            if statically_known_true(free[0] >= numbers[0]):
                return numbers[0]
            return AtMost(free[0], numbers[0])
    return min(*args, **kwargs)


def topk(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: Tensor, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True, **named: Any) -> Any:  # fmt: skip
        if not isinstance(k, AtMost):
            return original(input, k, dim, largest, sorted, **named)
        if named or largest is not True or dim not in (-1, input.dim() - 1):
            raise CaptureError(f"{_OTHER_USE}{line_of_caller()}")
        if not statically_known_true(input.shape[-1] == k.size):
            raise CaptureError(f"{_OTHER_USE}{line_of_caller()}")
        return TopK(TopIndices(original(input, k.size, -1, True, True).indices, k.most))

    return run


def scatter(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(input: Tensor, dim: Any, index: Any, *more: Any, **named: Any) -> Tensor:
        if not isinstance(index, TopIndices):
            return original(input, dim, index, *more, **named)
        value = named.get("value", more[0] if more else None)
        same = dim in (-1, input.dim() - 1) and input.dim() == index.order.dim()
        if not same or not isinstance(value, (bool, int, float)) or len(more) + len(named) != 1:
            raise CaptureError(f"{_OTHER_USE}{line_of_caller()}")
        return original(input, dim, index.repeated(), value)

    return run
