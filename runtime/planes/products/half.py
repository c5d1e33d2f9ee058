"""Products of rows with a matrix in half precision, by the library's kernels, with the bits that `generate()` gets in half precision.

On a processor without instructions for half precision, the library multiplies row by row, which is batch-invariant (`half_products` does
the same faster). With them (AVX512-BF16, AMX), it runs another kernel for one row than for several. `generate()` prefills a prompt in
one piece and then decodes one position at a time. To get the same bits in any batch, each piece has a product of its own here; so a
batch of many decoding sessions reads the matrix once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

Product = Callable[[torch.Tensor], torch.Tensor]  # of rows (..., in): (..., out)
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # rows, matrix, bias

# Where the library says whether it has instructions for a dtype; a build without oneDNN has neither
_CHECKS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
HALF = frozenset(_CHECKS)
_TRIAL_ELEMENTS = 1 << 20  # of a matrix; of a larger one, a part is tried
TRIAL_ROWS = (2, 3, 5, 8, 16, 40)
WIDEST_TRIAL = (
    1 << 16
)  # columns; a trial of more would take gigabytes, for a matrix that only a stranger would make
_CANCELLING_COLUMNS = 3  # whose weights make the sums cancel out


@cache
def computes_half(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU, and the library, have instructions for products in half precision."""
    supported = getattr(torch.ops.mkldnn, _CHECKS[dtype], None)
    return supported is not None and bool(supported())


def rounds_before_bias(rows: torch.Tensor) -> bool:
    """Whether `aten.linear` of the library rounds the products of these rows before it adds a bias, and the sums again."""
    return rows.dim() > 2 and not rows.is_contiguous()


def is_half_batch_invariant(matrix: torch.Tensor, *, is_addmm: bool) -> bool:
    """Whether a row's product with a matrix of this shape and dtype has the same bits alone as in a batch. `matrix`: (out, in), or
    (in, out) where `is_addmm`.

    After rounding to half precision, sums of most values are equal in any reduction order. So the trial uses values whose sums cancel
    out: what remains is the rounding error of the order.
    """
    width = matrix.shape[0 if is_addmm else 1]
    if width > WIDEST_TRIAL:
        return False
    outputs = min(matrix.shape[1 if is_addmm else 0], max(1, _TRIAL_ELEMENTS // max(1, width)))
    row, part = cancelling(outputs, width, matrix)
    if is_addmm:
        part = part.t().contiguous()
    bias = part.new_zeros(outputs)

    def product(count: int) -> torch.Tensor:
        rows = row.repeat(1, count, 1)
        if is_addmm:
            return torch.addmm(bias, rows[0], part)[None]
        return torch.cat([torch._C._nn.linear(rows, part, each) for each in (None, bias)], -1)

    alone = product(1)
    return all(torch.equal(each, alone.expand_as(each)) for each in map(product, TRIAL_ROWS))


def cancelling(outputs: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row (1, 1, width) and a matrix (outputs, width) whose product is nearly zero."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(width, generator=generator).to(like.dtype)
    matrix = torch.randn(outputs, width, generator=generator).to(like.dtype)
    plain_columns = max(0, width - _CANCELLING_COLUMNS)
    row[plain_columns:] = 1
    residual = matrix[:, :plain_columns].double() @ row[:plain_columns].double()
    for column in range(plain_columns, width):
        matrix[:, column] = (-residual).to(like.dtype)
        residual += matrix[:, column].double()
    return row.view(1, 1, width).to(like.device), matrix.to(like.device)


class ByPiece:
    """The products of a stage in half precision, one for each piece of a run. `begin` sets the pieces before each run."""

    def __init__(self) -> None:
        # Rows of each product; a piece that runs `singly` has one for each position.
        self._lengths: Sequence[int] = ()

    def begin(self, lengths: Sequence[int], singly: Sequence[bool], rows: int) -> None:
        """Set the positions of each piece of the next run; `rows` includes padding."""
        pieces = [
            each
            for length, single in zip(lengths, singly, strict=True)
            for each in ([1] * length if single else [length])
        ]
        self._lengths = pieces + [rows - sum(lengths)] * (rows > sum(lengths))

    def linear(self, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._each(rows, lambda part: torch._C._nn.linear(part, matrix, bias))

    def unless_contiguous(self, product: Linear) -> Linear:
        """`product` where it has the bits of a row alone, and products by piece otherwise: the library rounds rows of a view twice, but a row of
        a view is contiguous."""

        def linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rounds_twice = bias is not None and rounds_before_bias(rows)
            return (self.linear if rounds_twice else product)(rows, matrix, bias)

        return linear

    def addmm(
        self, bias: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, beta: float, alpha: float
    ) -> torch.Tensor:
        return self._each(rows, lambda part: torch.addmm(bias, part, matrix, beta=beta, alpha=alpha))

    def _each(self, rows: torch.Tensor, product: Product) -> torch.Tensor:
        """Split along the first dimension of more than one row, which has all positions, or the last ones of each piece."""
        along = next((axis for axis, size in enumerate(rows.shape[:-1]) if size > 1), None)
        if along is None:
            return product(rows)
        count = rows.shape[along]
        lengths = self._lengths if count == sum(self._lengths) else [1] * count
        if len(lengths) == 1:
            return product(rows)
        return torch.cat([product(part) for part in torch.split(rows, list(lengths), along)], along)
