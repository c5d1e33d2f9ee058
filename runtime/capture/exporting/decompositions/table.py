"""Decompositions of operators that torch does not decompose, or only into strides and in-place writes, which a graph does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import copysign, log
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusion.runtime.capture.exporting.decompositions import matrices, ordered, scattered, special


def _diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = _diagonal_indices(self, offset, dim1, dim2)
    return self.movedim((dim1, dim2), (-2, -1))[..., rows, columns]


def _diagonal_scatter(self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    moved = self.movedim((dim1, dim2), (-2, -1))
    indices: list[Tensor | None] = [
        *([None] * (self.dim() - 2)),
        *_diagonal_indices(self, offset, dim1, dim2),
    ]
    return torch.ops.aten.index_put(moved, indices, src).movedim((-2, -1), (dim1, dim2))  # type: ignore[no-any-return]


def _diagonal_indices(tensor: Tensor, offset: int, dim1: int, dim2: int) -> tuple[Tensor, Tensor]:
    """The row and column indices of a diagonal, `offset` to the right of the main one."""
    down, right = max(-offset, 0), max(offset, 0)
    count = torch.arange(max(min(tensor.shape[dim1] - down, tensor.shape[dim2] - right), 0))
    return count + down, count + right


def _diag(self: Tensor, diagonal: int = 0) -> Tensor:
    return _diagonal(self, diagonal) if self.dim() == 2 else torch.diag_embed(self, diagonal)


def _with_mean(original: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """torch.var or torch.std together with the mean."""

    def both(self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        dims = list(range(self.dim())) if dim is None else dim
        lost_degrees = int(unbiased) if correction is None else correction
        return original(self, dims, correction=lost_degrees, keepdim=keepdim), torch.mean(self, dims, keepdim)

    return both


def _hypot(self: Tensor, other: Tensor) -> Tensor:
    """Scaled by the larger argument, so that the squares stay in range."""
    larger = torch.maximum(self.abs(), other.abs()).detach()
    larger = torch.where((larger > 0) & larger.isinf().logical_not(), larger, torch.ones_like(larger))
    return larger * ((self / larger).square() + (other / larger).square()).sqrt()


def _copysign(self: Tensor, other: Any) -> Tensor:
    dtype = torch.result_type(self, other)
    size = self.abs().to(dtype if dtype.is_floating_point else torch.get_default_dtype())
    if not isinstance(other, Tensor):
        return -size if copysign(1, other) < 0 else size
    negative = other < 0
    if other.is_floating_point():  # a zero has a sign as well
        negative = negative | ((other == 0) & (other.reciprocal() < 0))
    return torch.where(negative, -size, size)


def _ignoring_nan(first: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """fmax or fmin: the argument that `first` prefers, and the other where one is NaN."""
    return lambda self, other: torch.where(first(self, other) | other.isnan(), self, other)


def _round(self: Tensor, *, decimals: int) -> Tensor:
    size = 10.0 ** abs(decimals)
    return (self * size).round() / size if decimals > 0 else (self / size).round() * size


def _addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    result = torch.bmm(batch1, batch2).sum(0)
    result = result if alpha == 1 else alpha * result
    return result if beta == 0 else result + (self if beta == 1 else beta * self)


def _split_sections(dim: int | None) -> Callable[..., list[Tensor]]:
    """Pieces of nearly equal size along `dim`, or along the dimension that the operator names."""

    def split(self: Tensor, sections: Any, named_dim: int = 0) -> list[Tensor]:
        axis = _split_dim(self, named_dim, dim)
        size = self.shape[axis]
        small, more = size // sections, size % sections
        ends = [i * small + min(i, more) for i in range(sections + 1)]
        return [self.narrow(axis, a, b - a) for a, b in pairwise(ends)]

    return split


def _split_at(dim: int | None) -> Callable[..., list[Tensor]]:
    def split(self: Tensor, indices: Any, named_dim: int = 0) -> list[Tensor]:
        axis = _split_dim(self, named_dim, dim)
        ends = [0, *indices, self.shape[axis]]
        return [self[(*(slice(None),) * axis, slice(a, b))] for a, b in pairwise(ends)]

    return split


def _split_dim(self: Tensor, named_dim: int, dim: int | None) -> int:
    return named_dim % self.dim() if dim is None else min(dim, self.dim() - 1)


def _same_convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """padding "same" with unequal sides: pads first, then convolves."""

    def run(input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: str = "valid", dilation: Any = 1, groups: int = 1) -> Tensor:  # fmt: skip
        window = weight.shape[2:]
        dilations = [dilation] if isinstance(dilation, int) else list(dilation)
        spacing = dilations if len(dilations) == len(window) else dilations * len(window)
        total = [d * (w - 1) for d, w in zip(spacing, window, strict=True)]
        sides = [side for each in reversed(total) for side in (each // 2, each - each // 2)]
        return original(functional.pad(input, sides), weight, bias, stride, 0, dilation, groups)

    return run


def _multilabel_margin(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """torch's decomposition takes a label after the first -1 for the first class."""
    rows, labels = (each.reshape(-1, self.shape[-1]) for each in (self, target))
    is_label = (labels == -1).cumsum(1) == 0
    label_scores = rows.gather(1, labels.clamp(min=0))
    classes = torch.arange(self.shape[-1])
    is_target = ((labels.unsqueeze(2) == classes) & is_label.unsqueeze(2)).any(1)  # (batch, class)
    counts = is_label.unsqueeze(2) & is_target.logical_not().unsqueeze(1)  # (batch, label, class)
    margins = (1 - label_scores.unsqueeze(2) + rows.unsqueeze(1)).clamp(min=0)
    loss = torch.where(counts, margins, torch.zeros_like(margins)).sum((1, 2)) / self.shape[-1]
    return loss.reshape(self.shape[:-1]) if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def _xlogy(self: Any, other: Any) -> Tensor:
    """Zero where self is zero, whatever other is; the gradient is zero where both are."""
    if not isinstance(other, Tensor):
        if other > 0:
            return self * log(other)  # type: ignore[no-any-return]
        zero = self == 0
        result = torch.where(zero, 1.0, self) * (
            float("-inf") if other == 0 else torch.full_like(self, other).log()
        )
    elif not isinstance(self, Tensor):
        zero = (other <= 0) & (self == 0)
        result = self * other.log()
    else:
        zero = (self == 0) & (other <= 0)
        result = self * torch.where(zero, 1.0, other).log()
    return torch.where(zero, torch.zeros_like(result), result)


# What to write instead of some operators that cannot be captured.
REMEDIES: Mapping[str, str] = {
    "aten.bincount": "say of how many numbers, with minlength",
    "aten.embedding_renorm": "leave max_norm out, or scale the rows that are looked up",
    "aten.argwhere": "torch.where(mask) says where as well, for x[rows], out[rows] = ... and index_add",
    "aten.linalg_solve": "for matrices of more rows than 16, or of a size that is free",
    "aten.matrix_exp": "torch.nn.utils.parametrizations.orthogonal(..., orthogonal_map='cayley') needs none, for up to 16 rows",
    "aten.multinomial": "draw with torch.rand, and look the places up in the probabilities' cumsum with torch.searchsorted",
    "aten.logcumsumexp": "along a size that is free it has no bound; (x - x.max()).exp().cumsum(0).log() + x.max() says nearly the same",
    "aten._upsample_bilinear2d_aa.vec": "leave antialias out, or blur with a convolution",
    "aten._upsample_bicubic2d_aa.vec": "leave antialias out, or blur with a convolution",
    "aten.scatter_reduce.two": "for amax, amin and prod, into at most 256 places along a size that is not free: leave the samples a dimension of their own, (batch, places, ..)",
    "aten.embedding_bag.padding_idx": "give bags of one length, (batch, length), and padding_idx where one is shorter",
}
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.diagonal.default: _diagonal,
    torch.ops.aten.diagonal_scatter.default: _diagonal_scatter,
    torch.ops.aten.diag.default: _diag,
    torch.ops.aten.trace.default: lambda self: _diagonal(self).sum(),
    torch.ops.aten.var_mean.dim: _with_mean(torch.var),
    torch.ops.aten.var_mean.correction: _with_mean(torch.var),
    torch.ops.aten.std_mean.dim: _with_mean(torch.std),
    torch.ops.aten.std_mean.correction: _with_mean(torch.std),
    torch.ops.aten.hypot.default: _hypot,
    torch.ops.aten.copysign.Tensor: _copysign,
    torch.ops.aten.copysign.Scalar: _copysign,
    torch.ops.aten.fmax.default: _ignoring_nan(torch.ge),
    torch.ops.aten.fmin.default: _ignoring_nan(torch.le),
    torch.ops.aten.round.decimals: _round,
    torch.ops.aten.addbmm.default: _addbmm,
    torch.ops.aten.tensor_split.sections: _split_sections(None),
    torch.ops.aten.tensor_split.indices: _split_at(None),
    torch.ops.aten.hsplit.int: _split_sections(1),
    torch.ops.aten.hsplit.array: _split_at(1),
    torch.ops.aten.vsplit.int: _split_sections(0),
    torch.ops.aten.vsplit.array: _split_at(0),
    torch.ops.aten.dsplit.int: _split_sections(2),
    torch.ops.aten.dsplit.array: _split_at(2),
    torch.ops.aten.conv1d.padding: _same_convolution(torch.conv1d),
    torch.ops.aten.conv2d.padding: _same_convolution(torch.conv2d),
    torch.ops.aten.conv3d.padding: _same_convolution(torch.conv3d),
    torch.ops.aten.multilabel_margin_loss.default: _multilabel_margin,
    torch.ops.aten.xlogy.Tensor: _xlogy,
    torch.ops.aten.xlogy.Scalar_Self: _xlogy,
    torch.ops.aten.xlogy.Scalar_Other: _xlogy,
    torch.ops.aten.median.dim: ordered.median,
    torch.ops.aten.median.default: ordered.median_of_all,
    torch.ops.aten.nanmedian.dim: ordered.nanmedian,
    torch.ops.aten.nanmedian.default: ordered.nanmedian_of_all,
    torch.ops.aten.kthvalue.default: ordered.kthvalue,
    torch.ops.aten.cummax.default: ordered.running_extreme(torch.gt),
    torch.ops.aten.cummin.default: ordered.running_extreme(torch.lt),
    torch.ops.aten.logcumsumexp.default: ordered.logcumsumexp,
    torch.ops.aten.masked_scatter.default: scattered.masked_scatter,
    torch.ops.aten.scatter_reduce.two: scattered.scatter_reduce,
    torch.ops.aten.index_reduce.default: scattered.index_reduce,
    **dict.fromkeys((torch.ops.aten.lgamma.default, torch.ops.aten.special_gammaln.default), special.lgamma),
    torch.ops.aten.sinc.default: special.sinc,
    **dict.fromkeys(
        (
            torch.ops.aten.digamma.default,
            torch.ops.aten.special_digamma.default,
            torch.ops.aten.special_psi.default,
        ),
        special.digamma,
    ),
    **dict.fromkeys((torch.ops.aten.linalg_det.default, torch.ops.aten.det.default), matrices.det),
    **dict.fromkeys(
        (torch.ops.aten.linalg_slogdet.default, torch.ops.aten.slogdet.default), matrices.slogdet
    ),
    torch.ops.aten.logdet.default: matrices.logdet,
    torch.ops.aten.linalg_solve.default: matrices.solve,
    **dict.fromkeys((torch.ops.aten.linalg_inv.default, torch.ops.aten.inverse.default), matrices.inv),
    torch.ops.aten.linalg_cholesky.default: matrices.cholesky,
    torch.ops.aten.cholesky.default: lambda self, upper=False: matrices.cholesky(self, upper=upper),
    torch.ops.aten.linalg_solve_triangular.default: matrices.solve_triangular,
    torch.ops.aten.cholesky_solve.default: matrices.cholesky_solve,
    torch.ops.aten.cholesky_inverse.default: matrices.cholesky_inverse,
}
