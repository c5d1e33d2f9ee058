"""Products with stored matrices on a GPU, against those of a CPU."""

from __future__ import annotations

import pytest
import torch
from support.devices import NEEDS_GPU

from fusion.runtime.planes.kernels.available import kernels
from fusion.runtime.planes.products.quantised import linear

pytestmark = NEEDS_GPU

# (out, columns, columns of a group, bits, with minimums)
MATRICES = [
    (96, 256, 32, 8, False),
    (50, 192, 64, 8, True),
    (33, 768, 256, 8, False),
    (40, 96, 96, 8, False),
    (64, 160, 16, 8, False),
    (96, 256, 32, 4, False),
    (50, 192, 64, 4, True),
    (1000, 2048, 128, 4, False),
    (64, 1056, 32, 4, True),
    (64, 1040, 16, 8, False),
    (40, 640, 16, 4, True),
    (33000, 576, 64, 8, False),
]


@pytest.mark.parametrize("rows", [1, 5, 32, 70])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_float32(
    matrix: tuple[int, int, int, int, bool], rows: int, dtype: torch.dtype
) -> None:
    out, columns, group, bits, with_minimums = matrix
    torch.manual_seed(0)
    kind, least, held = (torch.int8, -128, columns) if bits == 8 else (torch.uint8, 0, columns // 2)
    weight = torch.randint(least, least + 256, (out, held), dtype=kind)
    scales = torch.rand(out, columns // group).to(torch.float16 if with_minimums else torch.float32)
    minimums = -scales * 3 if with_minimums else None
    bias = torch.randn(out) if rows % 2 else None
    given = torch.randn(2, rows, columns).to(dtype)
    parts = [None if part is None else part.cuda() for part in (weight, scales, minimums, bias)]
    there = kernels()
    assert there is not None and there.quantised.supports(columns, columns // group)
    found = there.quantised.linear(given.cuda(), *parts)
    exact = linear(given.double().float(), weight, scales, minimums, bias)
    assert found.dtype == dtype and found.shape == (2, rows, out)
    scale = float(exact.abs().max())
    error = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert float((found.cpu().float() - exact).abs().max()) <= error * scale
    alone = there.quantised.linear(given[1:, rows - 1 :].cuda(), *parts)
    assert torch.equal(alone[0, 0], found[1, -1])  # whoever else is there


def test_groups_that_tensor_cores_do_not_take_are_left_to_the_library() -> None:
    there = kernels()
    assert there is not None
    assert there.quantised.supports(256, 16) and there.quantised.supports(96, 1)
    assert not there.quantised.supports(256, 32) and not there.quantised.supports(120, 5)
