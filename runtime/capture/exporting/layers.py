"""Layers of torch that are operators of its own, made of others that give the same: the op-set has no need of them.

Each takes the place of the function of torch.nn.functional that it is named after, which it calls where it cannot say it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import log, pi, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional


def adaptive_max_pool(n: int) -> Callable[[Any], Callable[..., Any]]:
    """A window at a time, of which there are few: they are of several sizes."""

    def of(plain: Callable[..., Any]) -> Callable[..., Any]:
        def pooled(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
            had = input.shape[-n:]
            given = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * n
            wanted = [own if size is None else size for own, size in zip(had, given, strict=True)]
            if return_indices or prod(wanted) > _MOST_WINDOWS or not all(isinstance(own, int) for own in had):
                return plain(input, output_size, return_indices)
            sides: list[list[Any]] = [
                [slice(i * own // size, -(-(i + 1) * own // size)) for i in range(size)]
                for own, size in zip(had, wanted, strict=True)
            ]
            windows: list[tuple[Any, ...]] = list(product(*sides))
            largest = [input[(..., *window)].flatten(-n).max(-1).values for window in windows]
            return torch.stack(largest, -1).reshape(*input.shape[:-n], *wanted)

        return pooled

    return of


def chunk(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Of a size that is free, and of which a number of equal pieces is known to be whole: (2 * batch) in two."""

    def pieces(input: Tensor, chunks: int, dim: int = 0) -> Any:
        size = input.shape[dim]
        if isinstance(size, int) or chunks < 1 or not statically_known_true(size % chunks == 0):
            return plain(input, chunks, dim)
        return _equal_pieces(input, size // chunks, chunks, dim)

    return pieces


def split(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same, of pieces of a size that is free as well: (2 * batch) in pieces of batch."""

    def pieces(tensor: Tensor, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
        size, each = tensor.shape[dim], named.get("split_size", split_size_or_sections)
        if isinstance(size, torch.SymInt) and isinstance(each, torch.SymInt):
            count = next(
                (n for n in range(1, _MOST_PIECES + 1) if statically_known_true(size == n * each)), 0
            )
            if count:
                return _equal_pieces(tensor, each, count, dim)
        return plain(tensor, each, dim)

    return pieces


def _equal_pieces(tensor: Tensor, each: Any, count: int, dim: int) -> tuple[Tensor, ...]:
    return tuple(tensor.narrow(dim, i * each, each) for i in range(count))


def embedding_bag(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As a look-up and a sum, for bags of one length: (batch, length)."""

    def looked_up(input: Tensor, weight: Tensor, offsets: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:  # fmt: skip
        given = {**dict(zip(_REST, rest, strict=False)), **named}
        mode, each = given.get("mode", "mean"), given.get("per_sample_weights")
        apart = any(given.get(name) for name in ("max_norm", "scale_grad_by_freq"))
        if input.dim() != 2 or apart:
            return plain(input, weight, offsets, *rest, **named)
        rows, padding = functional.embedding(input, weight), given.get("padding_idx")
        if each is not None:
            rows = rows * each.unsqueeze(-1)
        if padding is not None:
            return _padded_bag(rows, (input != padding % weight.shape[0]).unsqueeze(-1), mode)
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1).values

    return looked_up


def _padded_bag(rows: Tensor, counts: Tensor, mode: str) -> Tensor:
    """Of the rows that count; zero where none does."""
    if mode == "max":
        largest = torch.where(counts, rows, torch.full_like(rows, float("-inf"))).max(1).values
        return torch.where(counts.any(1), largest, torch.zeros_like(largest))
    total = torch.where(counts, rows, torch.zeros_like(rows)).sum(1)
    return total / counts.sum(1).clamp(min=1) if mode == "mean" else total


def one_hot(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of a number of classes that is free, which torch takes for a number."""

    def run(tensor: Tensor, num_classes: Any = -1) -> Tensor:
        if not isinstance(num_classes, torch.SymInt):
            return plain(tensor, num_classes)
        classes: Any = num_classes
        return torch.eq(tensor.unsqueeze(-1), torch.arange(classes)).to(torch.int64)

    return run


def instance_norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Updates running statistics, the means over the samples, by writes to their buffers."""

    def run(input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:  # fmt: skip
        if use_input_stats and running_mean is not None and running_var is not None:
            places = list(range(2, input.dim()))
            with torch.no_grad():
                for running, each in ((running_mean, input.mean(places)), (running_var, input.var(places))):
                    running.copy_((1 - momentum) * running + momentum * each.mean(0))
            running_mean = running_var = None
        return plain(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)

    return run


def diagonal(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A diagonal of a square whose offset is a symbolic size: the operator takes a constant one."""

    def run(input: Tensor, offset: Any = 0, *more: Any, **named: Any) -> Tensor:
        off = named.get("diagonal", named.get("offset", offset))
        if not isinstance(off, torch.SymInt) or input.dim() != 2 or more or len(named) > 1:
            return plain(input, offset, *more, **named)
        side: Any = input.shape[1]
        below = statically_known_true(off < 0)
        if not below and not statically_known_true(off >= 0):
            return plain(input, offset, **named)
        away: Any = -off if below else off
        places = torch.arange(side - away) * (side + 1) + (away * side if below else away)
        return input.flatten().index_select(0, places)

    return run


def bilinear(_: Any) -> Callable[..., Tensor]:
    def run(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made: Tensor = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
        return made if bias is None else made + bias

    return run


def outer(_: Any) -> Callable[..., Tensor]:
    return lambda input, vec2: input.unsqueeze(-1) * vec2


def cdist(_: Any) -> Callable[..., Tensor]:
    """Of every pair, without the products by which torch approximates those of many: as with `donot_use_mm_for_euclid_dist`."""

    def run(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
        made: Tensor = torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)
        return made

    return run


def cov(_: Any) -> Callable[..., Tensor]:
    """Without a look for weights below zero."""

    def run(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:  # fmt: skip
        rows = input.reshape(1, -1) if input.dim() < 2 else input
        each = torch.ones(1) if fweights is None else fweights
        counted: Any = rows.shape[1] if fweights is None else fweights.sum()
        over = counted - correction
        if aweights is not None:
            each = each * aweights
            counted = each.sum()
            over = counted - correction * (each * aweights).sum() / counted
        apart = rows - (rows * each).sum(1, keepdim=True) / counted
        made: Tensor = (apart * each) @ apart.mT / over
        return made.squeeze() if input.dim() < 2 else made

    return run


def corrcoef(_: Any) -> Callable[[Tensor], Tensor]:
    def run(input: Tensor) -> Tensor:
        shared = cov(None)(input)
        if input.dim() < 2:
            return shared / shared
        apart = shared.diagonal().sqrt()
        return (shared / apart.unsqueeze(1) / apart).clamp(-1, 1)

    return run


def fill_diagonal_(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(self: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
        if self.dim() != 2 or wrap:
            return plain(self, fill_value, wrap)
        rows, columns = self.shape
        there = torch.arange(rows).unsqueeze(1) == torch.arange(columns)
        return self.copy_(torch.where(there, fill_value, self))

    return run


def gaussian_nll_loss(_: Any) -> Callable[..., Tensor]:
    """Without a look for variances below zero."""

    def run(input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Tensor:  # fmt: skip
        var = var if isinstance(var, Tensor) else torch.full_like(input, var)
        if var.shape != input.shape and var.dim() == input.dim() - 1:
            var = var.unsqueeze(-1)
        var = var + (var.clamp(min=eps) - var).detach()
        loss: Tensor = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * log(2 * pi) if full else 0.0)
        return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss

    return run


def unfold(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Windows of a tensor, which lie over each other, as a look-up."""

    def run(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
        at, had = dimension % self.dim(), self.shape[dimension]
        if not isinstance(had, int):
            return plain(self, dimension, size, step)
        count = (had - size) // step + 1
        places = (torch.arange(count)[:, None] * step + torch.arange(size)).flatten()
        shape = (*self.shape[:at], count, size, *self.shape[at + 1 :])
        order = [i for i in range(len(shape)) if i != at + 1]
        return self.index_select(at, places).reshape(shape).permute(*order, at + 1)

    return run


def searchsorted(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """How many bounds lie before each value."""

    def run(sorted_sequence: Tensor, input: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Tensor | None = None, out: Any = None) -> Tensor:  # fmt: skip
        if out is not None:
            return plain(sorted_sequence, input, out_int32=out_int32, right=right, side=side, sorter=sorter, out=out)  # fmt: skip
        bounds = sorted_sequence if sorter is None else sorted_sequence.gather(-1, sorter)
        values = input.unsqueeze(-1) if isinstance(input, Tensor) else input
        bounds = bounds.unsqueeze(-2) if isinstance(input, Tensor) else bounds
        before = bounds <= values if right or side == "right" else bounds < values
        return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)

    return run


def bincount(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of as many bins as are asked for: a number beyond them is an index out of range."""

    def run(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if not minlength:
            return plain(input, weights, minlength)
        each = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
        each = each if each.dtype in (torch.int64, torch.float32) or weights is None else each.double()
        return torch.zeros(minlength, dtype=each.dtype).scatter_add(0, input.to(torch.int64), each)

    return run


def histc(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of bins whose ends are said."""

    def run(input: Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: Any = None) -> Tensor:
        if out is not None or min >= max or bins > _MOST_BINS:
            return plain(input, bins, min, max, out=out)
        ends = torch.linspace(min, max, bins + 1, dtype=input.dtype)
        values = input.detach().flatten().unsqueeze(1)
        last = torch.arange(bins) == bins - 1  # which has its end
        inside = (values >= ends[:-1]) & ((values < ends[1:]) | (last & (values == max)))
        return inside.sum(0).to(input.dtype)

    return run


def fake_quantize(axis: bool) -> Callable[..., Any]:
    """Rounded to steps of a scale, with the gradient of what it rounds where that is in range; `axis`: a scale for each place of one."""

    def of(_: Any) -> Callable[..., Tensor]:
        def run(input: Tensor, scale: Any, zero_point: Any, *more: int) -> Tensor:
            at, (least, most) = (more[0], more[1:]) if axis else (0, more)
            if axis:
                shape = [-1 if i == at % input.dim() else 1 for i in range(input.dim())]
                scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
            given = input.detach()
            step = (given * (1.0 / scale)).round() + zero_point
            value = (step.clamp(least, most) - zero_point) * scale
            inside = (step >= least) & (step <= most)
            made: Tensor = value + torch.where(inside, input - given, torch.zeros_like(input))
            return made

        return run

    return of


def take_along_dim(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As a look-up of tensors that are of one shape elsewhere, without a look at whether they are."""

    def run(input: Tensor, indices: Tensor, dim: int | None = None, **named: Any) -> Tensor:
        if dim is None or named:
            return plain(input, indices, dim, **named)
        shape = list(torch.broadcast_shapes(input.select(dim, 0).shape, indices.select(dim, 0).shape))  # type: ignore[no-untyped-call]
        at = dim % input.dim()
        source, places = (t.expand(*shape[:at], t.shape[at], *shape[at:]) for t in (input, indices))
        return source.gather(at, places)

    return run


def of_number(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any], Callable[..., Tensor]]:
    """7 // x, 7 % x: of a tensor of that number, in the dtype that both have."""

    def of(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(self: Tensor, other: Any) -> Tensor:
            if not isinstance(other, (bool, int, float)):
                return plain(self, other)
            return function(torch.full((), other, dtype=torch.result_type(self, other)), self)

        return run

    return of


_MOST_WINDOWS = 64
_MOST_BINS = 256
_MOST_PIECES = 16  # of a size that is free
_REST = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx")  # fmt: skip
