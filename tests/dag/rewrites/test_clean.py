"""Clean changes no value and no name, and drops what it can; fuse changes no value either."""

from __future__ import annotations

import numpy as np
import pytest

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import DType, Ref
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.fuse import fuse

B, S = symbol("batch"), symbol("sequence")
IDS, POSITIONS, TABLE, W = Ref("input_ids"), Ref("position_ids"), Ref("table"), Ref("w")
FLOAT, WEIGHT = DType("float32"), Ref("norm")
WIDTH = 6


@pytest.fixture
def b(build):
    b = build(table=(9, WIDTH), w=(WIDTH, WIDTH), norm=(WIDTH,))
    b("aten.embedding", TABLE, IDS, -1, False, name="x")
    return b


def kept(graph):
    cleaned = clean(graph)
    validate(cleaned)
    assert clean(cleaned) == cleaned
    assert cleaned.inputs == graph.inputs and cleaned.variables == graph.variables
    return cleaned


X = Ref("x")
PASSES_ON = [
    ("aten.to.dtype", X, FLOAT), ("aten.alias", X), ("aten.contiguous", X), ("aten.clone", X), ("aten.view", X, (B, S, -1)),
    ("aten.expand", X, (B, -1, -1)), ("aten.slice.Tensor", X, 1, 0, 2**63 - 1, 1), ("aten.slice.Tensor", X, 2, 0, WIDTH, 1),
    ("aten.mul.Scalar", X, 1.0), ("aten.div.Tensor", X, 1), ("aten.dropout", X, 0.5, False), ("fusion.dropout", X, 0.0),
    ("aten.cat", (X,), 1), ("aten.repeat", X, (1, 1, 1)), ("aten.permute", X, (0, 1, -1)), ("aten.squeeze", X),
    ("aten.flatten.using_ints", X, 1, 1), ("aten.add.Tensor", POSITIONS, 0, 1),
]  # fmt: skip
STAYS = [
    ("aten.to.dtype", X, DType("float64")), ("aten.detach", X), ("aten.slice.Tensor", X, 2, 0, WIDTH, 2),
    ("aten.transpose.int", W, 0, 1), ("aten.permute", W, (1, 0)), ("aten.flip", X, (1,)), ("aten.mul.Scalar", X, 2),
    ("fusion.dropout", X, 0.5), ("aten.add.Tensor", X, 0, 1), ("aten.add.Tensor", POSITIONS, 1, 1), ("aten.roll", X, (1,), (1,)),
    ("aten.mul.Scalar", X, True), ("aten.tril", W, 0), ("aten.cumsum", X, 1, None), ("aten.mul.Scalar", POSITIONS, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("call", PASSES_ON, ids=str)
def test_what_only_passes_on_a_value_goes(call, b):
    graph = kept(b.graph(b("aten.neg", b(*call), name="end")))
    (end,) = [n for n in graph.nodes if n.name == "end"]
    assert end.args == (POSITIONS if POSITIONS in call else X,)
    assert {n.name for n in graph.nodes} <= {"x", "end"}


@pytest.mark.parametrize("call", STAYS, ids=str)
def test_what_changes_a_value_or_a_gradient_stays(call, b):
    middle = b(*call, name="middle")
    graph = kept(b.graph(b("aten.neg", middle, name="end")))
    assert graph.nodes[-1].args == (middle,) and graph.nodes[-2].op == call[0]


def test_an_output_that_only_passes_on_a_value_is_that_value(b):
    graph = kept(b.graph(b("aten.clone", b("aten.alias", X))))
    assert graph.outputs == (X,) and [n.name for n in graph.nodes] == ["x"]


def test_dead_nodes_go_and_the_first_of_equal_ones_stays(b):
    first = b("aten.tanh", X, name="first")
    b("aten.exp", X, name="dead")
    second = b("aten.tanh", X, name="second")
    graph = kept(b.graph(b("aten.mul.Tensor", first, second, name="end")))
    assert [n.name for n in graph.nodes] == ["x", "first", "end"]
    assert graph.nodes[-1].args == (first, first)


def test_constants_that_are_only_equal_in_python_are_not_the_same(b):
    ends = [b("aten.pow.Tensor_Scalar", X, e) for e in (2, 2.0)]
    ends += [b("aten.add.Scalar", X, e, 1) for e in (0.0, -0.0)]
    assert len(kept(b.graph(*ends)).nodes) == 5


def test_draws_are_never_merged(b):
    graph = kept(b.graph(*(b("fusion.dropout", X, 0.5, name=n) for n in ("one", "two"))))
    assert [n.name for n in graph.nodes] == ["x", "one", "two"]


def test_reshapes_of_reshapes_are_one_and_need_no_sizes_they_can_do_without(b):
    flat = b("aten.view", X, (B * S, WIDTH))
    halves = b("aten._unsafe_view", flat, (B * S, 2, WIDTH // 2))
    graph = kept(b.graph(b("aten.flatten.using_ints", halves, 1, 2, name="end")))
    assert graph.nodes[-1].op == "aten.reshape" and graph.nodes[-1].args == (X, (-1, WIDTH))


def test_a_dimension_that_may_be_one_is_not_taken_away(b):
    """The library would take the sequence away where it is of one position."""
    graph = kept(b.graph(b("aten.squeeze.dims", b("aten.unsqueeze", X, 0), (0, 2), name="end")))
    end = graph.nodes[-1]
    assert (end.op, end.args[1], end.results[0].shape) == ("aten.reshape", (B, S, WIDTH), (B, S, WIDTH))


def test_constants_like_a_tensor_depend_on_nothing(b):
    like = b("aten.zeros_like", X, None, name="like")
    mask = b("aten.new_ones", like, (), DType("bool"), name="mask")
    graph = kept(b.graph(b("aten.where.self", mask, like, X, name="end")))
    made = {n.name: (n.op, n.args) for n in graph.nodes}
    assert made["like"] == ("aten.zeros", ((B, S, WIDTH), FLOAT))
    assert made["mask"] == ("aten.ones", ((), DType("bool")))


def norm(b, x, weight=WEIGHT, eps=1e-5, exponent=2, dims=(-1,), swap=False):
    mean = b("aten.mean.dim", b("aten.pow.Tensor_Scalar", x, exponent), dims, True, None)
    root = b("aten.rsqrt", b("aten.add.Tensor", mean, eps, 1))
    scaled = b("aten.mul.Tensor", *((root, x) if swap else (x, root)))
    return b("aten.mul.Tensor", *((scaled, weight) if swap else (weight, scaled)), name="normed")


@pytest.mark.parametrize("swap", [False, True])
def test_a_spelled_out_norm_is_fused(swap, b, execute):
    graph = b.graph(norm(b, X, swap=swap))
    fused = fuse(clean(graph))
    validate(fused)
    assert [n.op for n in fused.nodes] == ["aten.embedding", "aten.rms_norm"]
    assert fused.nodes[-1].name == "normed" and fused.nodes[-1].args == (X, (WIDTH,), Ref("norm"), 1e-5)
    random = np.random.default_rng(0)
    weights = {v.name: random.normal(size=v.type.shape) for v in graph.variables}
    tokens = random.integers(0, 9, (2, 5))
    np.testing.assert_allclose(execute(fused, weights, tokens), execute(graph, weights, tokens), rtol=1e-12)


@pytest.mark.parametrize("other", [{"exponent": 3}, {"dims": (1,)}, {"eps": 1}, {"weight": W}])
def test_what_is_not_quite_a_norm_is_left(other, b):
    x = (
        b("aten.linear", W, W, None) if "weight" in other else X
    )  # (6, 6) broadcasts, but is not a norm's weight
    graph = b.graph(norm(b, x, **other))
    assert "aten.rms_norm" not in {n.op for n in fuse(clean(graph)).nodes}


def test_a_norm_in_another_precision_is_left(b):
    wide = b("aten.to.dtype", X, DType("float64"))
    graph = b.graph(norm(b, wide))
    assert "aten.rms_norm" not in {n.op for n in fuse(clean(graph)).nodes}


@pytest.mark.parametrize(
    "turn",
    [
        ("aten.t", W),
        ("aten.numpy_T", W),
        ("aten.transpose.int", W, -2, -1),
        ("aten.permute", W, (1, 0)),
        ("aten.permute", W, (-1, -2)),
    ],
)
def test_a_product_with_a_matrix_the_other_way_round_is_a_layer(b, turn):
    b(*turn, name="turned")
    y = b("aten.matmul", X, Ref("turned"), name="y")
    cleaned = kept(b.graph(y))
    assert [(node.name, node.op) for node in cleaned.nodes] == [("x", "aten.embedding"), ("y", "aten.linear")]
    assert cleaned.nodes[1].args == (X, W, None)


def test_a_matrix_times_rows_the_other_way_round_is_a_layer_of_rows_turned(b, execute):
    b("aten.transpose.int", X, 2, -2, name="columns")
    graph = b.graph(b("aten.matmul", W, Ref("columns"), name="y"))
    cleaned = kept(graph)
    assert [(node.name, node.op) for node in cleaned.nodes] == [
        ("x", "aten.embedding"), ("y_rows", "aten.linear"), ("y", "aten.transpose.int"),
    ]  # fmt: skip
    random = np.random.default_rng(0)
    weights = {v.name: random.normal(size=v.type.shape) for v in graph.variables}
    tokens = random.integers(0, 9, (2, 5))
    np.testing.assert_allclose(execute(cleaned, weights, tokens), execute(graph, weights, tokens), rtol=1e-12)


@pytest.mark.parametrize("args", [(X, W), (Ref("columns"), X), (X, Ref("same"))])
def test_other_products_stay_what_they_are(b, args):
    b("aten.t", W, name="turned")
    b("aten.permute", W, (0, 1), name="same")
    b("aten.transpose.int", X, 1, 2, name="columns")
    y = b("aten.matmul", *args, name="y")
    assert kept(b.graph(y)).nodes[-1].op == "aten.matmul"


@pytest.mark.parametrize("training", [True, False])
def test_statistics_of_what_nothing_reads_are_kept(build, training):
    b = build(table=(9, WIDTH), mean=(WIDTH,), var=(WIDTH,))
    h = b("aten.mean.dim", b("aten.embedding", TABLE, IDS, -1, False), (1,), False, None)
    norm = b("aten.batch_norm", h, None, None, Ref("mean"), Ref("var"), training, 0.1, 1e-5)
    assert (norm.name in clean(b.graph(h)).node_index) == training
