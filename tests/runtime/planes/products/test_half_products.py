"""Products in half precision by machine code: in the order of the library, whatever this machine's has, and with its bits."""

from __future__ import annotations

import pytest
import torch

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.runtime.planes.matrices import Matrices
from fusion.runtime.planes.products import half_products
from fusion.runtime.planes.products.half import cancelling, is_half_batch_invariant
from fusion.runtime.planes.products.half_code import PARTS, SUMS, product
from fusion.runtime.planes.products.half_products import in_machine_code

HALF = [torch.bfloat16, torch.float16]


def in_the_order_of_a_dot_product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The products in float32: 64 sums of each output, in the order of columns, added by halving, and eight of the columns that are left."""
    products = rows.float()[:, None] * matrix.float()[None]  # exact
    aligned = products.shape[-1] // SUMS * SUMS
    return added(products[..., :aligned], SUMS) + added(products[..., aligned:], 8)


def added(products: torch.Tensor, count: int) -> torch.Tensor:
    sums = torch.zeros(*products.shape[:2], count)
    for start in range(0, products.shape[-1], count):
        sums = sums + products[..., start : start + count]
    while sums.shape[-1] > 1:
        sums = sums[..., : sums.shape[-1] // 2] + sums[..., sums.shape[-1] // 2 :]
    return sums[..., 0]


@pytest.mark.skipif(product(True) is None, reason="no machine code here")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("columns", [16, 64, 208, 240])
def test_machine_code_adds_up_in_the_order_of_a_dot_product(dtype: torch.dtype, columns: int) -> None:
    assert PARTS * 16 == SUMS
    row, sums_cancel = cancelling(37, columns, torch.empty(0, dtype=dtype))
    for outputs in (1, 5, 16, 37):
        matrix = sums_cancel[:outputs].contiguous()
        for count in range(1, 14):
            rows = torch.cat([row[0], torch.randn(12, columns).to(dtype)])[:count]
            bias = torch.randn(outputs).to(dtype)
            made = half_products.multiply(rows, matrix, bias)
            assert torch.equal(made, (in_the_order_of_a_dot_product(rows, matrix) + bias).to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_machine_code_has_the_bits_of_the_library_or_is_not_used(dtype: torch.dtype) -> None:
    row, matrix = cancelling(40, 176, torch.empty(0, dtype=dtype))
    if not in_machine_code(matrix):
        pytest.skip("the library adds up in another order here")
    for count in (1, 2, 7, 16, 33):
        for rows in (row.expand(1, count, 176), torch.randn(2, count, 176).to(dtype)):
            assert torch.equal(
                half_products.linear(rows, matrix, None), torch._C._nn.linear(rows, matrix, None)
            )


def test_machine_code_is_not_used_for_other_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(32, 128).bfloat16()
    assert not in_machine_code(torch.randn(32, 72).bfloat16())
    assert not in_machine_code(matrix.t().contiguous().t())
    assert not in_machine_code(matrix[:0])
    library = torch._C._nn.linear
    monkeypatch.setattr(half_products, "_has_library_bits", half_products._has_library_bits.__wrapped__)
    monkeypatch.setattr(torch._C._nn, "linear", lambda *args: library(*args) + 2**-6)
    assert not in_machine_code(matrix)


@pytest.mark.parametrize("transposed", [False, True])
def test_no_trial_is_run_for_a_matrix_wider_than_a_model_has(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = 1 << 30  # of which one row in float32 takes 4 GiB
    matrix = torch.empty(1, dtype=torch.bfloat16).expand(*((columns, 16) if transposed else (16, columns)))
    monkeypatch.setattr(torch.Tensor, "is_contiguous", lambda self: True)
    assert not in_machine_code(matrix, transposed=transposed)
    assert not is_half_batch_invariant(matrix, is_addmm=transposed)


@pytest.mark.parametrize("dtype", HALF)
def test_addmm_has_the_bits_of_the_library(dtype: torch.dtype) -> None:
    row, matrix = cancelling(48, 77, torch.empty(0, dtype=dtype))
    stored, bias = matrix.t().contiguous(), torch.randn(48).to(dtype)
    if not in_machine_code(stored, transposed=True):
        pytest.skip("the library adds up in another order here")
    for offset in (torch.zeros_like(bias), bias):
        for rows in (row[0], row[0].expand(9, 77), torch.randn(33, 77).to(dtype)):
            assert torch.equal(
                half_products.addmm(offset, rows, stored, 1, 1), torch.addmm(offset, rows, stored)
            )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_machine_code_have_the_bits_of_the_library(dtype: torch.dtype, transposed: bool) -> None:
    row, matrix = cancelling(32, 80, torch.empty(0, dtype=dtype))
    if not in_machine_code(matrix):
        pytest.skip("the library adds up in another order here")
    weight = torch.stack([matrix, matrix.flip(0), torch.randn(32, 80).to(dtype)])
    rows = torch.cat([row[0].expand(9, 80), torch.randn(4, 80).to(dtype)])
    ids = torch.tensor([1, 2, 1, 1, 3, 1, 7, 0, 1, 2, 3, 3, 3])  # of experts 1, 2 and 3; others are not held
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    made = half_products.expert_linear(rows, ids, stored, None, 1, 8, transposed)
    for expert in range(8):
        group = ids == expert
        matrix = stored[expert - 1] if 1 <= expert <= 3 else torch.zeros_like(stored[0])
        library = torch.nn.functional.linear(rows[group], matrix.t() if transposed else matrix)
        assert torch.equal(made[group], library)


@pytest.mark.parametrize("dtype", HALF)
def test_a_stage_multiplies_with_experts_by_machine_code(dtype: torch.dtype) -> None:
    if not in_machine_code(torch.empty(8, 64, dtype=dtype)):
        pytest.skip("the library adds up in another order here")
    name = str(dtype).removeprefix("torch.")
    given = Input("x", TensorType(("n", 64), name)), Input("ids", TensorType(("n",), "int64"))
    variable = Variable("w", TensorType((2, 8, 64), name))
    args = (Ref("x"), Ref("ids"), Ref("w"), None, 0, 2, False)
    types = {Ref(each.name): each.type for each in (*given, variable)}
    node = Node("y", "fusion.expert_linear", args, infer("fusion.expert_linear", args, types))
    graph = Graph(given, (variable,), (node,), (Ref("y"),))
    found = Matrices(graph, {"w": torch.randn(2, 8, 64).to(dtype)}, torch.device("cpu"))
    assert found.batch_invariant and found.least_rows == 1
    assert found.products(batched=True)["y"] is half_products.expert_linear


@pytest.mark.skipif(product(True) is None, reason="no machine code here")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("columns", [1, 4, 63, 130])
def test_machine_code_adds_up_the_columns_of_a_transposed_matrix_in_four_sums(
    dtype: torch.dtype, columns: int
) -> None:
    row, sums_cancel = cancelling(48, columns, torch.empty(0, dtype=dtype))
    matrix = sums_cancel.t().contiguous()
    for count in range(1, 14):
        rows = torch.cat([row[0], torch.randn(12, columns).to(dtype)])[:count]
        products = rows.float()[:, :, None] * matrix.float()[None]
        sums = [torch.zeros(count, 48) for _ in range(4)]
        for column in range(columns):
            n = column % 4 if column < columns // 4 * 4 else 0
            sums[n] = sums[n] + products[:, column]
        expected = sums[0] + sums[1] + sums[2] + sums[3]
        assert torch.equal(half_products.multiply_transposed(rows, matrix), expected.to(dtype))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("count", "columns", "outputs"), [(1, 64, 48), (2, 64, 48), (9, 77, 32), (40, 64, 131), (3, 8, 16)]
)
def test_a_batch_of_products_has_the_bits_of_the_library(
    dtype: torch.dtype, count: int, columns: int, outputs: int
) -> None:
    row, matrix = cancelling(outputs, columns, torch.empty(0, dtype=dtype))
    rows = row.expand(2, count, columns).contiguous()
    rows[1] = torch.randn(count, columns)
    stored = torch.stack([matrix, torch.randn(outputs, columns).to(dtype)])
    apart = torch.stack([stored, stored], -1)[..., 0].transpose(
        1, 2
    )  # neither columns nor outputs are adjacent
    for matrices in (stored.transpose(1, 2), stored.transpose(1, 2).contiguous(), apart):
        assert torch.equal(half_products.bmm(rows, matrices), torch.bmm(rows, matrices))
