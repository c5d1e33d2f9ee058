"""Products with chosen matrices on a GPU, against those of a CPU."""

from __future__ import annotations

import pytest
import torch
from support.devices import NEEDS_GPU

from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.products.experts import expert_linear
from fusion.runtime.planes.products.quantised_experts import expert_linear as quantised_expert_linear

pytestmark = NEEDS_GPU

# (experts held, the first of them, out, in)
SIZES = [(4, 0, 96, 64), (3, 5, 50, 72), (8, 0, 33, 200), (3, 5, 50, 1120), (2, 0, 5000, 1600)]


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


@pytest.mark.parametrize("rows", [1, 6, 64, 300])
@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "sizes", [(4, 0, 96, 64), (3, 5, 50, 96), (8, 0, 33, 224), (3, 5, 50, 1120), (2, 0, 5000, 1600)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_stored_matrices_are_those_of_what_they_stand_for(
    sizes: tuple[int, int, int, int], bits: int, minimums: bool, rows: int, dtype: torch.dtype
) -> None:
    held, first, out, columns = sizes
    torch.manual_seed(0)
    given = torch.randn(rows, columns).to(dtype)
    wide = columns if bits == 8 else columns // 2
    weight = torch.randint(0, 256, (held, out, wide), dtype=torch.uint8)
    weight = weight.view(torch.int8) if bits == 8 else weight
    scales = torch.randn(held, out, columns // 16).half()
    least = torch.randn(held, out, columns // 16).half() if minimums else None
    bias = torch.randn(held, out).to(dtype) if rows % 2 else None
    ids = torch.randint(first - 1 if first else 0, first + held + 1, (rows,))
    there = kernels()
    assert there is not None
    stored = (given, ids, weight, scales, least, bias)
    on_device = [None if part is None else part.cuda() for part in stored]
    found = there.experts.quantised_expert_linear(*on_device, first, 16)
    exact = quantised_expert_linear(
        given.float(), *stored[1:5], None if bias is None else bias.float(), first, 16
    )
    error = 4e-6 if dtype == torch.float32 else 1e-2
    assert found.dtype == dtype and found.shape == (rows, out)
    assert float((found.cpu().float() - exact).abs().max()) <= error * max(1.0, float(exact.abs().max()))
    alone = there.experts.quantised_expert_linear(
        *(part[-1:] for part in on_device[:2]), *on_device[2:], first, 16
    )
    assert torch.equal(alone[0], found[-1])
