"""Products in half precision: a row gets the bits of its own piece, whatever the library makes of rows that come alone."""

from __future__ import annotations

import pytest
import torch

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.runtime.planes.matrices import Matrices
from fusion.runtime.planes.products import half
from fusion.runtime.planes.products.half import ByPiece, cancelling, is_half_batch_invariant

HALF = [torch.bfloat16, torch.float16]


def of_one_product(op: str, dtype: torch.dtype) -> tuple[Graph, dict[str, torch.Tensor], torch.Tensor]:
    """Whose bits show in what order the library adds up, and a row for it."""
    name = str(dtype).removeprefix("torch.")
    row, matrix = cancelling(48, 64, torch.empty(0, dtype=dtype))
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


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_of_a_view_has_the_bits_of_its_own_piece_in_any_company(
    dtype: torch.dtype, has_bias: bool
) -> None:
    graph, values, _ = of_one_product("aten.linear", dtype)
    values |= {"w": torch.randn(48, 64).to(dtype), "b": torch.randn(48).to(dtype)}
    found = Matrices(graph, values, torch.device("cpu"))
    rows = torch.randn(1, 10, 128).to(dtype)[..., 64:]
    lengths = [1, 5, 1, 3]
    found.by_piece.begin(lengths, [False, False, False, True], 10)
    bias = values["b"] if has_bias else None
    made = found.products(batched=True)["y"](rows, values["w"], bias)
    parts = rows.split([1, 5, 1, 1, 1, 1], 1)
    expected = [torch._C._nn.linear(part, values["w"], bias) for part in parts]
    assert torch.equal(made, torch.cat(expected, 1))


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
