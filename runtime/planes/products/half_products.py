"""Products in half precision by machine code (`half_code`), with the bits of the library's own: for linear layers, experts and batches.

They are used on a CPU without instructions for half precision, where the library multiplies row by row, and after a comparison with it,
of values whose sums cancel out: what remains is the rounding error of the order. Of a single row and a matrix (out, in), the library
is as fast.
"""

from __future__ import annotations

from functools import cache

import torch

from fusion.runtime.planes.products.experts import by_expert
from fusion.runtime.planes.products.half import (
    HALF,
    TRIAL_ROWS,
    WIDEST_TRIAL,
    cancelling,
    computes_half,
    rounds_before_bias,
)
from fusion.runtime.planes.products.half_code import COLUMNS, PARTS, SUMS, product, transposed_product
from fusion.runtime.planes.products.machine_code import LANES, Function, run_blocks

_TRIAL_BLOCKS = 3
_BIASED_ROWS = 4  # of fewer rows, products are tried with a bias as well: it is added to each row alone
_LEAST_PRODUCTS = (
    400  # fewer are added up in another order by `torch.bmm`, as which a view's linear layer may run
)


def linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(..., out): `aten.linear` of rows (..., in) with a matrix (out, in) that `in_machine_code` accepts."""
    if (
        not _fits(rows, matrix, matrix.shape[1])
        or rows.numel() == rows.shape[-1]
        or matrix.numel() < _LEAST_PRODUCTS
        or (bias is not None and rounds_before_bias(rows))
    ):
        return torch._C._nn.linear(rows, matrix, bias)
    return multiply(rows.reshape(-1, rows.shape[-1]), matrix, bias).view(*rows.shape[:-1], len(matrix))


def linear_transposed(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(count, out): the same of rows (count, in) with a matrix (in, out)."""
    if not _fits(rows, matrix, matrix.shape[0]):
        return torch._C._nn.linear(rows, matrix.t(), bias)
    return multiply_transposed(rows, matrix, bias)


def addmm(bias: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, *_: object) -> torch.Tensor:
    """`aten.addmm` with beta and alpha 1 of rows (count, in) with a matrix (in, out) that `in_machine_code` accepts."""
    return linear_transposed(rows, matrix, bias)


def expert_linear(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    first: int,
    of: int,
    transposed: bool,
) -> torch.Tensor:
    """`fusion.expert_linear` with matrices that `in_machine_code` accepts."""
    product = linear_transposed if transposed else linear

    def of_expert(group: torch.Tensor, expert: int) -> torch.Tensor:
        return product(group, weight[expert], None if bias is None else bias[expert])

    held, *shape = weight.shape
    return by_expert(rows, ids, first, held, shape[1 if transposed else 0], of_expert)


def bmm(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`torch.bmm` of rows (n, count, in) with matrices (n, in, out), which may be a view of (n, out, in). Without gradients."""
    columns, outputs = matrices.shape[1:]
    transposed = matrices.stride(2) == 1
    if (
        not (transposed or matrices.stride(1) == 1)  # the library adds up in another order
        or (outputs if transposed else columns) % COLUMNS
        or columns * rows.shape[1] * outputs < _LEAST_PRODUCTS
        or not _fits(rows, matrices, columns)
        or (rows.shape[1] == 1 and not transposed)
        or rows.dtype not in HALF
        or rows.device.type != "cpu"
        or not _bmm_has_library_bits(rows.dtype)
    ):
        return torch.bmm(rows, matrices)
    return torch.stack(
        [
            multiply_transposed(each, matrix.contiguous())
            if transposed
            else multiply(each, matrix.t().contiguous())
            for each, matrix in zip(rows, matrices, strict=True)
        ]
    )


def in_machine_code(matrix: torch.Tensor, *, transposed: bool = False) -> bool:
    """Whether these functions may multiply with a matrix (out, in), or (in, out) if `transposed`, in half precision: on this machine they
    have the bits of the library."""
    return (
        matrix.device.type == "cpu"
        and matrix.is_contiguous()
        and matrix.shape[1] % COLUMNS == 0 < matrix.numel()
        and _has_library_bits(matrix.dtype, matrix.shape[0 if transposed else 1], transposed)
    )


def multiply(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(count, out), of rows (count, in) and a matrix (out, in)."""
    count, columns = rows.shape
    aligned = columns - columns % SUMS
    inputs = rows.float()
    parts = inputs[:, :aligned].view(count, -1, PARTS, LANES).transpose(1, 2)
    inputs = torch.cat([parts.reshape(count, aligned), inputs[:, aligned:]], 1)
    return _run(product(matrix.dtype == torch.bfloat16), inputs, matrix, len(matrix), bias)


def multiply_transposed(
    rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(count, out), of rows (count, in) and a matrix (in, out)."""
    code = transposed_product(matrix.dtype == torch.bfloat16)
    return _run(code, rows.float().contiguous(), matrix, matrix.shape[1], bias)


def _run(
    code: Function | None, inputs: torch.Tensor, matrix: torch.Tensor, outputs: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """The code would read beyond rows of another width, or a matrix that is not contiguous."""
    count, columns = inputs.shape
    assert code is not None and matrix.numel() == outputs * columns and matrix.is_contiguous()
    output = torch.empty(count, outputs)
    run_blocks(
        code,
        (inputs.data_ptr(), matrix.data_ptr(), output.data_ptr()),
        -(-outputs // LANES),
        (count, columns, outputs),
        multiply_adds=count * outputs * columns,
        threads=torch.get_num_threads(),
    )
    if bias is not None:
        output += bias
    return output.to(matrix.dtype)


def _fits(rows: torch.Tensor, matrix: torch.Tensor, columns: int) -> bool:
    """Whether these are rows of the dtype and width of a matrix; the library refuses others."""
    return rows.numel() > 0 and rows.shape[-1] == columns and rows.dtype == matrix.dtype


@cache
def _has_library_bits(dtype: torch.dtype, columns: int, transposed: bool) -> bool:
    """Whether products with matrices of so many columns have the bits of `aten.linear`, and of `aten.addmm` if `transposed`."""
    code = transposed_product if transposed else product
    if columns > WIDEST_TRIAL or computes_half(dtype) or code(dtype == torch.bfloat16) is None:
        return False
    # A part of a block, too, where the code supports that
    outputs = _TRIAL_BLOCKS * LANES + (0 if transposed else 5)
    most = max(TRIAL_ROWS)
    row, sums_cancel = cancelling(outputs, columns, torch.empty(0, dtype=dtype))
    generator = torch.Generator().manual_seed(0)
    others, matrix, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((most, columns), (outputs, columns), (outputs,))
    )
    return all(
        _same_bits(rows[:count], weight.t().contiguous() if transposed else weight, offset, transposed)
        for rows, weight in ((row[0].expand(most, columns), sums_cancel), (others, matrix))
        for count in (1, *TRIAL_ROWS)
        for offset in ((None, torch.zeros_like(bias), bias) if count < _BIASED_ROWS else (None,))
    )


def _same_bits(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> bool:
    """Whether the code and the library make the same of these. `matrix`: (out, in), or (in, out) if `transposed`."""
    if not transposed:
        return torch.equal(multiply(rows, matrix, bias), torch._C._nn.linear(rows, matrix, bias))
    made = multiply_transposed(rows, matrix, bias)
    return torch.equal(made, torch._C._nn.linear(rows, matrix.t(), bias)) and (
        bias is None or torch.equal(made, torch.addmm(bias, rows, matrix))
    )


@cache
def _bmm_has_library_bits(dtype: torch.dtype) -> bool:
    if computes_half(dtype) or not all(
        code(dtype == torch.bfloat16) for code in (product, transposed_product)
    ):
        return False
    for columns in (COLUMNS, 4 * SUMS + COLUMNS, 4 * SUMS + COLUMNS + 3):
        row, matrix = cancelling(_TRIAL_BLOCKS * LANES, columns, torch.empty(0, dtype=dtype))
        for count in (1, *TRIAL_ROWS):
            rows, stored = row[0].repeat(count, 1), matrix.t().contiguous()
            if not torch.equal(multiply_transposed(rows, stored), torch.bmm(rows[None], stored[None])[0]):
                return False
            if columns % COLUMNS == 0 and not torch.equal(
                multiply(rows, matrix), torch.bmm(rows[None], matrix.t()[None])[0]
            ):
                return False
    return True
