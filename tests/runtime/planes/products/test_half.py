"""Products in half precision: a row gets the bits of its own piece, whatever the library makes of rows that come alone."""

from __future__ import annotations

import pytest
import torch

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.runtime.planes.matrices import Matrices
from fusion.runtime.planes.products import half
from fusion.runtime.planes.products.half import ByPiece, _cancelling, in_machine_code, is_half_batch_invariant
from fusion.runtime.planes.products.half_code import PARTS, SUMS, product

HALF = [torch.bfloat16, torch.float16]


def of_one_product(op: str, dtype: torch.dtype) -> tuple[Graph, dict[str, torch.Tensor], torch.Tensor]:
    """Whose bits show in what order the library adds up, and a row for it."""
    name = str(dtype).removeprefix("torch.")
    row, matrix = _cancelling(48, 64, torch.empty(0, dtype=dtype))
    given = Input("x", TensorType(("n", 64) if op == "aten.addmm" else (1, "n", 64), name))
    values = {"w": matrix.t().contiguous() if op == "aten.addmm" else matrix, "b": matrix.new_zeros(48)}
    variables = tuple(Variable(each, TensorType(tuple(value.shape), name)) for each, value in values.items())
    refs = Ref("x"), Ref("w"), Ref("b")
    args = (refs[2], refs[0], refs[1], 1, 1) if op == "aten.addmm" else refs
    known = {Ref("x"): given.type, **{Ref(v.name): v.type for v in variables}}
    node = Node("y", op, args, infer(op, args, known))
    return Graph((given,), variables, (node,), (Ref("y"),)), values, row


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op", ["aten.linear", "aten.addmm"])
def test_a_row_has_the_bits_of_its_own_piece_in_any_company(op: str, dtype: torch.dtype) -> None:
    graph, values, row = of_one_product(op, dtype)
    found = Matrices(graph, values, torch.device("cpu"))
    assert found.batch_invariant
    matrix, bias = found.prepacked["w"], found.prepacked["b"]

    def of_the_library(rows: torch.Tensor) -> torch.Tensor:
        if op == "aten.addmm":
            return torch.addmm(bias, rows[0], matrix)[None]
        return torch._C._nn.linear(rows, matrix, bias)

    lengths, singly = [1, 5, 1, 3], [False, False, False, True]
    rows = row.repeat(1, 12, 1)  # two of them are padding
    found.by_piece.begin(lengths, singly, 12)
    product = found.products(batched=True).get("y")
    if product is None:
        made = of_the_library(rows)
    elif op == "aten.addmm":
        made = product(bias, rows[0], matrix, 1, 1)[None]
    else:
        made = product(rows, matrix, bias)
    alone, five = of_the_library(row), of_the_library(row.repeat(1, 5, 1))
    assert torch.equal(made[:, :10], torch.cat([alone, five, alone, alone, alone, alone], 1))


def test_of_the_last_positions_each_comes_alone() -> None:
    rows, matrix = torch.randn(1, 3, 8), torch.randn(4, 8)
    seen = []
    products = ByPiece()
    products.begin([4, 1, 1], [False, False, False], 6)
    products._each(rows, lambda part: seen.append(part.shape[1]) or part @ matrix.t())  # type: ignore[func-returns-value]
    assert seen == [1, 1, 1]
    products._each(torch.randn(1, 6, 8), lambda part: seen.append(part.shape[1]) or part @ matrix.t())  # type: ignore[func-returns-value]
    assert seen[3:] == [4, 1, 1]


@pytest.mark.parametrize("width", [1, 2, 3, 16, 64])
def test_a_library_that_adds_a_lone_row_up_otherwise_is_found_out(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def added_up(rows: torch.Tensor, matrix: torch.Tensor, bias: object, *, least: int) -> torch.Tensor:
        products = (rows.float().unsqueeze(-2) * matrix.float()).unbind(-1)
        return sum(products if rows.shape[1] >= least else products[::-1], start=torch.zeros(())).to(
            rows.dtype
        )

    matrix = torch.empty(32, width, dtype=torch.bfloat16)
    for least in (1, 2, 6):
        monkeypatch.setattr(half.torch._C._nn, "linear", lambda *args, n=least: added_up(*args, least=n))
        assert is_half_batch_invariant(matrix, is_addmm=False) == (least == 1 or width <= 3)


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
    code = product(dtype == torch.bfloat16)
    assert code is not None
    row, cancelling = _cancelling(37, columns, torch.empty(0, dtype=dtype))
    for outputs in (1, 5, 16, 37):
        matrix = cancelling[:outputs].contiguous()
        for count in range(1, 14):
            rows = torch.cat([row[0], torch.randn(12, columns).to(dtype)])[:count]
            bias = torch.randn(outputs).to(dtype)
            made = half._multiply(code, rows, matrix, bias)
            assert torch.equal(made, (in_the_order_of_a_dot_product(rows, matrix) + bias).to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_machine_code_has_the_bits_of_the_library_or_is_not_used(dtype: torch.dtype) -> None:
    row, matrix = _cancelling(40, 176, torch.empty(0, dtype=dtype))
    if not in_machine_code(matrix):
        pytest.skip("the library adds up in another order here")
    for count in (1, 2, 7, 16, 33):
        for rows in (row.expand(1, count, 176), torch.randn(2, count, 176).to(dtype)):
            assert torch.equal(half.linear(rows, matrix, None), torch._C._nn.linear(rows, matrix, None))


def test_machine_code_is_not_used_for_other_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(32, 128).bfloat16()
    assert not in_machine_code(torch.randn(32, 72).bfloat16())
    assert not in_machine_code(matrix.t().contiguous().t())
    assert not in_machine_code(matrix[:0])
    library = torch._C._nn.linear
    monkeypatch.setattr(half, "_has_library_bits", half._has_library_bits.__wrapped__)
    monkeypatch.setattr(torch._C._nn, "linear", lambda *args: library(*args) + 2**-6)
    assert not in_machine_code(matrix)


@pytest.mark.parametrize("dtype", HALF)
def test_experts_in_machine_code_have_the_bits_of_the_library(dtype: torch.dtype) -> None:
    row, matrix = _cancelling(24, 80, torch.empty(0, dtype=dtype))
    if not in_machine_code(matrix):
        pytest.skip("the library adds up in another order here")
    weight = torch.stack([matrix, matrix.flip(0), torch.randn(24, 80).to(dtype)])
    rows = torch.cat([row[0].expand(9, 80), torch.randn(4, 80).to(dtype)])
    ids = torch.tensor([1, 2, 1, 1, 3, 1, 7, 0, 1, 2, 3, 3, 3])  # of experts 1, 2 and 3; others are not held
    made = half.expert_linear(rows, ids, weight, None, 1, 8, False)
    for each, expert, result in zip(rows, ids.tolist(), made, strict=True):
        expected = (
            torch.nn.functional.linear(each, weight[expert - 1]) if 1 <= expert <= 3 else torch.zeros(24)
        )
        assert torch.equal(result, expected.to(dtype))


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
    assert found.products(batched=True)["y"] is half.expert_linear


@pytest.mark.skipif(product(True) is None, reason="no machine code here")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("columns", [1, 4, 63, 130])
def test_machine_code_adds_up_the_columns_of_a_transposed_matrix_in_four_sums(
    dtype: torch.dtype, columns: int
) -> None:
    row, cancelling = _cancelling(48, columns, torch.empty(0, dtype=dtype))
    matrix = cancelling.t().contiguous()
    for count in range(1, 14):
        rows = torch.cat([row[0], torch.randn(12, columns).to(dtype)])[:count]
        products = rows.float()[:, :, None] * matrix.float()[None]
        sums = [torch.zeros(count, 48) for _ in range(4)]
        for column in range(columns):
            n = column % 4 if column < columns // 4 * 4 else 0
            sums[n] = sums[n] + products[:, column]
        expected = sums[0] + sums[1] + sums[2] + sums[3]
        assert torch.equal(half._multiply_transposed(rows, matrix), expected.to(dtype))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("count", "columns", "outputs"), [(1, 64, 48), (2, 64, 48), (9, 77, 32), (40, 64, 131), (3, 8, 16)]
)
def test_a_batch_of_products_has_the_bits_of_the_library(
    dtype: torch.dtype, count: int, columns: int, outputs: int
) -> None:
    row, matrix = _cancelling(outputs, columns, torch.empty(0, dtype=dtype))
    rows = row.expand(2, count, columns).contiguous()
    rows[1] = torch.randn(count, columns)
    stored = torch.stack([matrix, torch.randn(outputs, columns).to(dtype)])
    for matrices in (stored.transpose(1, 2), stored.transpose(1, 2).contiguous()):
        assert torch.equal(half.bmm(rows, matrices), torch.bmm(rows, matrices))
