"""Products of rows with a packed matrix: those of torch, and each row's the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.runtime.planes.products import machine_code, packed
from fusion.runtime.planes.products.packed import (
    addmm,
    embedding,
    is_batch_invariant,
    linear,
    pack,
    packable,
    padded_rows,
)


def test_few_counts_of_rows_are_run() -> None:
    assert [padded_rows(n) for n in (1, 2, 3, 8, 9, 17, 64, 65, 512, 513)] == [
        4,
        4,
        4,
        8,
        10,
        20,
        64,
        80,
        512,
        640,
    ]
    assert all(n <= padded_rows(n) <= max(4, n + n // 4 + 1) for n in range(1, 5000))
    assert len({padded_rows(n) for n in range(1, 513)}) < 40
    # where a row alone has the same bits
    assert [padded_rows(n, min_rows=1) for n in (1, 2, 3, 17)] == [1, 2, 3, 17]


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 20), st.booleans())
def test_packed_products_are_those_of_torch(out: int, columns: int, count: int, transposed: bool) -> None:
    made = torch.Generator().manual_seed(out)
    stored = torch.randn((columns, out) if transposed else (out, columns), generator=made)
    matrix = stored.t() if transposed else stored
    bias, rows = torch.randn(out, generator=made), torch.randn(1, count, columns, generator=made)
    held = pack(matrix)
    assert held is not None
    expected = torch.nn.functional.linear(rows, matrix, bias)
    torch.testing.assert_close(linear(rows, held, bias), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(addmm(bias, rows[0], held, 1, 1), expected[0], atol=1e-5, rtol=1e-5)
    for at in range(count):
        assert torch.equal(linear(rows[:, at], held, bias), linear(rows, held, bias)[:, at])


def test_a_table_is_read_where_a_matrix_is() -> None:
    matrix = torch.randn(50, 24)
    held = pack(matrix)
    assert held is not None
    ids = torch.tensor([[0, 49, 7], [7, 15, 16]])
    assert torch.equal(embedding(held, ids), torch.embedding(matrix, ids))
    for wrong in (-1, 50):  # 50 would be zeros: the last block is filled up
        with pytest.raises(IndexError, match="table of 50 rows"):
            embedding(held, torch.tensor([wrong]))


def test_other_tensors_are_not_packed() -> None:
    assert pack(torch.randn(4, 4).double()) is None and pack(torch.randn(4)) is None


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    held, rows = pack(torch.randn(530, 64)), torch.randn(9, 64)
    assert held is not None
    alone = linear(rows, held, None)
    monkeypatch.setattr(machine_code, "_THREAD_MULTIPLY_ADDS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(linear(rows, held, None), alone)


def test_a_machine_without_such_code_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_code", lambda: None)
    assert pack(torch.randn(4, 4)) is None


USES = {
    "linear": ("aten.linear", (Ref("x"), Ref("w"), None)),
    "linear of itself": ("aten.linear", (Ref("w"), Ref("w"), None)),
    "embedding": ("aten.embedding", (Ref("w"), Ref("ids"), -1, False)),
    "addmm": ("aten.addmm", (Ref("bias"), Ref("x"), Ref("w"), 1, 1)),
    "addmm of half": ("aten.addmm", (Ref("bias"), Ref("x"), Ref("w"), 1, 0.5)),
    "other": ("aten.relu", (Ref("w"),)),
}


@pytest.mark.parametrize(
    ("uses", "found"),
    [
        (["linear"], {"w": False}),
        (["linear", "linear"], {"w": False}),
        (["linear", "embedding"], {"w": False}),
        (["addmm"], {"w": True}),
        (["addmm", "embedding"], {}),
        (["addmm", "linear"], {}),
        (["embedding"], {}),
        (["linear", "other"], {}),
        (["linear of itself"], {}),
        (["addmm of half"], {}),
        (["linear", "output"], {}),
        ([], {}),
    ],
)
def test_what_is_packed(uses: list[str], found: dict[str, bool]) -> None:
    inputs = Input("x", TensorType((3, 8), "float32")), Input("ids", TensorType((3,), "int64"))
    variables = (
        Variable("w", TensorType((8, 8), "float32")),
        Variable("bias", TensorType((8,), "float32")),
    )
    known = {Ref(each.name): each.type for each in (*inputs, *variables)}
    nodes = [
        Node(f"y{i}", *USES[use], infer(*USES[use], known)) for i, use in enumerate(uses) if use != "output"
    ]
    outputs = [Ref(node.name) for node in nodes] + ([Ref("w")] if "output" in uses else [])
    assert packable(Graph(inputs, variables, tuple(nodes), tuple(outputs))) == found


def test_rows_that_depend_on_their_company_are_noticed() -> None:
    like = torch.zeros(1)
    assert is_batch_invariant(lambda rows: rows * 2, 8, like)
    assert not is_batch_invariant(lambda rows: rows + (rows.shape[1] == 5), 8, like)
    assert not is_batch_invariant(lambda rows: rows - rows.mean(1, keepdim=True), 8, like)
    assert not is_batch_invariant(lambda rows: rows + torch.arange(rows.shape[1])[:, None], 8, like)
    for count, agree in (
        (1, True),
        (3, True),
        (4, False),
    ):  # alone, they are only looked at where that matters
        assert is_batch_invariant(lambda rows, count=count: rows + (rows.shape[1] == count), 8, like) is agree
        assert not is_batch_invariant(
            lambda rows, count=count: rows + (rows.shape[1] == count), 8, like, min_rows=1
        )
