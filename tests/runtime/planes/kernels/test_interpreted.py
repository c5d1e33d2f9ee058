"""Kernels of attention and experts in Triton's interpreter, which needs no GPU: their results, but not their bits, which depend on the compiler.

Skipped unless Triton is installed and there is no GPU: `pip install triton` (a gigabyte), then run this file by itself.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from fusion.runtime.planes.products import experts

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them as they are"),
]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def attention() -> ModuleType:
    from fusion.runtime.planes.kernels import attention_kernels

    return attention_kernels


def experts_of() -> ModuleType:
    from fusion.runtime.planes.kernels import expert_kernels

    return expert_kernels


HEADS, KEY_HEADS, ROOM, WIDTH, VALUE_WIDTH = 4, 2, 600, 24, 16


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("sinks", "slopes"), [(False, False), (True, True)])
def test_rows_see_what_softmax_attention_gives_them(
    window: int | None, softcap: float | None, sinks: bool, slopes: bool
) -> None:
    torch.manual_seed(0)
    positions = [5, 300, 0, -1]  # of another chunk, of its first key, of padding
    rows = len(positions)
    query = torch.randn(1, HEADS, rows, WIDTH)
    key, value = torch.randn(1, KEY_HEADS, rows, WIDTH), torch.randn(1, KEY_HEADS, rows, VALUE_WIDTH)
    keys, values = torch.randn(rows, KEY_HEADS, ROOM, WIDTH), torch.randn(rows, KEY_HEADS, ROOM, VALUE_WIDTH)
    table = torch.tensor([[keys[row].data_ptr(), values[row].data_ptr(), ROOM] for row in range(rows)])
    sink = torch.randn(HEADS) if sinks else None
    slope = 0.1 * torch.randn(HEADS) if slopes else None
    found = attention().attend(
        query, key, value, table, torch.tensor(positions), 2, None, window, softcap, slope, sink
    )
    assert found.shape == (1, HEADS, rows, VALUE_WIDTH)
    for row, at in enumerate(positions[:-1]):
        assert torch.equal(keys[row, :, at], key[0, :, row])
        assert torch.equal(values[row, :, at], value[0, :, row])
        seen = slice(0 if window is None else max(0, at + 1 - window), at + 1)
        near, held = (each[row, :, seen].repeat_interleave(HEADS // KEY_HEADS, 0) for each in (keys, values))
        scores = torch.einsum("hw,hpw->hp", query[0, :, row], near) * WIDTH**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if slope is not None:
            scores = scores + slope[:, None] * (torch.arange(ROOM)[seen] - at)
        if sink is not None:
            scores = torch.cat([scores, sink[:, None]], 1)
            held = torch.cat([held, torch.zeros(HEADS, 1, VALUE_WIDTH)], 1)
        exact = torch.einsum("hp,hpw->hw", scores.softmax(1), held)
        torch.testing.assert_close(found[0, :, row], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("held", "first", "out", "columns"), [(3, 5, 50, 72), (2, 0, 33, 1120)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_rows_are_multiplied_with_the_experts_that_they_chose(
    held: int, first: int, out: int, columns: int, transposed: bool, rows: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn((held, columns, out) if transposed else (held, out, columns))
    given, bias = torch.randn(rows, columns), torch.randn(held, out)
    ids = torch.randint(max(0, first - 1), first + held + 1, (rows,))  # some that nobody holds
    found = experts_of().expert_linear(given, ids, weight, bias, first, 16, transposed)
    exact = experts.expert_linear(given, ids, weight, bias, first, 16, transposed)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)
