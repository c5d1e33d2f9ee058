"""Half precision on a CPU without instructions for it, whatever this machine's has."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from fusion.runtime.planes.products import in_float32 as module
from fusion.runtime.planes.products.in_float32 import in_float32, is_slow

CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (functional.linear, ((2, 5, 8), (6, 8), (6,))),
    "addmm": (torch.addmm, ((6,), (5, 8), (8, 6))),
    "matmul": (torch.matmul, ((2, 3, 5, 8), (2, 3, 8, 4))),
    "conv2d": (functional.conv2d, ((2, 3, 6, 6), (4, 3, 3, 3))),
    "attention": (functional.scaled_dot_product_attention, ((2, 3, 5, 8),) * 3),
}


def operands(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float32_rounded(name: str, dtype: torch.dtype) -> None:
    function, shapes = CASES[name]
    half = operands(shapes, dtype)
    full = tuple(each.detach().float().requires_grad_() for each in half)

    result, expected = in_float32(function, dtype)(*half), function(*full)
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    result.backward(seed)
    expected.backward(seed.float())

    assert result.dtype == dtype and torch.equal(result, expected.to(dtype))
    for one, other in zip(half, full, strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.dtype == dtype
        assert torch.equal(one.grad, other.grad.to(dtype))


@pytest.mark.parametrize("name", ["linear", "matmul", "conv2d"])
def test_the_backward_pass_keeps_no_operand_in_float32(name: str) -> None:
    function, shapes = CASES[name]
    casts: list[StorageWeakRef] = []

    def noted(*args: torch.Tensor) -> torch.Tensor:
        casts.extend(StorageWeakRef(each.untyped_storage()) for each in args)
        return function(*args)

    half = operands(shapes, torch.bfloat16)
    result = in_float32(noted, torch.bfloat16)(*half)
    gc.collect()
    assert result.requires_grad and len(casts) == len(shapes)
    assert all(each.expired() for each in casts)


def test_one_operand_twice_and_a_view_of_it() -> None:
    [half] = operands(((6, 6),), torch.bfloat16)
    full = half.detach().float().requires_grad_()
    in_float32(torch.matmul, torch.bfloat16)(half, half).sum().backward()
    torch.matmul(full, full).sum().backward()
    assert half.grad is not None and full.grad is not None
    torch.testing.assert_close(half.grad.float(), full.grad, rtol=2**-7, atol=2**-5)
    transposed = half.detach()[:, ::2].t()
    assert torch.equal(
        in_float32(torch.matmul, torch.bfloat16)(transposed, half),
        (transposed.float() @ half.float()).bfloat16(),
    )


@pytest.mark.parametrize("supported", [False, True])
def test_a_cpu_with_instructions_for_half_precision_is_not_slow(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "computes_half", lambda dtype: supported)
    assert is_slow(torch.bfloat16) is is_slow(torch.float16) is not supported
    assert not is_slow(torch.float32)
