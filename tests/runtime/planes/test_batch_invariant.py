"""A number has the same bits however many others there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.runtime.planes import batch_invariant
from fusion.runtime.planes.batch_invariant import VECTORISED, in_full_vectors
from fusion.runtime.planes.torch_ops import torch_call

MORE: dict[str, tuple[Any, ...]] = {
    "aten.softplus": (1.0, 20.0),
    "aten.elu": (1.0, 1.0, 1.0),
    "aten.celu": (1.0,),
    "aten.pow.Tensor_Scalar": (1.5,),
}


@pytest.mark.parametrize("op", sorted(VECTORISED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_change_no_bit(op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariant, "_THREADED_ELEMENTS", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    numbers = torch.randn(1, 640, generator=torch.Generator().manual_seed(0)).mul(3).abs().to(dtype)

    def run(given: torch.Tensor, evenly: bool = True) -> torch.Tensor:
        match op:
            case "aten.pow.Tensor_Tensor" | "aten.atan2":
                args: tuple[Any, ...] = (given, given[:, :1])  # the other one broadcast
            case "aten.pow.Scalar":
                args = (2.5, given)
            case _:
                args = (given, *MORE.get(op, ()))
        function, positional, named = torch_call(op, args, torch.device("cpu"))
        made: torch.Tensor = (in_full_vectors(function) if evenly else function)(*positional, **named)
        return made

    whole = run(numbers)
    torch.testing.assert_close(whole, run(numbers, evenly=False))
    for count in (1, 2, 3, 7, 8, 15, 24, 63, 65, 130):
        found = run(numbers[:, :count])
        assert found.shape == (1, count) and torch.equal(found, whole[:, :count])
        strided = numbers.reshape(-1, 1).expand(-1, 3)[:count, 1][None]
        assert torch.equal(run(strided), found)


@pytest.mark.parametrize("op", ["aten.pow.Tensor_Tensor", "aten.atan2"])
def test_a_number_without_dimensions_decides_no_dtype(op: str) -> None:
    numbers = torch.rand(3, 5, dtype=torch.float32)
    function, positional, named = torch_call(
        op, (numbers, torch.tensor(1.7, dtype=torch.float64)), torch.device("cpu")
    )
    torch.testing.assert_close(
        in_full_vectors(function)(*positional, **named), function(*positional, **named)
    )
