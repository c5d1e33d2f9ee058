from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.dag.cutting.costs import scratch_bytes, storages
from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.cutting.memory import MemoryConfig, MemoryTables, measure_memory
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.dag.ir.opset_spec import elements
from tests.support.instances import chain, with_skips
from tests.support.stage_costs import stage_cost

B = 4
SIZES: Mapping[str, int] = {"batch": B}
BATCH = symbol("batch")


def f(*shape: object) -> TensorType:
    return TensorType(tuple(shape), "float32")  # type: ignore[arg-type]


def built(inputs: dict[str, TensorType], variables: dict[str, TensorType], *nodes: tuple) -> Graph:
    types = {Ref(name): type_ for name, type_ in (inputs | variables).items()}
    found = []
    for name, op, *args in nodes:
        node = Node(name, op, tuple(args), infer(op, tuple(args), types))
        found.append(node)
        types[Ref(name)] = node.results[0]
    return Graph(
        tuple(Input(n, t) for n, t in inputs.items()),
        tuple(Variable(n, t) for n, t in variables.items()),
        tuple(found),
        (Ref(found[-1].name),),
        ("batch",),
    )


def perceptron() -> Graph:
    return built(
        {"x": f(BATCH, 4), "targets": f(BATCH, 2)},
        {"a": f(8, 4), "c": f(2, 8)},
        ("up", "aten.linear", Ref("x"), Ref("a"), None),
        ("relu", "aten.relu", Ref("up")),
        ("down", "aten.linear", Ref("relu"), Ref("c"), None),
        ("loss", "aten.mse_loss", Ref("down"), Ref("targets"), 1),
    )


def tables(graph: Graph, cuts: tuple[int, ...], *, training: bool = True, **config: object) -> MemoryTables:
    bounds = (0, *cuts, len(graph.nodes))
    return measure_memory(graph, bounds, SIZES, training, MemoryConfig(**config))  # type: ignore[arg-type]


def test_a_stage_by_hand() -> None:
    found = tables(perceptron(), (1,))
    assert found.static_bytes[1, 2] == 64 + 64 + 128  # its weights, their gradients, two moments each
    assert found.kept_bytes[1, 2] == B * 4 * (8 + 2 + 2)  # relu; what the loss was made of
    # alive at relu: up, relu, targets
    assert found.working_bytes[1, 2] == B * 4 * (8 + 8 + 2)
    assert found.bytes(1, 2, 3) == 256 + 3 * found.kept_bytes[1, 2] + found.working_bytes[1, 2]


def test_what_an_optimizer_keeps_counts_by_its_slots() -> None:
    for slots in (0, 1, 2):
        assert tables(perceptron(), (1,), optimizer_slots=slots).static_bytes[0, 1] == 128 * (2 + slots)
    assert tables(perceptron(), (1,), training=False).static_bytes[0, 1] == 128
    with pytest.raises(ValueError, match="optimizer_slots"):
        MemoryConfig(optimizer_slots=-1)


def test_residuals_of_what_comes_back_and_of_what_is_tied() -> None:
    graph = built(
        {"x": f(BATCH, 8)},
        {"a": f(8, 8), "c": f(8, 8)},
        ("one", "aten.linear", Ref("x"), Ref("a"), None),
        ("two", "aten.linear", Ref("one"), Ref("c"), None),
        ("three", "aten.linear", Ref("two"), Ref("a"), None),
    )
    plain, kept = tables(graph, (1, 2)), tables(graph, (1, 2), error_feedback=True)
    more = kept.working_bytes - plain.working_bytes
    gradient, tied = 4 * B * 8, 4 * 64
    assert [more[i, i + 1] for i in range(3)] == [tied, gradient, gradient + tied]
    assert more[0, 2] == tied and more[1, 3] == gradient + tied and more[0, 3] == 0


def test_a_value_that_skips_a_stage_is_not_in_it() -> None:
    graph = built(
        {"x": f(BATCH, 8)},
        {"a": f(8, 8), "c": f(8, 8)},
        ("one", "aten.linear", Ref("x"), Ref("a"), None),
        ("two", "aten.linear", Ref("one"), Ref("c"), None),
        ("three", "aten.tanh", Ref("two")),
        ("four", "aten.add.Tensor", Ref("three"), Ref("one"), 1),
    )
    row = B * 8 * 4
    found = tables(graph, (1, 2, 3))
    assert [found.working_bytes[i, i + 1] for i in range(4)] == [2 * row, 2 * row, 2 * row, 3 * row]
    assert found.working_bytes[2, 3] == 2 * row and found.working_bytes[0, 4] == 3 * row
    assert found.working_bytes[1, 3] == 3 * row  # read by this stage and a later one: it counts to the end


def working(graph: Graph, *, training: bool = False) -> float:
    return float(tables(graph, (), training=training).working_bytes[0, 1])


@pytest.mark.parametrize(
    "reads",
    [
        ("y", "aten.matmul", Ref("wide"), Ref("x")),
        ("y", "aten.logsumexp", Ref("wide"), (0, 1), False),
        ("y", "aten.argmax", Ref("wide"), None, False),
        ("y", "aten.diff", Ref("wide"), 63, 0, None, None),
        ("y", "aten.view", Ref("wide"), (64 * 64,)),
        ("y", "aten._unsafe_view", Ref("wide"), (64 * 64,)),
        ("y", "aten.reshape", Ref("wide"), (64 * 64,)),
    ],
)
def test_what_an_operator_copies_to_its_whole_size_counts(reads: tuple[Any, ...]) -> None:
    """An expanded tensor is a view, and takes no memory until something reads it as if it were none."""
    graph = built({"x": f(64)}, {}, ("wide", "aten.expand", Ref("x"), (64, 64)), reads)
    assert 4 * 64 * 64 <= working(graph) <= 4 * 64 * 64 + 4 * (64 + 64 * 64)
    same = built(
        {"x": f(64)}, {}, ("wide", "aten.expand", Ref("x"), (64, 64)), ("y", "aten.relu", Ref("wide"))
    )
    assert working(same) == 4 * (64 + 64 * 64)


@pytest.mark.parametrize(
    "part",
    [
        ("aten.select.int", 0, 0),
        ("aten.slice.Tensor", 0, 3, 5, 1),
        ("aten.narrow", 0, 3, 2),
        ("aten.unbind.int", 0),
        ("aten.split.Tensor", 2, 0),
        ("aten.chunk", 500, 0),
        ("aten.index.Tensor", (Ref("ids"),)),
        ("aten.index_select", 0, Ref("ids")),
        ("aten.gather", 0, Ref("places")),
        ("aten.embedding", Ref("ids"), -1, False),
        ("aten.constant_pad_nd", (0, 0, -998, 0), 0),
    ],
)
def test_the_gradient_of_an_expanded_tensor_counts_whole_where_a_part_is_read(part: tuple[Any, ...]) -> None:
    """To read a row of a million takes nothing; its gradient is zeros for the others."""
    ids, places = TensorType((2,), "int64"), TensorType((1, 8), "int64")
    op, *args = part

    def read(width: int) -> Graph:
        return built(
            {"x": f(8), "ids": ids, "places": places}, {"w": f(8)},
            ("h", "aten.mul.Tensor", Ref("x"), Ref("w")), ("wide", "aten.expand", Ref("h"), (width, 8)),
            ("y", op, Ref("wide"), *args),
        )  # fmt: skip

    beside = 4 * (8 + 8 + 2 * 2 * 8) + 8 * (2 + 8)
    assert working(read(1000)) <= beside  # nobody learns when serving
    assert 4 * 8 * 1000 <= working(read(1000), training=True) <= 4 * 8 * 1000 + beside
    whole = built({"x": f(1000, 8)}, {"w": f(8)}, ("h", "aten.mul.Tensor", Ref("x"), Ref("w")), ("y", "aten.select.int", Ref("h"), 0, 0))  # fmt: skip
    assert working(whole, training=True) == working(whole)  # that of h is as large as h


def test_an_expanded_result_counts_as_what_is_sent_of_it() -> None:
    def expanding(*more: tuple[Any, ...]) -> Graph:
        return built(
            {"x": f(8)}, {}, ("h", "aten.relu", Ref("x")), ("wide", "aten.expand", Ref("h"), (1000, 8)), *more
        )

    found = tables(expanding(), (1,), training=False).working_bytes
    assert found[0, 2] == found[1, 2] + 4 * 8 == 4 * (8 + 8 + 8 * 1000)
    assert found[0, 1] == 4 * (8 + 8)  # what it is made of is sent as it is
    read = expanding(("end", "aten.select.int", Ref("wide"), 0, 0), ("last", "aten.relu", Ref("end")))
    found = tables(read, (2, 3), training=False).working_bytes
    assert found[0, 3] == found[0, 2] == 4 * (8 + 8)  # read where it is made
    assert found[0, 1] == 4 * (8 + 8 + 8 * 1000)
    first, *_ = split(read, (2, 3))
    assert working(first.graph) == found[0, 1]


def test_a_product_copies_matrices_that_go_with_several_each() -> None:
    def product(*lead: tuple[int, int], of: str = "aten.matmul") -> Graph:
        a, b = (f(*each, 4, 4) for each in lead)
        rest = (Ref("b"), None, 0.0, False, None, False) if "attention" in of else ()
        return built({"a": a, "b": b}, {}, ("y", of, Ref("a"), Ref("b"), *rest))

    every, some = 4 * 16 * 8 * 8, 4 * 16 * 8
    assert working(product((8, 8), (8, 8))) == 3 * every
    assert working(product((8, 8), (1, 1))) == 2 * every + 4 * 16
    assert working(product((8, 8), (8, 1))) == 3 * every + some
    assert working(product((8, 1), (1, 8))) == 3 * every + 2 * some
    attention = product((8, 8), (8, 1), of="aten.scaled_dot_product_attention")
    assert working(attention) >= 2 * every + some + 2 * every  # keys and values of one head for eight
    graph = built(
        {"x": f(8, 8, 4, 4)}, {"w": f(8, 1, 4, 4)}, ("h", "aten.mul.Tensor", Ref("x"), Ref("w")), ("y", "aten.matmul", Ref("h"), Ref("w")),
    )  # fmt: skip
    kept = tables(graph, (), training=True).kept_bytes[0, 1]
    assert kept == 3 * every  # x and h, and w for each


def test_scores_count_where_no_kernel_takes_attention_piece_by_piece() -> None:
    def attention(width: int, *lead: int) -> Graph:
        q, v = f(*lead, 512, 8), f(*lead, 512, width)
        op = "aten.scaled_dot_product_attention"
        args = (Ref("q"), Ref("q"), Ref("v"), None, 0.0, True, None, False)
        return built({"q": q, "v": v}, {}, ("y", op, *args))

    scores = 2 * 4 * 2 * 512 * 512
    assert working(attention(8, 1, 2)) == 4 * 2 * 512 * (8 + 8 + 8)
    assert working(attention(9, 1, 2)) == 4 * 2 * 512 * (8 + 9 + 9) + scores
    assert working(attention(8, 2)) == 4 * 2 * 512 * (8 + 8 + 8) + scores


@pytest.mark.parametrize(
    ("shape", "learned", "counts"),
    [
        ((1, 2, 64, 64), False, False),
        ((64, 64), False, False),
        ((4, 1, 1, 64), False, False),
        ((1, 2, 64, 64), True, True),
        ((64, 64), True, True),
        ((2, 64, 64), False, True),
    ],
)
def test_scores_count_with_a_mask_that_no_kernel_takes(
    shape: tuple[int, ...], learned: bool, counts: bool
) -> None:
    """A bias that is learned, as those by distance of vision models, has its gradient from all scores; a mask of heads alone,
    without the batch, no kernel reads."""
    inputs, mask = {"x": f(4, 2, 64, 8)}, {"mask": f(*shape)}
    args = (Ref("x"), Ref("x"), Ref("x"), Ref("mask"), 0.0, False, None, False)
    graph = built(
        inputs if learned else inputs | mask, {"w": f(64, 8)} | (mask if learned else {}),
        ("h", "aten.mul.Tensor", Ref("x"), Ref("w")), ("y", "aten.scaled_dot_product_attention", Ref("h"), *args[1:]),
    )  # fmt: skip
    scores = 4 * 2 * 64 * 64 * 4
    found = tables(graph, (), training=True)
    for bytes_, times in ((found.kept_bytes[0, 1], 1), (found.working_bytes[0, 1], 2)):
        beside = 4 * (5 * 4 * 2 * 64 * 8 + 2 * 64 * 64)  # queries, keys, what is made of them, and the mask
        assert bytes_ >= times * scores if counts else bytes_ <= beside
    assert (working(graph) >= 2 * scores) == (counts and not learned)  # nobody learns when serving


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16"])
def test_windows_of_a_convolution_count_where_no_kernel_reads_them_in_place(dtype: str) -> None:
    size = {"float64": 8, "float32": 4}.get(dtype, 2)

    def convolution(op: str, x: tuple[int, ...], weight: tuple[int, ...], groups: int = 1) -> Graph:
        n = len(weight) - 2
        ones, zeros = (1,) * n, (0,) * n
        last = (zeros, groups, ones) if "transpose" in op else (ones, groups)
        inputs = {name: TensorType(shape, dtype) for name, shape in (("x", x), ("w", weight))}
        return built(inputs, {}, ("y", op, Ref("x"), Ref("w"), None, ones, zeros, *last))

    for graph, windows in (
        (convolution("aten.conv1d", (3, 2, 100), (4, 2, 41)), 3 * 60 * 2 * 41),
        (convolution("aten.conv1d", (2, 100), (4, 2, 41)), 60 * 2 * 41),
        (convolution("aten.conv2d", (3, 4, 20, 20), (4, 1, 11, 11), 4), 3 * 10 * 10 * 11 * 11),
        (convolution("aten.conv3d", (3, 1, 9, 9, 9), (1, 1, 5, 5, 5)), 3 * 5**3 * 5**3),
        (convolution("aten.conv_transpose1d", (3, 2, 60), (2, 4, 41)), 3 * 60 * 4 * 41),
    ):
        plain = sum(elements(type_) for type_ in graph.types.values())
        assert working(graph) == size * (plain + windows * (dtype in ("float64", "float16")))


def test_states_of_a_recurrence_count() -> None:
    x, decay = f(16, 1, 2, 64), f(16, 1, 2, 1)
    args = (Ref("x"), Ref("x"), Ref("x"), Ref("decay"), None, None)
    graph = built({"x": x, "decay": decay}, {}, ("y", "fusion.recurrence", *args))
    assert working(graph) >= 3 * 4 * 16 * 64 * 64


def test_a_cache_is_as_long_as_a_session_and_a_run_no_longer_than_a_chunk() -> None:
    sequence = symbol("sequence")
    q, k = f(1, 4, sequence, 8), f(1, 2, sequence, 8)
    args = (Ref("q"), Ref("k"), Ref("k"), 0, None, None)
    node = Node("y", "fusion.cached_attention", args, (q,))
    graph = Graph((Input("q", q), Input("k", k)), (), (node,), (Ref("y"),))
    for chunk, runs in ((None, 50), (5, 5), (80, 50)):
        config = MemoryConfig(chunk=chunk)
        found = measure_memory(graph, (0, 1), {"sequence": 50}, False, config)
        assert found.kept_bytes[0, 1] == 50 * 2 * 2 * 8 * 4
        assert found.working_bytes[0, 1] == runs * 4 * 8 * (4 + 2 + 4)


@settings(max_examples=examples(60))
@given(st.integers(0, 10_000), st.booleans(), st.integers(0, 2), st.data())
def test_every_run_of_nodes_is_what_its_stage_is(
    seed: int, skips: bool, slots: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    graph = with_skips(6, 16, random, 0.6) if skips else chain([int(w) for w in random.choice([4, 8, 32], 6)])
    legal = legal_cuts(graph)
    candidates = tuple(sorted(data.draw(st.sets(st.sampled_from(legal), min_size=1))))
    bounds = (0, *candidates, len(graph.nodes))
    found = measure_memory(graph, bounds, SIZES, True, MemoryConfig(optimizer_slots=slots))
    picked = sorted(data.draw(st.sets(st.sampled_from(range(1, len(bounds) - 1)))))
    edges = [0, *picked, len(bounds) - 1]
    for stage in split(graph, [bounds[i] for i in picked]):
        cost, at = stage_cost(stage, SIZES, slots), (edges[stage.index], edges[stage.index + 1])
        assert found.static_bytes[at] == cost.static_bytes
        assert found.kept_bytes[at] == cost.saved_bytes
        # What comes from outside and later stages read too counts to the end of this one.
        shared = sum(4 * B * 16 for edge in stage.receives if edge.consumers[-1] > stage.index)
        shared += sum(4 * B * 16 for i in stage.graph.inputs if skips and i.name in graph.input_names)
        assert cost.working_bytes <= found.working_bytes[at] <= cost.working_bytes + shared


@pytest.mark.parametrize("chunk", [None, 4])
def test_what_grows_as_a_size_falls_is_counted_at_its_most_when_serving(chunk: int | None) -> None:
    graph = built(
        {"x": f(symbol("sequence"), 4)},
        {},
        ("made", "aten.ones", (4000 - 1000 * symbol("sequence"),), None),
        ("sum", "aten.sum", Ref("made"), None),
        ("y", "aten.add.Tensor", Ref("x"), Ref("sum"), 1),
    )
    found = measure_memory(graph, (0, 3), {"sequence": 8}, False, MemoryConfig(chunk=chunk))
    assert found.bytes(0, 1, 1) >= 3000 * 4  # of one position; of four there are none


def test_thousands_of_results_are_not_gone_through_for_each_value() -> None:
    class Watched(tuple):  # type: ignore[type-arg]
        looked_through = 0

        def __contains__(self, ref: object) -> bool:
            Watched.looked_through += 1
            return super().__contains__(ref)

        def count(self, ref: object) -> int:
            Watched.looked_through += 1
            return super().count(ref)

    graph = built(
        {"x": f(1)},
        {},
        *((f"y{i}", "aten.expand", Ref("x"), (2,)) for i in range(9)),
        ("z", "aten.neg", Ref("x")),
    )
    sent = replace(graph, outputs=Watched([Ref("y0"), Ref("y1"), Ref("y1")]))
    once = replace(graph, outputs=(Ref("z"),))
    written = [measure_memory(g, (0, 10), {}, False, MemoryConfig()).bytes(0, 1, 1) for g in (sent, once)]
    assert Watched.looked_through == 0
    assert written[0] == 4 + 3 * 2 * 4 + 4  # x, what is sent of it in full, z


@pytest.mark.parametrize(
    ("node", "bytes_"),
    [
        (("aten.eq.Tensor", Ref("small"), Ref("wide")), 8 * 64),
        (("aten.add.Tensor", Ref("small"), Ref("number"), 1), 0),
        (("aten.mul.Tensor", Ref("half"), Ref("x")), 4 * 64),
        (("aten.mul.Tensor", Ref("x"), Ref("x")), 0),
        (("aten.where.self", Ref("flags"), Ref("x"), Ref("x")), 0),
        (("aten.to.dtype", Ref("half"), DType("float32")), 0),
        (("aten.sum", Ref("flags"), None), 8 * 64),
        (("aten.sum", Ref("x"), None), 0),
        (("aten.mean", Ref("half"), DType("float64")), 8 * 64),
        (("aten.any", Ref("half")), 0),
        (("aten.logsumexp", Ref("small"), (0,), False), 2 * 4 * 64),
        (("aten.roll", Ref("x"), (1,), (0,)), 4 * 64),
        (("aten.binary_cross_entropy_with_logits", Ref("x"), Ref("x"), None, None, 1), 2 * 4 * 64),
    ],
)
def test_operands_of_another_dtype_are_written_out_in_the_one_that_is_computed_in(
    node: tuple[Any, ...], bytes_: int
) -> None:
    dtypes = {"x": "float32", "half": "bfloat16", "small": "int8", "flags": "bool"}
    inputs = {name: TensorType((64,), dtype) for name, dtype in dtypes.items()}
    inputs |= {"wide": TensorType((64,), "float64"), "number": TensorType((), "int64")}
    graph = built(inputs, {}, ("n", *node))
    assert scratch_bytes(graph.nodes[0], graph.types, storages(graph)) == bytes_
