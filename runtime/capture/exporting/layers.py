"""Layers and functions of torch that are operators of their own, composed of operators that the op-set has.

Each function here takes the original function of torch that it is named after and returns its replacement, which calls the original where
it cannot express the case.
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
from torch.nn.modules.adaptive import _ASMoutput

from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.job.errors import CaptureError


def adaptive_max_pool(n: int) -> Callable[[Any], Callable[..., Any]]:
    """Takes the maximum of each window, as windows differ in size, if there are few."""

    def patch(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
            sizes = input.shape[-n:]
            requested = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,) * n
            targets = [
                size_in if size_out is None else size_out
                for size_in, size_out in zip(sizes, requested, strict=True)
            ]
            if (
                return_indices
                or prod(targets) > _MOST_WINDOWS
                or not all(isinstance(size_in, int) for size_in in sizes)
            ):
                return original(input, output_size, return_indices)
            sides: list[list[Any]] = [
                [slice(i * size_in // size_out, -(-(i + 1) * size_in // size_out)) for i in range(size_out)]
                for size_in, size_out in zip(sizes, targets, strict=True)
            ]
            windows: list[tuple[Any, ...]] = list(product(*sides))
            largest = [input[(..., *window)].flatten(-n).max(-1).values for window in windows]
            return torch.stack(largest, -1).reshape(*input.shape[:-n], *targets)

        return run

    return patch


def chunk(original: Callable[..., Any]) -> Callable[..., Any]:
    """Splits a free size into chunks if it is provably divisible by their number, (2 * batch) in two, or if there are two: the first is the larger
    one. Only a size of 1 has a single chunk."""

    def run(input: Tensor, chunks: int, dim: int = 0) -> Any:
        size = input.shape[dim]
        if isinstance(size, int) or chunks < 1:
            return original(input, chunks, dim)
        if statically_known_true(size % chunks == 0):
            return _equal_pieces(input, size // chunks, chunks, dim)
        if chunks != 2:
            return original(input, chunks, dim)
        first: Any = (size + 1) // 2
        return input.narrow(dim, 0, first), input.narrow(dim, first, size - first)

    return run


def split(original: Callable[..., Any]) -> Callable[..., Any]:
    """Splits into pieces of a free size if the tensor's size is provably a multiple of it: (2 * batch) in pieces of batch."""

    def run(tensor: Tensor, split_size_or_sections: Any = None, dim: int = 0, **kwargs: Any) -> Any:
        size, piece = tensor.shape[dim], kwargs.get("split_size", split_size_or_sections)
        if isinstance(size, torch.SymInt) and isinstance(piece, torch.SymInt):
            count = next(
                (n for n in range(1, _MOST_PIECES + 1) if statically_known_true(size == n * piece)), 0
            )
            if count:
                return _equal_pieces(tensor, piece, count, dim)
        return original(tensor, piece, dim)

    return run


def _equal_pieces(tensor: Tensor, piece: Any, count: int, dim: int) -> tuple[Tensor, ...]:
    return tuple(tensor.narrow(dim, i * piece, piece) for i in range(count))


def embedding_bag(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Looks up and reduces bags of one length: (batch, length)."""

    def run(input: Tensor, weight: Tensor, offsets: Tensor | None = None, *rest: Any, **kwargs: Any) -> Tensor:  # fmt: skip
        options = {**dict(zip(_REST, rest, strict=False)), **kwargs}
        mode, weights = options.get("mode", "mean"), options.get("per_sample_weights")
        unsupported = any(options.get(name) for name in ("max_norm", "scale_grad_by_freq"))
        if input.dim() != 2 or unsupported:
            return original(input, weight, offsets, *rest, **kwargs)
        rows, padding = functional.embedding(input, weight), options.get("padding_idx")
        if weights is not None:
            rows = rows * weights.unsqueeze(-1)
        if padding is not None:
            return _padded_bag(rows, (input != padding % weight.shape[0]).unsqueeze(-1), mode)
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1).values

    return run


def _padded_bag(rows: Tensor, is_entry: Tensor, mode: str) -> Tensor:
    """The sum, mean or maximum (batch, width) of the rows (batch, length, width) that are no padding; zero for a bag of padding."""
    if mode == "max":
        largest = torch.where(is_entry, rows, torch.full_like(rows, float("-inf"))).max(1).values
        return torch.where(is_entry.any(1), largest, torch.zeros_like(largest))
    total = torch.where(is_entry, rows, torch.zeros_like(rows)).sum(1)
    return total / is_entry.sum(1).clamp(min=1) if mode == "mean" else total


def one_hot(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Allows a free number of classes, where torch requires a number."""

    def run(tensor: Tensor, num_classes: Any = -1) -> Tensor:
        if not isinstance(num_classes, torch.SymInt):
            return original(tensor, num_classes)
        classes: Any = num_classes
        return torch.eq(tensor.unsqueeze(-1), torch.arange(classes)).to(torch.int64)

    return run


def instance_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Updates the running statistics, averaged over the samples, by in-place writes to their buffers."""

    def run(input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:  # fmt: skip
        if use_input_stats and running_mean is not None and running_var is not None:
            dims = list(range(2, input.dim()))
            with torch.no_grad():
                for running, current in ((running_mean, input.mean(dims)), (running_var, input.var(dims))):
                    running.copy_((1 - momentum) * running + momentum * current.mean(0))
            running_mean = running_var = None
        return original(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)

    return run


def diagonal(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Takes the diagonal of a square matrix at a symbolic offset; the operator's is a constant."""

    def run(input: Tensor, offset: Any = 0, *more: Any, **kwargs: Any) -> Tensor:
        shift = kwargs.get("diagonal", kwargs.get("offset", offset))
        if not isinstance(shift, torch.SymInt) or input.dim() != 2 or more or len(kwargs) > 1:
            return original(input, offset, *more, **kwargs)
        side: Any = input.shape[1]
        below = statically_known_true(shift < 0)
        if not below and not statically_known_true(shift >= 0):
            return original(input, offset, **kwargs)
        distance: Any = -shift if below else shift
        indices = torch.arange(side - distance) * (side + 1) + (distance * side if below else distance)
        return input.flatten().index_select(0, indices)

    return run


def bilinear(_: Any) -> Callable[..., Tensor]:
    def run(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
        return result if bias is None else result + bias

    return run


def outer(_: Any) -> Callable[..., Tensor]:
    return lambda input, vec2: input.unsqueeze(-1) * vec2


def cdist(_: Any) -> Callable[..., Tensor]:
    """Computes each distance by definition, as with `donot_use_mm_for_euclid_dist`, not by torch's approximation with products."""

    def run(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
        result: Tensor = torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)
        return result

    return run


def cov(_: Any) -> Callable[..., Tensor]:
    """Omits torch's check for negative weights."""

    def run(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:  # fmt: skip
        rows = input.reshape(1, -1) if input.dim() < 2 else input
        weights = torch.ones(1) if fweights is None else fweights
        total: Any = rows.shape[1] if fweights is None else fweights.sum()
        divisor = total - correction
        if aweights is not None:
            weights = weights * aweights
            total = weights.sum()
            divisor = total - correction * (weights * aweights).sum() / total
        centred = rows - (rows * weights).sum(1, keepdim=True) / total
        result: Tensor = (centred * weights) @ centred.mT / divisor
        return result.squeeze() if input.dim() < 2 else result

    return run


def corrcoef(_: Any) -> Callable[[Tensor], Tensor]:
    def run(input: Tensor) -> Tensor:
        covariance = cov(None)(input)
        if input.dim() < 2:
            return covariance / covariance
        deviation = covariance.diagonal().sqrt()
        return (covariance / deviation.unsqueeze(1) / deviation).clamp(-1, 1)

    return run


def fill_diagonal_(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(self: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
        if self.dim() != 2 or wrap:
            return original(self, fill_value, wrap)
        rows, columns = self.shape
        on_diagonal = torch.arange(rows).unsqueeze(1) == torch.arange(columns)
        return self.copy_(torch.where(on_diagonal, fill_value, self))

    return run


def gaussian_nll_loss(_: Any) -> Callable[..., Tensor]:
    """Omits torch's check for negative variances."""

    def run(input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Tensor:  # fmt: skip
        var = var if isinstance(var, Tensor) else torch.full_like(input, var)
        if var.shape != input.shape and var.dim() == input.dim() - 1:
            var = var.unsqueeze(-1)
        var = var + (var.clamp(min=eps) - var).detach()
        loss: Tensor = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * log(2 * pi) if full else 0.0)
        return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss

    return run


def convolution_in_groups(n: int) -> Callable[[Any], Callable[..., Tensor]]:
    """A convolution over 1 or 2 dimensions in a free number of groups, with filters of its own for each sample: a product with the windows of
    each group."""

    def patch(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1) -> Tensor:  # fmt: skip
            plain = not isinstance(groups, torch.SymInt)
            if plain or isinstance(padding, str) or input.dim() != n + 2:
                return original(input, weight, bias, stride, padding, dilation, groups)
            window, sizes = tuple(weight.shape[2:]), input.shape[2:]
            steps = [
                (each,) * n if isinstance(each, int) else tuple(each) * (n // len(each))
                for each in (stride, padding, dilation)
            ]
            strides, paddings, dilations = steps
            of_group = weight.shape[1]
            grouped = input.reshape(input.shape[0] * groups, of_group, *sizes)
            row = 2 - n  # one dimension is an image of one row
            windows = functional.unfold(
                grouped.unsqueeze(2) if row else grouped,
                (1,) * row + window,
                (1,) * row + dilations,
                (0,) * row + paddings,
                (1,) * row + strides,
            )  # (samples * groups, channels of a group * window, places)
            filters = weight.reshape(groups, weight.shape[0] // groups, of_group * prod(window))
            values = filters @ windows.reshape(input.shape[0], groups, *windows.shape[1:])
            ends = [
                (size + 2 * p - d * (w - 1) - 1) // s + 1
                for size, w, s, p, d in zip(sizes, window, *steps, strict=True)
            ]
            result: Tensor = values.reshape(input.shape[0], weight.shape[0], *ends)
            return result if bias is None else result + bias.reshape(-1, *(1,) * n)

        return run

    return patch


def fixed_groups(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CaptureError for a convolution in a free number of groups."""

    def run(*args: Any, **named: Any) -> Tensor:
        if any(isinstance(each, torch.SymInt) for each in (*args, named.get("groups"))):
            raise CaptureError(
                f"the model convolves in a number of groups that is free{line_of_caller()}: the op-set has that for conv1d and conv2d"
            )
        return original(*args, **named)

    return run


def batch_norm_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CaptureError for running statistics that are plain averages over all batches: a graph has no number of batches so far."""

    def run(self: Any, input: Tensor) -> Tensor:
        if self.training and self.track_running_stats and self.momentum is None:
            raise CaptureError(
                f"the model normalises with {type(self).__name__}(momentum=None){line_of_caller()}, an average that counts the batches so far: "
                "give it a momentum, as 0.1"
            )
        return original(self, input)

    return run


def adaptive_log_softmax(_: Any) -> Callable[..., Any]:
    """AdaptiveLogSoftmaxWithLoss by the log-probabilities of all classes; torch's own selects the rows of each cluster."""

    def run(self: Any, input_: Tensor, target_: Tensor) -> Any:
        one = target_.dim() == 0
        rows, labels = (input_.unsqueeze(0), target_.unsqueeze(0)) if one else (input_, target_)
        output = self.log_prob(rows).gather(1, labels.unsqueeze(1)).squeeze(1)
        return _ASMoutput(output.squeeze(0) if one else output, (-output).mean())

    return run


def unfold(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Selects overlapping windows by index_select."""

    def run(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
        axis, length = dimension % self.dim(), self.shape[dimension]
        if not isinstance(length, int):
            return original(self, dimension, size, step)
        count = (length - size) // step + 1
        indices = (torch.arange(count)[:, None] * step + torch.arange(size)).flatten()
        shape = (*self.shape[:axis], count, size, *self.shape[axis + 1 :])
        order = [i for i in range(len(shape)) if i != axis + 1]
        return self.index_select(axis, indices).reshape(shape).permute(*order, axis + 1)

    return run


def searchsorted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Counts the bounds that lie before each value."""

    def run(sorted_sequence: Tensor, input: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Tensor | None = None, out: Any = None) -> Tensor:  # fmt: skip
        if out is not None:
            return original(sorted_sequence, input, out_int32=out_int32, right=right, side=side, sorter=sorter, out=out)  # fmt: skip
        bounds = sorted_sequence if sorter is None else sorted_sequence.gather(-1, sorter)
        values = input.unsqueeze(-1) if isinstance(input, Tensor) else input
        bounds = bounds.unsqueeze(-2) if isinstance(input, Tensor) else bounds
        before = bounds <= values if right or side == "right" else bounds < values
        return before.sum(-1).to(torch.int32 if out_int32 else torch.int64)

    return run


def bincount(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes exactly `minlength` bins: a number beyond them is an index out of range."""

    def run(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if not minlength:
            return original(input, weights, minlength)
        counts = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
        counts = (
            counts if counts.dtype in (torch.int64, torch.float32) or weights is None else counts.double()
        )
        return torch.zeros(minlength, dtype=counts.dtype).scatter_add(0, input.to(torch.int64), counts)

    return run


def histc(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The replacement applies to a given range."""

    def run(input: Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: Any = None) -> Tensor:
        if out is not None or min >= max or bins > _MOST_BINS:
            return original(input, bins, min, max, out=out)
        ends = torch.linspace(min, max, bins + 1, dtype=input.dtype)
        values = input.detach().flatten().unsqueeze(1)
        last = torch.arange(bins) == bins - 1  # the last bin includes its upper end
        inside = (values >= ends[:-1]) & ((values < ends[1:]) | (last & (values == max)))
        return inside.sum(0).to(input.dtype)

    return run


def fake_quantize(axis: bool) -> Callable[..., Any]:
    """Rounds to steps of a scale, with a gradient of one where the input is in range. `axis`: one scale for each index along a dimension."""

    def patch(_: Any) -> Callable[..., Tensor]:
        def run(input: Tensor, scale: Any, zero_point: Any, *more: int) -> Tensor:
            at, (least, most) = (more[0], more[1:]) if axis else (0, more)
            if axis:
                shape = [-1 if i == at % input.dim() else 1 for i in range(input.dim())]
                scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
            detached = input.detach()
            step = (detached * (1.0 / scale)).round() + zero_point
            value = (step.clamp(least, most) - zero_point) * scale
            inside = (step >= least) & (step <= most)
            result: Tensor = value + torch.where(inside, input - detached, torch.zeros_like(input))
            return result

        return run

    return patch


def take_along_dim(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Broadcasts and gathers, without torch's check of the index values."""

    def run(input: Tensor, indices: Tensor, dim: int | None = None, **kwargs: Any) -> Tensor:
        if dim is None or kwargs:
            return original(input, indices, dim, **kwargs)
        shape = list(torch.broadcast_shapes(input.select(dim, 0).shape, indices.select(dim, 0).shape))  # type: ignore[no-untyped-call]
        axis = dim % input.dim()
        source, indices = (t.expand(*shape[:axis], t.shape[axis], *shape[axis:]) for t in (input, indices))
        return source.gather(axis, indices)

    return run


def number_and_tensor(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any], Callable[..., Tensor]]:
    """7 // x, 7 % x: the number becomes a tensor of the dtype that the result has."""

    def patch(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(self: Tensor, other: Any) -> Tensor:
            if not isinstance(other, (bool, int, float)):
                return original(self, other)
            return function(torch.full((), other, dtype=torch.result_type(self, other)), self)

        return run

    return patch


_MOST_WINDOWS = 64
_MOST_BINS = 256
_MOST_PIECES = 16  # in which a free size is split
_REST = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx")  # fmt: skip
