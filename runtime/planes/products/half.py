"""Products of rows with a matrix in half precision, by the library's own code, with the bits that `generate()` gets in it.

Where a processor has no instructions for half precision, the library takes row after row and a row's bits do not depend on the others.
Where it has some (AVX512-BF16, AMX), it takes a row that comes alone another way than several. A program that decodes by itself runs a
prompt as one piece and then one position at a time, so that is what a row gets here too, whoever else runs: each piece has a
product of its own. Many answers at once then read the matrix once each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Product = Callable[[torch.Tensor], torch.Tensor]  # of rows (..., in): (..., out)

_TRIED_ELEMENTS = 1 << 20  # of a matrix; a part of a larger one tells
_TRIED_ROWS = (2, 3, 5, 8, 16, 40)
_SPARE_COLUMNS = 3  # that make a sum cancel out


def is_batch_invariant(matrix: torch.Tensor, *, added: bool) -> bool:
    """Whether a row's product with a matrix of this shape and dtype has the same bits alone as among others. `matrix`: (out, in), or
    (in, out) where it is `added`, the one of `aten.addmm`.

    Sums that are rounded to half precision look alike for most values whatever order they were made in, so these cancel out: what is left
    is what the order did.
    """
    width = matrix.shape[0 if added else 1]
    outputs = min(matrix.shape[1 if added else 0], max(1, _TRIED_ELEMENTS // max(1, width)))
    row, part = _cancelling(outputs, width, matrix)
    if added:
        part = part.t().contiguous()
    bias = part.new_zeros(outputs)

    def product(count: int) -> torch.Tensor:
        rows = row.repeat(1, count, 1)
        if added:
            return torch.addmm(bias, rows[0], part)[None]
        return torch.cat([torch._C._nn.linear(rows, part, each) for each in (None, bias)], -1)

    alone = product(1)
    return all(torch.equal(each, alone.expand_as(each)) for each in map(product, _TRIED_ROWS))


def _cancelling(outputs: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row (1, 1, width) and a matrix (outputs, width) whose product is all but zero."""
    made = torch.Generator().manual_seed(0)
    row = torch.randn(width, generator=made).to(like.dtype)
    part = torch.randn(outputs, width, generator=made).to(like.dtype)
    rest = max(0, width - _SPARE_COLUMNS)
    row[rest:] = 1
    left = part[:, :rest].double() @ row[:rest].double()
    for column in range(rest, width):
        part[:, column] = (-left).to(like.dtype)
        left += part[:, column].double()
    return row.view(1, 1, width).to(like.device), part.to(like.device)


class ByPiece:
    """The products of one run: which rows come together is said before it (`begin`)."""

    def __init__(self) -> None:
        # Of pieces, one after the other; those whose positions run singly are several
        self._lengths: Sequence[int] = ()

    def begin(self, lengths: Sequence[int], singly: Sequence[bool], rows: int) -> None:
        """So many positions of each piece, `rows` with the padding."""
        pieces = [
            each
            for length, alone in zip(lengths, singly, strict=True)
            for each in ([1] * length if alone else [length])
        ]
        self._lengths = pieces + [rows - sum(lengths)] * (rows > sum(lengths))

    def linear(self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._each(rows, lambda part: torch._C._nn.linear(part, matrix, bias))

    def addmm(
        self, bias: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, beta: float, alpha: float
    ) -> torch.Tensor:
        return self._each(rows, lambda part: torch.addmm(bias, part, matrix, beta=beta, alpha=alpha))

    def _each(self, rows: torch.Tensor, product: Product) -> torch.Tensor:
        """Along the first dimension that has more than one row: all positions, or of each piece the last ones."""
        along = next((axis for axis, size in enumerate(rows.shape[:-1]) if size > 1), None)
        if along is None:
            return product(rows)
        count = rows.shape[along]
        lengths = self._lengths if count == sum(self._lengths) else [1] * count
        if len(lengths) == 1:
            return product(rows)
        return torch.cat([product(part) for part in torch.split(rows, list(lengths), along)], along)
