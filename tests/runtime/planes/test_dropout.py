from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion.runtime.planes.dropout import Masks, dropout, dropout_attention
from fusion.runtime.planes.plane import RngKey

LIKE = torch.zeros(64, 65)  # an odd number of elements as well as an even one


def mask(key: RngKey, name: str = "dropout", p: float = 0.25, like: torch.Tensor = LIKE) -> torch.Tensor:
    return Masks(key, [name]).draw(0, like, p)


def test_a_mask_is_a_function_of_its_key_and_name_alone() -> None:
    one = mask(RngKey(1, 2, 3))
    torch.manual_seed(99)
    assert torch.equal(one, mask(RngKey(1, 2, 3)))
    others = [
        mask(RngKey(0, 2, 3)),
        mask(RngKey(1, 0, 3)),
        mask(RngKey(1, 2, 0)),
        mask(RngKey(1, 2, 3), "dropout_1"),
    ]
    assert not any(torch.equal(one, other) for other in others)


def test_the_bits_are_fixed_for_all_time() -> None:
    kept = mask(RngKey(1, 2, 3), p=0.5, like=torch.zeros(16)) > 0
    assert "".join("x" if k else "." for k in kept) == "x.x.xx.x..x..xxx"


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_it_drops_the_share_asked_for_and_keeps_the_mean(p: float) -> None:
    drawn = mask(RngKey(7, 0, 0), p=p, like=torch.zeros(100_001))
    assert float((drawn == 0).float().mean()) == pytest.approx(p, abs=0.01)
    if p < 1:
        assert float(drawn.mean()) == pytest.approx(1.0, abs=0.03)
        assert drawn.max() == torch.tensor(1 / (1 - p))


def test_gradients_pass_through_the_same_mask() -> None:
    x = torch.ones(100, requires_grad=True)
    masks = Masks(RngKey(0, 0, 0), ["d"])
    y = dropout(x, 0.4, masks, 0)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("kind", ["causal", "bool", "float", "none"])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_with_nothing_dropped_is_plain_attention(kind: str, grouped: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8)
    k, v = (torch.randn(2, 2 if grouped else 4, 6, 8) for _ in range(2))
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    given = {"bool": visible, "float": torch.randn(6, 6)}.get(kind)
    causal = kind == "causal"
    masks = Masks(RngKey(0, 0, 0), ["a"])
    found = dropout_attention(q, k, v, given, 0.0, causal, None, grouped, masks, 0)
    wanted = functional.scaled_dot_product_attention(q, k, v, given, is_causal=causal, enable_gqa=grouped)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("boolean", [True, False])
def test_a_query_that_sees_nothing_gets_zeros(boolean: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    visible = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    given = visible if boolean else torch.where(visible, 0.0, -torch.inf)
    found = dropout_attention(q, q, q, given, 0.0, False, None, False, Masks(RngKey(0, 0, 0), ["a"]), 0)
    wanted = functional.scaled_dot_product_attention(q, q, q, visible)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(out.square().sum(), q)[0] for out in (found, wanted)]
    torch.testing.assert_close(*gradients)
