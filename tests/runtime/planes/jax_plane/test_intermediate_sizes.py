"""What operators make on the way is no larger than what they are given and give, and of few steps: nobody's account has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest
import torch

from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.opset import infer
from fusion.runtime.planes.jax_plane.library import load

pytest.importorskip("jax", reason="the extra jax is not installed")
load("cpu", 1)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from fusion.runtime.planes.jax_plane.program import TABLE, Program  # noqa: E402

MOST_TIMES, MOST_STEPS = 8, 400
FAR, WIDE = 1 << 11, (1, 1, 1, 1 << 11)


def jaxprs(jaxpr: Any) -> Iterator[Any]:
    yield jaxpr
    for step in jaxpr.eqns:
        for value in step.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from jaxprs(inner)


@pytest.mark.parametrize(
    ("op", "shape", "args"),
    [
        ("aten.adaptive_avg_pool1d", (1, 1, FAR), ((FAR - 1,),)),
        ("aten.adaptive_avg_pool2d", WIDE, ((FAR, 1),)),
        ("aten.upsample_bilinear2d", WIDE, ((1, FAR - 1), False, None, None)),
        ("aten.upsample_bilinear2d", WIDE, ((FAR, 1), True, None, None)),
        ("aten.upsample_nearest2d", WIDE, ((FAR, 1), None, None)),
        ("aten.max_pool2d", (1, 1, 96, 96), ((24, 24), (1, 1), (0, 0), (2, 2), False)),
        ("aten.diff", (FAR,), (FAR - 1, 0, None, None)),
        ("aten.diff", (FAR,), (2**40, 0, None, None)),
        ("aten.arange", (), (1 << 16, None)),
        ("aten.arange.start_step", (), (0.0, 1000.0, 0.25, None)),
        ("aten.linspace", (), (0.0, 1.0, 1 << 16, None)),
    ],
)  # fmt: skip
def test_what_is_made_on_the_way_is_small(op: str, shape: Sequence[int], args: tuple[Any, ...]) -> None:
    makes = not shape
    whole = jax.make_jaxpr(lambda x: TABLE[op](*args) if makes else TABLE[op](x, *args))(jnp.zeros(shape))
    room = MOST_TIMES * max(prod(shape), *(value.size for value in whole.out_avals))
    assert sum(len(each.eqns) for each in jaxprs(whole.jaxpr)) <= MOST_STEPS
    assert all(
        made.aval.size <= room for each in jaxprs(whole.jaxpr) for step in each.eqns for made in step.outvars
    )
    assert all(each.size <= room for each in whole.consts)
    if makes:
        assert not whole.consts  # they would be in the program, of eight bytes each, whatever their dtype


@pytest.mark.parametrize(
    ("op", "shape", "args"),
    [
        ("aten.adaptive_avg_pool2d", (2, 3, 7, 5), ((3, 9),)),
        ("aten.upsample_bilinear2d", (2, 3, 7, 5), ((3, 9), False, None, None)),
        ("aten.upsample_bilinear2d", (2, 3, 7, 5), ((9, 3), True, None, None)),
        ("aten.upsample_nearest2d", (2, 3, 7, 5), ((9, 3), None, None)),
        ("aten.max_pool2d", (2, 3, 9, 8), ((3, 2), (2, 1), (1, 1), (2, 3), True)),
        ("aten.diff", (3, 9), (4, 1, None, None)),
        ("aten.diff", (3, 9), (9, 1, None, None)),
    ],
)
def test_it_is_what_torch_gives(op: str, shape: Sequence[int], args: tuple[Any, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round(decimals=1).requires_grad_()
    _, packet, *overload = op.split(".")
    wanted = getattr(getattr(torch.ops.aten, packet), *overload or ("default",))(x, *args)
    seed = torch.rand_like(wanted)

    @jax.jit
    def both(x: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        found, back = jax.vjp(lambda x: TABLE[op](x, *args), x)
        return found, back(seed)[0]

    found, back = both(jnp.asarray(x.detach().numpy()), jnp.asarray(seed.numpy()))
    torch.testing.assert_close(torch.tensor(found.tolist()).view(wanted.shape), wanted.detach())
    if wanted.numel():
        (gradient,) = torch.autograd.grad(wanted, x, seed)
        torch.testing.assert_close(torch.tensor(back.tolist()), gradient, rtol=1e-4, atol=1e-5)


def test_a_window_of_very_many_places_with_holes_is_refused() -> None:
    type_ = TensorType((1, 1, 1 << 12), "float32")
    for dilation, refused in ((1, False), (2, True)):
        args = (Ref("x"), (1 << 10,), (1,), (0,), (dilation,), False)
        node = Node("y", "aten.max_pool1d", args, infer("aten.max_pool1d", args, {Ref("x"): type_}))
        graph = Graph((Input("x", type_),), (), (node,), (Ref("y"),))
        if not refused:
            Program(graph, training=True)
            continue
        with pytest.raises(GraphError, match="1024 places with holes"):
            Program(graph, training=True)
