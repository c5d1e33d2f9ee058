"""Products of rows with a matrix in half precision, with the bits that `generate()` gets in half precision from the library's kernels.

On a processor without instructions for half precision, the library multiplies row by row, which is batch-invariant. There `linear` has
the same bits from machine code (`half_code`), in a quarter of the time for many rows. With such instructions
(AVX512-BF16, AMX), the library runs another kernel for one row than for several. `generate()` prefills a prompt in one piece and then decodes
one position at a time. To get the same bits in any batch, each piece has a product of its own here; so a batch of many decoding
sessions reads the matrix once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from fusion.runtime.planes.products.experts import by_expert
from fusion.runtime.planes.products.half_code import COLUMNS, PARTS, SUMS, product, transposed_product
from fusion.runtime.planes.products.machine_code import LANES, Function, run_blocks

Product = Callable[[torch.Tensor], torch.Tensor]  # of rows (..., in): (..., out)

_TRIAL_ELEMENTS = 1 << 20  # of a matrix; of a larger one, a part is tried
_TRIAL_ROWS = (2, 3, 5, 8, 16, 40)
_TRIAL_OUTPUTS = 53  # more than three blocks, and a part of one
_HALF = frozenset({torch.bfloat16, torch.float16})
_LEAST_PRODUCTS = 400  # fewer are added up in another order by `torch.bmm`
_CANCELLING_COLUMNS = 3  # whose weights make the sums cancel out


def is_half_batch_invariant(matrix: torch.Tensor, *, is_addmm: bool) -> bool:
    """Whether a row's product with a matrix of this shape and dtype has the same bits alone as in a batch. `matrix`: (out, in), or
    (in, out) where `is_addmm`.

    After rounding to half precision, sums of most values are equal in any reduction order. So the trial uses values whose sums cancel
    out: what remains is the rounding error of the order.
    """
    width = matrix.shape[0 if is_addmm else 1]
    outputs = min(matrix.shape[1 if is_addmm else 0], max(1, _TRIAL_ELEMENTS // max(1, width)))
    row, part = _cancelling(outputs, width, matrix)
    if is_addmm:
        part = part.t().contiguous()
    bias = part.new_zeros(outputs)

    def product(count: int) -> torch.Tensor:
        rows = row.repeat(1, count, 1)
        if is_addmm:
            return torch.addmm(bias, rows[0], part)[None]
        return torch.cat([torch._C._nn.linear(rows, part, each) for each in (None, bias)], -1)

    alone = product(1)
    return all(torch.equal(each, alone.expand_as(each)) for each in map(product, _TRIAL_ROWS))


def _cancelling(outputs: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(..., out): `aten.linear` of rows (..., in) with a matrix (out, in) that `in_machine_code` accepts."""
    *outer, columns = rows.shape
    count = rows.numel() // max(1, columns)
    if count < 2 or rows.dtype != matrix.dtype or columns != matrix.shape[1]:
        return torch._C._nn.linear(rows, matrix, bias)
    code = product(matrix.dtype == torch.bfloat16)
    assert code is not None
    return _multiply(code, rows.reshape(count, columns), matrix, bias).view(*outer, matrix.shape[0])


def expert_linear(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    *_: object,
) -> torch.Tensor:
    """`fusion.expert_linear` with matrices (held, out, in) that `in_machine_code` accepts."""

    def product(group: torch.Tensor, expert: int) -> torch.Tensor:
        return linear(group, weight[expert], None if bias is None else bias[expert])

    return by_expert(rows, ids, first, weight.shape[0], weight.shape[1], product)


def bmm(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`torch.bmm` of rows (n, count, columns) with matrices (n, columns, outputs) or, as a view, (n, outputs, columns), without a
    gradient."""
    _, count, columns = rows.shape
    outputs = matrices.shape[2]
    transposed = matrices.stride(2) == 1
    if (
        count < 2
        or rows.device.type != "cpu"
        or rows.dtype not in _HALF
        or (outputs if transposed else columns) % COLUMNS
        or columns * count * outputs < _LEAST_PRODUCTS
        or not _bmm_has_library_bits(rows.dtype)
    ):
        return torch.bmm(rows, matrices)
    return torch.stack(
        [
            _multiply_transposed(each, matrix.contiguous())
            if transposed
            else linear(each, matrix.t().contiguous(), None)
            for each, matrix in zip(rows, matrices, strict=True)
        ]
    )


@cache
def _bmm_has_library_bits(dtype: torch.dtype) -> bool:
    code = transposed_product(dtype == torch.bfloat16)
    if code is None or not _has_library_bits(dtype, 4 * SUMS + COLUMNS):
        return False
    for columns in (COLUMNS, 4 * SUMS + COLUMNS, 4 * SUMS + COLUMNS + 3):
        row, matrix = _cancelling(3 * LANES, columns, torch.empty(0, dtype=dtype))
        rows = row.expand(1, max(_TRIAL_ROWS), columns).contiguous()
        for count in _TRIAL_ROWS:
            library = torch.bmm(rows[:, :count], matrix.t().contiguous()[None])[0]
            if not torch.equal(_multiply_transposed(rows[0, :count], matrix.t().contiguous()), library):
                return False
            by_dots = torch.bmm(rows[:, :count], matrix.t()[None])[0]
            if columns % COLUMNS == 0 and not torch.equal(linear(rows[0, :count], matrix, None), by_dots):
                return False
    return True


def _multiply_transposed(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """(count, out), of rows (count, in) and a matrix (in, out). The code would read beyond rows of another width."""
    (count, columns), outputs = rows.shape, matrix.shape[1]
    code = transposed_product(matrix.dtype == torch.bfloat16)
    assert code is not None and matrix.shape[0] == columns
    inputs, output = rows.float().contiguous(), torch.empty(count, outputs)
    _run(code, inputs, matrix, output, columns)
    return output.to(matrix.dtype)


def _run(
    code: Function, inputs: torch.Tensor, matrix: torch.Tensor, output: torch.Tensor, columns: int
) -> None:
    count, outputs = output.shape
    run_blocks(
        code,
        (inputs.data_ptr(), matrix.data_ptr(), output.data_ptr()),
        -(-outputs // LANES),
        (count, columns, outputs),
        multiply_adds=count * outputs * columns,
        threads=torch.get_num_threads(),
    )


def in_machine_code(matrix: torch.Tensor) -> bool:
    """Whether `linear` may multiply with this matrix (out, in) in half precision: on this machine its bits are those of the library."""
    return (
        matrix.device.type == "cpu"
        and matrix.is_contiguous()
        and matrix.shape[1] % COLUMNS == 0 < matrix.numel()
        and _has_library_bits(matrix.dtype, matrix.shape[1])
    )


@cache
def _has_library_bits(dtype: torch.dtype, columns: int) -> bool:
    code = product(dtype == torch.bfloat16)
    if code is None:
        return False
    generator = torch.Generator().manual_seed(0)
    most = max(_TRIAL_ROWS)
    row, cancelling = _cancelling(_TRIAL_OUTPUTS, columns, torch.empty(0, dtype=dtype))
    rows, matrix, bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((most, columns), (_TRIAL_OUTPUTS, columns), (_TRIAL_OUTPUTS,))
    )
    return all(
        torch.equal(
            _multiply(code, operands[:count], weights, offsets),
            torch._C._nn.linear(operands[:count], weights, offsets),
        )
        for operands, weights in ((row[0].expand(most, columns), cancelling), (rows, matrix))
        for offsets in (None, bias)
        for count in _TRIAL_ROWS
    )


def _multiply(
    code: Function, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """(count, out), of rows (count, in). The code would read beyond rows of another width."""
    (count, columns), outputs = rows.shape, len(matrix)
    inputs = rows.float()
    aligned = columns - columns % SUMS
    parts = inputs[:, :aligned].view(count, -1, PARTS, LANES).transpose(1, 2)
    inputs = torch.cat([parts.reshape(count, aligned), inputs[:, aligned:]], 1)
    output = torch.empty(count, outputs)
    _run(code, inputs, matrix, output, columns)
    if bias is not None:
        output += bias
    return output.to(matrix.dtype)


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
