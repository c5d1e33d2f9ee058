"""Rows with the matrix that each has chosen: values, gradients, what is computed, and ids that are nonsense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fusion.runtime.planes.products import experts
from fusion.runtime.planes.products.experts import (
    expert_linear,
    expert_linear_in_float32,
    pack_experts,
    packed_expert_linear,
    padded_expert_linear,
)

HELD, OUT, IN = 6, 8, 16


def given(rows: int, of: int, *, transposed: bool, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    made = torch.Generator().manual_seed(rows)
    shape = (HELD, IN, OUT) if transposed else (HELD, OUT, IN)
    return {
        "rows": torch.randn(rows, IN, generator=made, dtype=dtype),
        "ids": torch.randint(0, of, (rows,), generator=made),
        "weight": torch.randn(shape, generator=made, dtype=dtype),
        "bias": torch.randn(HELD, OUT, generator=made, dtype=dtype),
    }


def one_by_one(rows: Any, ids: Any, weight: Any, bias: Any, first: int, transposed: bool) -> torch.Tensor:
    made = []
    for row, chosen in zip(rows, ids.tolist(), strict=True):
        if first <= chosen < first + len(weight):
            matrix = weight[chosen - first]
            y = row @ matrix if transposed else matrix @ row
            made.append(y if bias is None else y + bias[chosen - first])
        else:
            made.append(torch.zeros(OUT, dtype=rows.dtype))
    return torch.stack(made)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("first", "of"), [(0, HELD), (3, 12)])
def test_every_way_gives_each_row_its_own_matrix(first: int, of: int, transposed: bool) -> None:
    values = given(40, of, transposed=transposed)
    packed = pack_experts(values["weight"], transposed=transposed)
    assert packed is not None
    for bias in (values["bias"], None):
        wanted = one_by_one(**{**values, "bias": bias}, first=first, transposed=transposed)
        more = (bias, first, of, transposed)
        for found in (
            expert_linear(values["rows"], values["ids"], values["weight"], *more),
            padded_expert_linear(values["rows"], values["ids"], values["weight"], *more),
            packed_expert_linear(values["rows"], values["ids"], packed, *more),
        ):
            assert torch.allclose(found, wanted, atol=1e-5)
    assert first == 0 or bool((wanted == 0).all(1).any())


def test_ids_of_a_stranger_give_zeros() -> None:
    values = given(7, HELD, transposed=False)
    ids = torch.tensor([-(2**63), -1, HELD, 2**63 - 1, 2, 10**9, 3])
    packed = pack_experts(values["weight"], transposed=False)
    assert packed is not None
    found = packed_expert_linear(values["rows"], ids, packed, values["bias"], 0, HELD, False)
    assert (found != 0).any(1).tolist() == [False, False, False, False, True, False, True]


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_the_products_one_by_one(transposed: bool) -> None:
    values = given(9, 2 * HELD, transposed=transposed, dtype=torch.float64)
    leaves = {n: v.requires_grad_() for n, v in values.items() if n != "ids"}

    def product(rows: Any, weight: Any, bias: Any) -> torch.Tensor:
        return expert_linear(rows, values["ids"], weight, bias, 2, 2 * HELD, transposed)

    assert torch.autograd.gradcheck(product, (leaves["rows"], leaves["weight"], leaves["bias"]))
    wanted = one_by_one(**values, first=2, transposed=transposed)
    assert torch.allclose(product(**leaves), wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computed_in_float32_is_that_of_float32_rounded(
    dtype: torch.dtype, transposed: bool
) -> None:
    values = given(9, 2 * HELD, transposed=transposed)
    ids = values.pop("ids")
    half = {n: v.to(dtype).requires_grad_() for n, v in values.items()}
    full = {n: v.detach().float().requires_grad_() for n, v in half.items()}

    def product(function: Any, rows: Any, weight: Any, bias: Any) -> torch.Tensor:
        output: torch.Tensor = function(rows, ids, weight, bias, 2, 2 * HELD, transposed)
        return output

    made, expected = product(expert_linear_in_float32, **half), product(expert_linear, **full)
    assert torch.equal(made, expected.to(dtype))
    seed = torch.randn(9, OUT).to(dtype)
    made.backward(seed)
    expected.backward(seed.float())
    for name, each in half.items():
        wanted = full[name].grad
        assert each.grad is not None and wanted is not None
        assert torch.equal(each.grad, wanted.to(dtype)), name


def test_one_expert_at_a_time_is_cast_to_float32() -> None:
    values = given(40, HELD, transposed=False, dtype=torch.bfloat16)
    args = (values["rows"], values["ids"], values["weight"].requires_grad_(), None, 0, HELD, False)
    with torch.profiler.profile(record_shapes=True) as profile:
        expert_linear_in_float32(*args).sum().backward()
    casts = [e.input_shapes[0] for e in profile.events() if e.name == "aten::_to_copy"]
    assert casts.count([OUT, IN]) == HELD  # a matrix in the forward pass; the rows need no gradient
    assert all(len(shape) < 3 for shape in casts)


def test_no_more_is_computed_than_the_chosen_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 positions, each with 2 of 16 experts: not 16 products a position."""
    rows, count = 1024, 16
    made = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 64, generator=made), torch.randn(count, 32, 64, generator=made)
    ids = torch.randint(0, count, (rows,), generator=made)
    chosen = rows * 2 * 64 * 32
    with FlopCounterMode(display=False) as counter:
        expert_linear(x, ids, weight, None, 0, count, False)
    assert counter.get_total_flops() == chosen
    run: list[int] = []
    linear = experts.packed_linear

    def counted(group: torch.Tensor, *more: Any) -> torch.Tensor:
        run.append(group.shape[0])
        return linear(group, *more)

    monkeypatch.setattr(experts, "packed_linear", counted)
    packed = pack_experts(weight, transposed=False)
    assert packed is not None
    packed_expert_linear(x, ids, packed, None, 0, count, False)
    assert len(run) == count and rows <= sum(run) <= 1.1 * rows


def test_a_row_has_the_same_bits_in_any_company() -> None:
    values = given(200, HELD, transposed=False)
    packed = pack_experts(values["weight"], transposed=False)
    assert packed is not None
    rows, ids = values["rows"], values["ids"]
    whole = packed_expert_linear(rows, ids, packed, None, 0, HELD, False)
    for chosen in (torch.arange(1), torch.arange(50, 57), torch.randperm(200)[:90]):
        alone = packed_expert_linear(rows[chosen], ids[chosen], packed, None, 0, HELD, False)
        assert torch.equal(alone, whole[chosen])
