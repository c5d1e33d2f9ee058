"""Operators that torch does not take apart, or with strides and writes in place, which the op-set has no place for: the same of
others."""

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
    rows, columns = _places(self, offset, dim1, dim2)
    return self.movedim((dim1, dim2), (-2, -1))[..., rows, columns]


def _diagonal_scatter(self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    moved = self.movedim((dim1, dim2), (-2, -1))
    at: list[Tensor | None] = [*([None] * (self.dim() - 2)), *_places(self, offset, dim1, dim2)]
    return torch.ops.aten.index_put(moved, at, src).movedim((-2, -1), (dim1, dim2))  # type: ignore[no-any-return]


def _places(of: Tensor, offset: int, dim1: int, dim2: int) -> tuple[Tensor, Tensor]:
    """The rows and the columns of a diagonal, so many to the right of the first element."""
    down, right = max(-offset, 0), max(offset, 0)
    count = torch.arange(max(min(of.shape[dim1] - down, of.shape[dim2] - right), 0))
    return count + down, count + right


def _diag(self: Tensor, diagonal: int = 0) -> Tensor:
    return _diagonal(self, diagonal) if self.dim() == 2 else torch.diag_embed(self, diagonal)


def _with_mean(plain: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """torch.var or torch.std, and the mean besides."""

    def both(self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        along = list(range(self.dim())) if dim is None else dim
        less = int(unbiased) if correction is None else correction
        return plain(self, along, correction=less, keepdim=keepdim), torch.mean(self, along, keepdim)

    return both


def _hypot(self: Tensor, other: Tensor) -> Tensor:
    """Of both divided by the larger one, whose squares stay in range."""
    larger = torch.maximum(self.abs(), other.abs()).detach()
    larger = torch.where((larger > 0) & larger.isinf().logical_not(), larger, torch.ones_like(larger))
    return larger * ((self / larger).square() + (other / larger).square()).sqrt()


def _copysign(self: Tensor, other: Any) -> Tensor:
    kind = torch.result_type(self, other)
    size = self.abs().to(kind if kind.is_floating_point else torch.get_default_dtype())
    if not isinstance(other, Tensor):
        return -size if copysign(1, other) < 0 else size
    below = other < 0
    if other.is_floating_point():  # a zero has a sign as well
        below = below | ((other == 0) & (other.reciprocal() < 0))
    return torch.where(below, -size, size)


def _of_numbers(first: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The one of both that comes first, and the other where one is not a number."""
    return lambda self, other: torch.where(first(self, other) | other.isnan(), self, other)


def _round(self: Tensor, *, decimals: int) -> Tensor:
    size = 10.0 ** abs(decimals)
    return (self * size).round() / size if decimals > 0 else (self / size).round() * size


def _addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    made = torch.bmm(batch1, batch2).sum(0)
    made = made if alpha == 1 else alpha * made
    return made if beta == 0 else made + (self if beta == 1 else beta * self)


def _in_sections(dim: int | None) -> Callable[..., list[Tensor]]:
    """Pieces that are as many, nearly as large as each other, along a dimension that the operator names if not given here."""

    def split(self: Tensor, sections: Any, at: int = 0) -> list[Tensor]:
        along = _along(self, at, dim)
        size = self.shape[along]
        small, more = size // sections, size % sections
        ends = [i * small + min(i, more) for i in range(sections + 1)]
        return [self.narrow(along, a, b - a) for a, b in pairwise(ends)]

    return split


def _at_indices(dim: int | None) -> Callable[..., list[Tensor]]:
    def split(self: Tensor, indices: Any, at: int = 0) -> list[Tensor]:
        along = _along(self, at, dim)
        ends = [0, *indices, self.shape[along]]
        return [self[(*(slice(None),) * along, slice(a, b))] for a, b in pairwise(ends)]

    return split


def _along(self: Tensor, named: int, dim: int | None) -> int:
    return named % self.dim() if dim is None else min(dim, self.dim() - 1)


def _padded_convolution(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """padding "same" with more on one side: a convolution of what is padded before."""

    def run(input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: str = "valid", dilation: Any = 1, groups: int = 1) -> Tensor:  # fmt: skip
        window = weight.shape[2:]
        given = [dilation] if isinstance(dilation, int) else list(dilation)
        apart = given if len(given) == len(window) else given * len(window)
        total = [d * (w - 1) for d, w in zip(apart, window, strict=True)]
        sides = [side for each in reversed(total) for side in (each // 2, each - each // 2)]
        return plain(functional.pad(input, sides), weight, bias, stride, 0, dilation, groups)

    return run


def _multilabel_margin(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """torch's own way counts a label that is none, behind the first -1, as the first class."""
    rows, labels = (each.reshape(-1, self.shape[-1]) for each in (self, target))
    is_label = (labels == -1).cumsum(1) == 0
    own = rows.gather(1, labels.clamp(min=0))
    places = torch.arange(self.shape[-1])
    is_target = ((labels.unsqueeze(2) == places) & is_label.unsqueeze(2)).any(1)  # (batch, class)
    counts = is_label.unsqueeze(2) & is_target.logical_not().unsqueeze(1)  # (batch, label, class)
    apart = (1 - own.unsqueeze(2) + rows.unsqueeze(1)).clamp(min=0)
    loss = torch.where(counts, apart, torch.zeros_like(apart)).sum((1, 2)) / self.shape[-1]
    return loss.reshape(self.shape[:-1]) if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def _xlogy(self: Any, other: Any) -> Tensor:
    """Zero for a zero of the first, whatever the other is; gradients where both are zero are zero as well."""
    if not isinstance(other, Tensor):
        if other > 0:
            return self * log(other)  # type: ignore[no-any-return]
        zero = self == 0
        made = torch.where(zero, 1.0, self) * (
            float("-inf") if other == 0 else torch.full_like(self, other).log()
        )
    elif not isinstance(self, Tensor):
        zero = (other <= 0) & (self == 0)
        made = self * other.log()
    else:
        zero = (self == 0) & (other <= 0)
        made = self * torch.where(zero, 1.0, other).log()
    return torch.where(zero, torch.zeros_like(made), made)


# What to write in the place of some that cannot be.
INSTEAD: Mapping[str, str] = {
    "aten.bincount": "say of how many numbers, with minlength",
    "aten.embedding_renorm": "leave max_norm out, or scale the rows that are looked up",
    "aten.where": "keep the mask of booleans (out[mask] = layer(x[mask])), which says where, and look no places up",
    "aten.linalg_solve": "for matrices of more rows than 16, or of a size that is free",
    "aten.matrix_exp": "torch.nn.utils.parametrizations.orthogonal(..., orthogonal_map='cayley') needs none, for up to 16 rows",
    "aten.multinomial": "draw with torch.rand, and look the places up in the probabilities' cumsum with torch.searchsorted",
    "aten.logcumsumexp": "along a size that is free it has no bound; (x - x.max()).exp().cumsum(0).log() + x.max() says nearly the same",
    "aten.embedding_bag.padding_idx": "give bags of one length, (batch, length), and padding_idx where one is shorter",
}
TAKEN_APART: Mapping[Any, Callable[..., Any]] = {
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
    torch.ops.aten.fmax.default: _of_numbers(torch.ge),
    torch.ops.aten.fmin.default: _of_numbers(torch.le),
    torch.ops.aten.round.decimals: _round,
    torch.ops.aten.addbmm.default: _addbmm,
    torch.ops.aten.tensor_split.sections: _in_sections(None),
    torch.ops.aten.tensor_split.indices: _at_indices(None),
    torch.ops.aten.hsplit.int: _in_sections(1),
    torch.ops.aten.hsplit.array: _at_indices(1),
    torch.ops.aten.vsplit.int: _in_sections(0),
    torch.ops.aten.vsplit.array: _at_indices(0),
    torch.ops.aten.dsplit.int: _in_sections(2),
    torch.ops.aten.dsplit.array: _at_indices(2),
    torch.ops.aten.conv1d.padding: _padded_convolution(torch.conv1d),
    torch.ops.aten.conv2d.padding: _padded_convolution(torch.conv2d),
    torch.ops.aten.conv3d.padding: _padded_convolution(torch.conv3d),
    torch.ops.aten.multilabel_margin_loss.default: _multilabel_margin,
    torch.ops.aten.xlogy.Tensor: _xlogy,
    torch.ops.aten.xlogy.Scalar_Self: _xlogy,
    torch.ops.aten.xlogy.Scalar_Other: _xlogy,
    torch.ops.aten.median.dim: ordered.median,
    torch.ops.aten.median.default: ordered.median_of_all,
    torch.ops.aten.nanmedian.dim: ordered.nanmedian,
    torch.ops.aten.nanmedian.default: ordered.nanmedian_of_all,
    torch.ops.aten.kthvalue.default: ordered.kthvalue,
    torch.ops.aten.cummax.default: ordered.largest_so_far(torch.gt),
    torch.ops.aten.cummin.default: ordered.largest_so_far(torch.lt),
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
