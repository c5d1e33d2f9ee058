"""Products with chosen matrices on a GPU, against those of a CPU."""

from __future__ import annotations

import pytest
import torch
from support.devices import NEEDS_GPU

from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.products.experts import expert_linear

pytestmark = NEEDS_GPU

# (experts held, the first of them, out, in)
SIZES = [(4, 0, 96, 64), (3, 5, 50, 72), (8, 0, 33, 200)]


@pytest.mark.parametrize("rows", [1, 6, 64, 300])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_float32(
    sizes: tuple[int, int, int, int], rows: int, transposed: bool, dtype: torch.dtype
) -> None:
    held, first, out, columns = sizes
    torch.manual_seed(0)
    shape = (held, columns, out) if transposed else (held, out, columns)
    weight, given = torch.randn(shape).to(dtype), torch.randn(rows, columns).to(dtype)
    bias = torch.randn(held, out).to(dtype) if rows % 2 else None
    ids = torch.randint(first - 1 if first else 0, first + held + 1, (rows,))  # some that nobody holds
    there = kernels()
    assert there is not None
    on_device = [None if part is None else part.cuda() for part in (given, ids, weight, bias)]
    found = there.experts.expert_linear(*on_device, first, 16, transposed)
    exact = expert_linear(
        *(given.float(), ids, weight.float(), None if bias is None else bias.float(), first, 16, transposed)
    )
    error = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert found.dtype == dtype and found.shape == (rows, out)
    assert float((found.cpu().float() - exact).abs().max()) <= error * max(1.0, float(exact.abs().max()))
    alone = there.experts.expert_linear(
        on_device[0][-1:], on_device[1][-1:], *on_device[2:], first, 16, transposed
    )
    assert torch.equal(alone[0], found[-1])  # whoever else is there
