"""Determinants, inverses, solutions and Cholesky factors of small matrices, by Gauss-Jordan elimination with the largest pivot of each
column. NotImplemented for a matrix of more rows, or of a free number of them.

Where torch raises an error (a singular matrix, one that is not positive definite), results are infinite or NaN.
"""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

_MOST_ROWS = 16  # each row takes some twenty nodes
_MOST_COLUMNS = 32  # of a triangular matrix, five nodes each
_MOST_BY_MINORS = 4


def det(A: Tensor) -> Any:
    if not _is_small(A, _MOST_ROWS):
        return NotImplemented
    if A.shape[-1] <= _MOST_BY_MINORS:
        return _by_minors(A)
    _, pivots, sign = _eliminated(A)
    return sign * reduce(mul, pivots)


def slogdet(A: Tensor) -> Any:
    if not _is_small(A, _MOST_ROWS):
        return NotImplemented
    _, pivots, sign = _eliminated(A)
    rows = torch.stack(pivots, -1)
    return sign * rows.detach().sign().prod(-1), rows.abs().log().sum(-1)


def logdet(A: Tensor) -> Any:
    if not _is_small(A, _MOST_ROWS):
        return NotImplemented
    sign, size = slogdet(A)
    return size + torch.where(sign < 0, -1.0, torch.ones_like(sign)).log()  # NaN for a negative determinant


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Any:
    if not _is_small(A, _MOST_ROWS):
        return NotImplemented
    if _is_vector(A, B):
        return solve(A, B.unsqueeze(-1)).squeeze(-1)
    if not left:
        return solve(A.mT, B.mT).mT
    n = A.shape[-1]
    both, pivots, _ = _eliminated(*_same_batch(A, B))
    return both[..., n:] / torch.stack(pivots, -1).unsqueeze(-1)


def inv(A: Tensor) -> Any:
    if not _is_small(A, _MOST_ROWS):
        return NotImplemented
    return solve(A, torch.eye(A.shape[-1], dtype=A.dtype))


def cholesky(self: Tensor, *, upper: bool = False) -> Any:
    """The factor from one triangle of the matrix; the gradient is shared by both triangles, as in torch."""
    if not _is_small(self, _MOST_COLUMNS):
        return NotImplemented
    n = self.shape[-1]
    triangle = self.mT if upper else self
    indices = torch.arange(n)
    mirrored = torch.where(indices.unsqueeze(-1) >= indices, triangle, triangle.mT)
    both = (self + self.mT) / 2
    rest, columns = both + (mirrored - both).detach(), []
    for i in range(n):
        column = rest[..., :, 0] / rest[..., :1, 0].sqrt()
        columns.append(functional.pad(column, (i, 0)))
        below = column[..., 1:]
        rest = rest[..., 1:, 1:] - below.unsqueeze(-1) * below.unsqueeze(-2)
    factor = torch.stack(columns, -1)
    return factor.mT if upper else factor


def solve_triangular(self: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:  # fmt: skip
    if not _is_small(self, _MOST_COLUMNS):
        return NotImplemented
    if not left:
        return solve_triangular(self.mT, B.mT, upper=not upper, unitriangular=unitriangular).mT
    if upper:  # reversed, it is lower triangular
        reversed_solution = solve_triangular(
            self.flip(-1, -2), B.flip(-2), upper=False, unitriangular=unitriangular
        )
        return reversed_solution.flip(-2)
    A, rest = _same_batch(self, B)
    rows = []
    for i in range(A.shape[-1]):
        row = rest[..., :1, :]
        rows.append(row if unitriangular else row / A[..., i : i + 1, i : i + 1])
        rest = rest[..., 1:, :] - A[..., i + 1 :, i : i + 1] * rows[-1]
    return torch.cat(rows, -2)


def cholesky_solve(self: Tensor, input2: Tensor, upper: bool = False) -> Any:
    """The solution of A x = self, where `input2` is the Cholesky factor of A."""
    if not _is_small(input2, _MOST_COLUMNS):
        return NotImplemented
    lower = input2.mT if upper else input2
    return solve_triangular(lower.mT, solve_triangular(lower, self, upper=False), upper=True)


def cholesky_inverse(self: Tensor, upper: bool = False) -> Any:
    if not _is_small(self, _MOST_COLUMNS):
        return NotImplemented
    return cholesky_solve(torch.eye(self.shape[-1], dtype=self.dtype), self, upper)


def _is_small(A: Tensor, most: int) -> bool:
    rows = A.shape[-1]
    return isinstance(rows, int) and 0 < rows <= most and not A.is_complex()


def _is_vector(A: Tensor, B: Tensor) -> bool:
    """Whether B is one vector for each matrix, by torch's rule."""
    if B.dim() == 1:
        return True
    same = zip(B.shape, A.shape, strict=False)
    return B.dim() == A.dim() - 1 and all(statically_known_true(b == a) for b, a in same)


def _same_batch(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])  # type: ignore[no-untyped-call]
    return A.expand(*shape, *A.shape[-2:]), B.expand(*shape, *B.shape[-2:])


def _by_minors(A: Tensor) -> Tensor:
    """The determinant, expanded along the first row: its gradient is finite for singular matrices too."""
    n = A.shape[-1]
    if n == 1:
        return A[..., 0, 0]
    total = None
    for i in range(n):
        rest = torch.cat((A[..., 1:, :i], A[..., 1:, i + 1 :]), -1)
        part = A[..., 0, i] * _by_minors(rest)
        total = part if total is None else total - part if i % 2 else total + part
    assert total is not None
    return total


def _eliminated(A: Tensor, *others: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """[A | others] after elimination, with A diagonal; that diagonal; and the sign of the row permutation."""
    n = A.shape[-1]
    rows = torch.cat((A, *others), -1)
    indices = torch.arange(n).unsqueeze(-1)
    pivots, sign = [], torch.ones_like(A[..., 0, 0])
    for i in range(n):
        pivot_row = rows[..., i:, i].detach().abs().argmax(-1) + i
        swapped = pivot_row.unsqueeze(-1).unsqueeze(-1)
        current = rows[..., i : i + 1, :]
        chosen = rows.gather(-2, swapped.expand(*current.shape))
        rows = torch.where(indices == i, chosen, torch.where(indices == swapped, current, rows))
        pivots.append(chosen[..., 0, i])
        sign = torch.where(pivot_row == i, sign, -sign)
        pivot = chosen[..., i : i + 1]
        factors = rows[..., i : i + 1] / torch.where(pivot == 0, 1.0, pivot)
        rows = rows - torch.where(indices == i, 0.0, factors) * chosen
    return rows, pivots, sign
