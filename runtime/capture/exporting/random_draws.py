"""Random numbers that a model draws while it runs (noise, diffusion steps, stochastic depth), made of dropout masks.

A dropout mask is a function of (seed, step, microbatch, node) only (`fusion.runtime.planes.dropout`), so that a stage that runs again, or
another plane, draws the same. A number is made of BITS mask elements, each dropped with probability 1/2. Where dropout is off, in evaluation
and serving, each element counts half, and the number is the middle of its range: 0 for `randn`, 1/2 for `rand`.

The functions have the arguments of the functions of torch that they are named after, and replace them during an export.
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
    sizes = (more["size"],) if "size" in more else size
    shape = tuple(sizes[0]) if sizes and isinstance(sizes[0], (tuple, list)) else sizes
    bits = functional.dropout(torch.ones(*shape, BITS), 0.5, True)  # 0 or 2
    weights = 0.5 ** torch.arange(2, BITS + 2)
    number: Tensor = (bits * weights).sum(-1) + 0.5 ** (BITS + 1)  # never 0 or 1
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
    span, fraction = high - low, rand(size, **more)
    if is_wide := isinstance(span, int) and span > 1 << BITS:  # more values than BITS can distinguish
        fraction = fraction - 0.5 ** (BITS + 1) + rand(size, **more) * 0.5**BITS
    index = (fraction * span).floor()
    result: Tensor = (index.clamp(max=span - 1) if is_wide else index).to(dtype or torch.int64) + low
    return result


def randint_like(
    input: Tensor, low: Any = 0, high: Any = None, *, dtype: torch.dtype | None = None, **more: Any
) -> Tensor:
    return randint(low, high, size=input.shape, dtype=dtype or input.dtype, **more)


def randperm(n: Any, *, dtype: torch.dtype = torch.int64, **more: Any) -> Tensor:
    """The order of n random keys; the identity where dropout is off."""
    keys = (rand(n, **more) * 2**BITS).to(torch.int64)
    order: Tensor = (keys * n + torch.arange(n)).argsort()  # ties in order of position
    return order.to(dtype)


def bernoulli(input: Tensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    if p is None:
        return (rand(input.shape, generator=generator) < input).to(input.dtype)
    _require_seed(generator)
    return (functional.dropout(torch.ones(input.shape), 1.0 - p, True) * p).to(input.dtype)


def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, **more: Any) -> Tensor:
    if size is None:
        size = torch.broadcast_shapes(*(t.shape for t in (mean, std) if isinstance(t, Tensor)))  # type: ignore[no-untyped-call]
    result: Tensor = mean + std * randn(size, **more)
    return result


def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    return self.copy_(normal(mean, std, self.shape, generator=generator))


def uniform_(self: Tensor, from_: float = 0.0, to: float = 1.0, *, generator: Any = None, **kwargs: float) -> Tensor:  # fmt: skip
    from_ = kwargs.get("from", from_)
    return self.copy_(from_ + (to - from_) * rand(self.shape, generator=generator))


def bernoulli_(self: Tensor, p: float | Tensor = 0.5, *, generator: Any = None) -> Tensor:
    if isinstance(p, Tensor):
        return self.copy_(bernoulli(p.expand(self.shape), generator=generator))
    return self.copy_(bernoulli(self, p, generator=generator))


def exponential_(self: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Tensor:
    return self.copy_(rand(self.shape, generator=generator).log() / -lambd)


def rrelu(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Tensor:  # fmt: skip
    """A random slope for each negative element; the middle one in evaluation."""
    slope = lower + (upper - lower) * rand_like(input) if training and lower < upper else (lower + upper) / 2
    result = torch.where(input <= 0, input * slope, input)
    return input.copy_(result) if inplace else result


def dropout_of_channels(unbatched: int | None) -> Any:
    """dropout1d, 2d or 3d: of whole channels. `unbatched`: the rank of an input without a batch, if the function takes one."""

    def run(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        lead = input.shape[: 1 if input.dim() == unbatched else 2]
        ones = torch.ones(*lead, *(1 for _ in input.shape[len(lead) :])).to(input.dtype)
        mask = functional.dropout(ones, p, True)
        return input.mul_(mask) if inplace else input * mask

    return run
