"""Determinants, inverses, solutions and Cholesky factors of matrices of a few rows, row by row: elimination with the largest pivot of each
column. A matrix of more rows, or of a number of them that is free, is left as it is.

Where torch raises an error (a singular matrix, one that is not positive definite) the values are infinite or no numbers.
"""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

_MOST_ROWS = 16  # each is some twenty nodes
_MOST_COLUMNS = 32  # of a triangular matrix, for which each is five
_MOST_BY_MINORS = 4


def det(A: Tensor) -> Any:
    if not _few(A, _MOST_ROWS):
        return NotImplemented
    if A.shape[-1] <= _MOST_BY_MINORS:
        return _by_minors(A)
    _, pivots, sign = _eliminated(A)
    return sign * reduce(mul, pivots)


def slogdet(A: Tensor) -> Any:
    if not _few(A, _MOST_ROWS):
        return NotImplemented
    _, pivots, sign = _eliminated(A)
    rows = torch.stack(pivots, -1)
    return sign * rows.detach().sign().prod(-1), rows.abs().log().sum(-1)


def logdet(A: Tensor) -> Any:
    if not _few(A, _MOST_ROWS):
        return NotImplemented
    sign, size = slogdet(A)
    return size + torch.where(sign < 0, -1.0, torch.ones_like(sign)).log()  # of what is negative: no number


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Any:
    if not _few(A, _MOST_ROWS):
        return NotImplemented
    if _is_vector(A, B):
        return solve(A, B.unsqueeze(-1)).squeeze(-1)
    if not left:
        return solve(A.mT, B.mT).mT
    n = A.shape[-1]
    both, pivots, _ = _eliminated(*_same_batch(A, B))
    return both[..., n:] / torch.stack(pivots, -1).unsqueeze(-1)


def inv(A: Tensor) -> Any:
    if not _few(A, _MOST_ROWS):
        return NotImplemented
    return solve(A, torch.eye(A.shape[-1], dtype=A.dtype))


def cholesky(self: Tensor, *, upper: bool = False) -> Any:
    """Of what stands on one side of the diagonal; its gradient is shared by both sides, as torch has it."""
    if not _few(self, _MOST_COLUMNS):
        return NotImplemented
    n = self.shape[-1]
    given = self.mT if upper else self
    places = torch.arange(n)
    mirrored = torch.where(places.unsqueeze(-1) >= places, given, given.mT)
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
    if not _few(self, _MOST_COLUMNS):
        return NotImplemented
    if not left:
        return solve_triangular(self.mT, B.mT, upper=not upper, unitriangular=unitriangular).mT
    if upper:  # read from its end, it is a lower one
        made = solve_triangular(self.flip(-1, -2), B.flip(-2), upper=False, unitriangular=unitriangular)
        return made.flip(-2)
    A, rest = _same_batch(self, B)
    rows = []
    for i in range(A.shape[-1]):
        row = rest[..., :1, :]
        rows.append(row if unitriangular else row / A[..., i : i + 1, i : i + 1])
        rest = rest[..., 1:, :] - A[..., i + 1 :, i : i + 1] * rows[-1]
    return torch.cat(rows, -2)


def cholesky_solve(self: Tensor, input2: Tensor, upper: bool = False) -> Any:
    """With the factor `input2`."""
    if not _few(input2, _MOST_COLUMNS):
        return NotImplemented
    lower = input2.mT if upper else input2
    return solve_triangular(lower.mT, solve_triangular(lower, self, upper=False), upper=True)


def cholesky_inverse(self: Tensor, upper: bool = False) -> Any:
    if not _few(self, _MOST_COLUMNS):
        return NotImplemented
    return cholesky_solve(torch.eye(self.shape[-1], dtype=self.dtype), self, upper)


def _few(A: Tensor, most: int) -> bool:
    rows = A.shape[-1]
    return isinstance(rows, int) and 0 < rows <= most and not A.is_complex()


def _is_vector(A: Tensor, B: Tensor) -> bool:
    """Whether B is a vector for each matrix, as torch tells that."""
    if B.dim() == 1:
        return True
    same = zip(B.shape, A.shape, strict=False)
    return B.dim() == A.dim() - 1 and all(statically_known_true(b == a) for b, a in same)


def _same_batch(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    shape = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])  # type: ignore[no-untyped-call]
    return A.expand(*shape, *A.shape[-2:]), B.expand(*shape, *B.shape[-2:])


def _by_minors(A: Tensor) -> Tensor:
    """Along the first row: also its gradient has a value where the matrix is singular."""
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
    """[A | others] with nothing in A but its diagonal (Gauss and Jordan), that diagonal, and -1 for an odd number of rows that
    changed places."""
    n = A.shape[-1]
    rows = torch.cat((A, *others), -1)
    places = torch.arange(n).unsqueeze(-1)
    pivots, sign = [], torch.ones_like(A[..., 0, 0])
    for i in range(n):
        at = rows[..., i:, i].detach().abs().argmax(-1) + i
        there = at.unsqueeze(-1).unsqueeze(-1)
        here = rows[..., i : i + 1, :]
        chosen = rows.gather(-2, there.expand(*here.shape))
        rows = torch.where(places == i, chosen, torch.where(places == there, here, rows))
        pivots.append(chosen[..., 0, i])
        sign = torch.where(at == i, sign, -sign)
        pivot = chosen[..., i : i + 1]
        by = rows[..., i : i + 1] / torch.where(pivot == 0, 1.0, pivot)
        rows = rows - torch.where(places == i, 0.0, by) * chosen
    return rows, pivots, sign
