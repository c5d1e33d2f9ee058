"""Formulas of cost against counts made by hand; `test_exports` holds them against runs of real models."""

from __future__ import annotations

from typing import Any

import pytest

from fusion.dag.cutting.costs import differentiable, node_costs
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from tests.support.stage_costs import node_saved_bytes

BATCH = symbol("batch")
B = 10
SIZES = {"batch": B}


def f(*shape: Any) -> TensorType:
    return TensorType(shape, "float32")


def graph_of(inputs: dict[str, TensorType], variables: dict[str, Any], *nodes: tuple[Any, ...]) -> Graph:
    """Nodes as (name, op, argument, ...); the last is the output."""
    held = tuple(v if isinstance(v, Variable) else Variable(n, v) for n, v in variables.items())
    types = {Ref(n): t for n, t in inputs.items()} | {Ref(v.name): v.type for v in held}
    made = []
    for name, op, *args in nodes:
        node = Node(name, op, tuple(args), infer(op, tuple(args), types))
        types.update((Ref(name, i), t) for i, t in enumerate(node.results))
        made.append(node)
    return Graph(
        tuple(Input(n, t) for n, t in inputs.items()), held, tuple(made), (Ref(made[-1].name),), ("batch",)
    )


def perceptron(**changes: Any) -> Graph:
    return graph_of(
        {"x": f(BATCH, 4), "targets": f(BATCH, 2)},
        {"a": Variable("a", f(8, 4), **changes), "b": f(8), "c": f(2, 8)},
        ("up", "aten.linear", Ref("x"), Ref("a"), Ref("b")),
        ("relu", "aten.relu", Ref("up")),
        ("down", "aten.linear", Ref("relu"), Ref("c"), None),
        ("loss", "aten.mse_loss", Ref("down"), Ref("targets"), 1),
    )


def test_a_perceptron_by_hand() -> None:
    up, relu, down, _ = node_costs(perceptron(), SIZES)
    assert up.forward_flops == 2 * B * 4 * 8 + B * 8
    assert up.backward_flops == up.forward_flops  # x needs no gradient, the weight does
    assert down.forward_flops == 2 * B * 8 * 2
    assert down.backward_flops == 2 * down.forward_flops
    assert (relu.forward_flops, relu.backward_flops) == (B * 8, B * 8)
    assert node_saved_bytes(perceptron(), SIZES) == [
        B * 4 * 4,  # x
        B * 8 * 4,  # its result
        0,  # its input, which relu keeps already
        2 * B * 2 * 4,
    ]
    assert up.moved_bytes == B * 4 * 4 + 32 * 4 + 8 * 4 + B * 8 * 4


def test_a_frozen_first_layer_costs_no_backward() -> None:
    graph = perceptron(trainable=False)
    frozen = graph_of(
        {"x": f(BATCH, 4)},
        {"a": Variable("a", f(8, 4), trainable=False)},
        ("up", "aten.linear", Ref("x"), Ref("a"), None),
    )
    assert node_costs(frozen, SIZES)[0].backward_flops == 0
    assert node_saved_bytes(frozen, SIZES)[0] == 0
    assert Ref("up") in differentiable(graph)  # its bias is trained still
    assert node_saved_bytes(graph, SIZES)[0] == 0  # a bias needs nothing kept


def test_buffers_are_no_parameters() -> None:
    graph = perceptron(kind="buffer")
    up = node_costs(graph, SIZES)[0]
    assert up.trainable == 8 and node_saved_bytes(graph, SIZES)[0] == 0


def test_tied_weights_count_once() -> None:
    graph = graph_of(
        {"ids": TensorType((BATCH,), "int64")},
        {"table": f(100, 4)},
        ("embedding", "aten.embedding", Ref("table"), Ref("ids"), -1, False),
        ("head", "aten.linear", Ref("embedding"), Ref("table"), None),
    )
    assert [c.trainable for c in node_costs(graph, SIZES)] == [400, 0]


def test_views_cost_nothing_and_keep_what_they_look_at() -> None:
    graph = graph_of(
        {"x": f(BATCH, 8)},
        {"w": f(8, 8)},
        ("h", "aten.linear", Ref("x"), Ref("w"), None),
        ("heads", "aten.view", Ref("h"), (BATCH, 2, 4)),
        ("turned", "aten.transpose.int", Ref("heads"), 0, 1),
        ("sine", "aten.sin", Ref("turned")),
        ("copied", "aten.reshape", Ref("turned"), (BATCH * 8,)),
        ("cosine", "aten.cos", Ref("copied")),
        ("both", "aten.sin", Ref("heads")),
    )
    heads = node_costs(graph, SIZES)[1]
    assert (heads.forward_flops, heads.backward_flops, heads.moved_bytes) == (0, 0, 0)
    h, _, turned, sine, _, cosine, both = node_saved_bytes(graph, SIZES)
    assert turned == 0
    assert sine == B * 8 * 4  # keeps the memory of h
    assert cosine == B * 8 * 4  # a reshape of a transposed tensor is a copy
    assert both == 0 and h == B * 8 * 4


def test_a_product_with_a_constant_keeps_only_the_constant() -> None:
    graph = graph_of(
        {"x": f(BATCH, 8), "table": f(8)},
        {"w": f(8, 8)},
        ("h", "aten.linear", Ref("x"), Ref("w"), None),
        ("rotated", "aten.mul.Tensor", Ref("h"), Ref("table")),
        ("scaled", "aten.mul.Tensor", Ref("rotated"), 0.5),
        ("squared", "aten.mul.Tensor", Ref("scaled"), Ref("scaled")),
    )
    assert node_saved_bytes(graph, SIZES)[1:3] == [8 * 4, 0]


def test_convolution_by_hand() -> None:
    graph = graph_of(
        {"x": f(BATCH, 4, 10, 10)},
        {"w": f(8, 2, 3, 3)},
        ("y", "aten.conv2d", Ref("x"), Ref("w"), None, (1, 1), (1, 1), (1, 1), 2),
    )
    assert node_costs(graph, SIZES)[0].forward_flops == 2 * (B * 8 * 100) * (2 * 9)


def test_a_difference_of_high_order_is_as_many_differences() -> None:
    for order, times in ((1, 1), (5, 5), (2**40, 10)):
        graph = graph_of({"x": f(BATCH, 10)}, {}, ("y", "aten.diff", Ref("x"), order, 1, None, None))
        assert node_costs(graph, SIZES)[0].forward_flops == B * 10 * times


def test_attention_by_hand() -> None:
    q = f(BATCH, 4, 6, 8)
    graph = graph_of(
        {"q": q, "k": q, "v": q},
        {},
        (
            "y",
            "aten.scaled_dot_product_attention",
            Ref("q"),
            Ref("k"),
            Ref("v"),
            None,
            0.0,
            True,
            None,
            False,
        ),
    )
    assert node_costs(graph, SIZES)[0].forward_flops == B * 4 * 6 * 6 * (2 * 8 + 2 * 8 + 5)


@pytest.mark.parametrize("kernel", [(3,), (3, 3)])
def test_a_window_that_is_said_once_is_as_wide_in_each_dimension(kernel: tuple[int, ...]) -> None:
    pool = ("y", "aten.avg_pool2d", Ref("x"), kernel, (1,), (0,), False, True, None)
    (found,) = node_costs(graph_of({"x": f(BATCH, 4, 10, 10)}, {}, pool), SIZES)
    assert found.forward_flops == B * 4 * 8 * 8 * 9


def test_a_pool_to_more_places_than_there_were_has_a_sum_for_each() -> None:
    for size, sums in ((20, 20), (2, 10)):
        pool = ("y", "aten.adaptive_avg_pool1d", Ref("x"), (size,))
        (found,) = node_costs(graph_of({"x": f(BATCH, 4, 10)}, {}, pool), SIZES)
        assert found.forward_flops == B * 4 * sums


@pytest.mark.parametrize(("batch", "width"), [(1, 8), (BATCH, 0)])
def test_masks_of_attention_have_an_element_for_each_score(batch: Any, width: int) -> None:
    query, key = f(batch, 4, 6, width), f(BATCH, 4, 5, width)
    args = (Ref("q"), Ref("k"), Ref("k"), None, 0.5, False, 1.0, False)
    graph = graph_of({"q": query, "k": key}, {}, ("y", "fusion.dropout_attention", *args))
    assert node_costs(graph, SIZES)[0].drawn_elements == B * 4 * 6 * 5


def test_a_missing_size_is_an_error() -> None:
    with pytest.raises(GraphError, match="batch"):
        node_costs(perceptron(), {"sequence": 3})


@pytest.mark.parametrize(
    ("node", "bytes_"),
    [
        (("aten.max_pool2d", Ref("x"), (2, 2), (1, 1), (0, 0), (1, 1), False), 4 * 64 + 8 * 49),
        (("aten.clamp.Tensor", Ref("x"), Ref("y"), Ref("z")), 3 * 4 * 64),
        (("aten.kl_div", Ref("x"), Ref("y"), 1, False), 2 * 4 * 64),
    ],
)
def test_all_that_a_backward_pass_reads_is_kept(node: tuple[Any, ...], bytes_: int) -> None:
    graph = graph_of({n: f(1, 8, 8) for n in "xyz"}, {}, ("n", *node))
    needing = frozenset({Ref(n) for n in "xyz"} | {Ref("n")})
    assert node_saved_bytes(graph, {}, needing) == [bytes_]
