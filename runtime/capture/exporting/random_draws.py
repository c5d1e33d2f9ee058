"""Random numbers that a model draws while it runs (noise, steps of a diffusion, paths that are dropped), made of masks of dropout.

Such a mask is a function of (seed, step, microbatch, node) and of nothing else (`fusion.runtime.planes.dropout`), so that a stage
which runs again, or another plane, draws the same. A number is made of BITS of them, each dropped with probability 1/2. Where dropout
is off, while a model is evaluated or served, every bit is a half, and a number the middle of what it could be: 0 of `randn`, 1/2 of `rand`.

The functions here have the arguments of those of torch that they are called after, and take their place while a model is exported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.job.errors import CaptureError

BITS = 16


def rand(
    *size: Any, dtype: torch.dtype | None = None, generator: Any = None, out: Any = None, **more: Any
) -> Tensor:
    _require_seed(generator)
    if out is not None:
        raise CaptureError(
            f"the model draws into a tensor that it has, with out={line_of_caller()}: use what the function returns"
        )
    given = (more["size"],) if "size" in more else size
    shape = tuple(given[0]) if given and isinstance(given[0], (tuple, list)) else given
    bits = functional.dropout(torch.ones(*shape, BITS), 0.5, True)  # 0 or 2
    places = 0.5 ** torch.arange(2, BITS + 2)
    number: Tensor = (bits * places).sum(-1) + 0.5 ** (BITS + 1)  # never 0 or 1
    return number if dtype is None else number.to(dtype)


def _require_seed(generator: Any) -> None:
    if generator is not None:
        raise CaptureError(
            f"the model draws from a generator of its own{line_of_caller()}: leave it out, a job's seed decides what is drawn"
        )


def randn(*size: Any, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    number = torch.erfinv(2.0 * rand(*size, **more) - 1.0) * 2**0.5
    return number if dtype is None else number.to(dtype)


def rand_like(input: Tensor, *, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    return rand(input.shape, dtype=dtype or input.dtype, **more)


def randn_like(input: Tensor, *, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    return randn(input.shape, dtype=dtype or input.dtype, **more)


def randint(
    low: Any = 0, high: Any = None, size: Any = None, *, dtype: torch.dtype | None = None, **more: Any
) -> Tensor:
    if size is None:
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    span, share = high - low, rand(size, **more)
    if wide := isinstance(span, int) and span > 1 << BITS:  # of more numbers than BITS tell apart
        share = share - 0.5 ** (BITS + 1) + rand(size, **more) * 0.5**BITS
    whole = (share * span).floor()
    number: Tensor = (whole.clamp(max=span - 1) if wide else whole).to(dtype or torch.int64) + low
    return number


def randint_like(
    input: Tensor, low: Any = 0, high: Any = None, *, dtype: torch.dtype | None = None, **more: Any
) -> Tensor:
    return randint(low, high, size=input.shape, dtype=dtype or input.dtype, **more)


def randperm(n: Any, *, dtype: torch.dtype = torch.int64, **more: Any) -> Tensor:
    """The order of so many draws; of the middles of distributions the order in which they are."""
    drawn = (rand(n, **more) * 2**BITS).to(torch.int64)
    order: Tensor = (drawn * n + torch.arange(n)).argsort()  # of equal draws the first goes first
    return order.to(dtype)


def bernoulli(input: Tensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    if p is None:
        return (rand(input.shape, generator=generator) < input).to(input.dtype)
    _require_seed(generator)
    return (functional.dropout(torch.ones(input.shape), 1.0 - p, True) * p).to(input.dtype)


def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, **more: Any) -> Tensor:
    if size is None:
        size = torch.broadcast_shapes(*(t.shape for t in (mean, std) if isinstance(t, Tensor)))  # type: ignore[no-untyped-call]
    made: Tensor = mean + std * randn(size, **more)
    return made


def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    return self.copy_(normal(mean, std, self.shape, generator=generator))


def uniform_(self: Tensor, from_: float = 0.0, to: float = 1.0, *, generator: Any = None, **given: float) -> Tensor:  # fmt: skip
    from_ = given.get("from", from_)
    return self.copy_(from_ + (to - from_) * rand(self.shape, generator=generator))


def bernoulli_(self: Tensor, p: float | Tensor = 0.5, *, generator: Any = None) -> Tensor:
    if isinstance(p, Tensor):
        return self.copy_(bernoulli(p.expand(self.shape), generator=generator))
    return self.copy_(bernoulli(self, p, generator=generator))


def exponential_(self: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Tensor:
    return self.copy_(rand(self.shape, generator=generator).log() / -lambd)


def rrelu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Tensor:  # fmt: skip
    """A slope of its own for each element below zero; the middle one while the model is not trained."""
    slope = lower + (upper - lower) * rand_like(input) if training and lower < upper else (lower + upper) / 2
    made = torch.where(input <= 0, input * slope, input)
    return input.copy_(made) if inplace else made


def dropout_of_channels(unbatched: int | None) -> Any:
    """dropout1d and the like: of whole channels. `unbatched`: the rank of an input without a batch, where there may be one."""

    def dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        lead = input.shape[: 1 if input.dim() == unbatched else 2]
        ones = torch.ones(*lead, *(1 for _ in input.shape[len(lead) :])).to(input.dtype)
        mask = functional.dropout(ones, p, True)
        return input.mul_(mask) if inplace else input * mask

    return dropped
