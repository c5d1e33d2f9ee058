"""Any cuts of any graph give the same result, send no more than is read, and keep names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.operations import operations

from fusion.dag.cutting.costs import differentiable
from fusion.dag.cutting.cuts import (
    candidate_cuts,
    crossings,
    legal_cuts,
    split,
    tie_groups,
)
from fusion.dag.cutting.positional import made_of_weights
from fusion.dag.cutting.references import needed, without_dead_nodes
from fusion.dag.cutting.stage import edge_name
from fusion.dag.ir.dims import bind, symbol
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.dag.ir.opset_pointwise import KEEP
from fusion.dag.ir.serialise import validate

B, S = symbol("batch"), symbol("sequence")
SIZES = {"batch": 2, "sequence": 3}
WIDTH = 4


class Builder:
    """Writes a graph node by node; the op-set infers the types."""

    def __init__(self, inputs, variables=()):
        self.inputs, self.variables, self.nodes = tuple(inputs), tuple(variables), []
        self.types = {Ref(v.name): v.type for v in (*inputs, *variables)}

    def __call__(self, name, op, *args):
        results = infer(op, args, self.types)
        self.nodes.append(Node(name, op, args, results))
        self.types.update({Ref(name, i): t for i, t in enumerate(results)})
        return Ref(name)

    def graph(self, *outputs):
        graph = Graph(self.inputs, self.variables, tuple(self.nodes), outputs)
        validate(graph)
        return graph


RUN = {
    "aten.add.Tensor": lambda a, b, alpha: a + alpha * b,
    "aten.mul.Tensor": lambda a, b: a * b,
    "aten.sub.Tensor": lambda a, b, alpha: a - alpha * b,
    "aten.neg": lambda a: -a,
    "aten.linear": lambda x, w, b: x @ w.T,
    "aten.embedding": lambda w, i, *_: w[i],
    "aten.to.dtype": lambda x, dtype: x.astype(dtype.name),
    "aten.unsqueeze": lambda x, dim: np.expand_dims(x, dim),
    "aten.reshape": lambda x, shape: x.reshape([bind(d, SIZES) for d in shape]),
    "aten.chunk": lambda x, n, dim: np.split(x, n, dim),
    "aten.arange": lambda end, dtype: np.arange(bind(end, SIZES), dtype=np.int64),
    "aten.cos": np.cos,
}


def run(graph, values):
    known = {Ref(name): value for name, value in values.items()}
    for node in graph.nodes:
        args = [known[a] if isinstance(a, Ref) else a for a in node.args]
        out = RUN[node.op](*args)
        for i, result in enumerate(out if isinstance(out, list) else [out]):
            known[Ref(node.name, i)] = result
    return [known[ref] for ref in graph.outputs]


def run_stages(stages, values, outputs):
    """Every stage from what it says it needs and nothing else, in order; the outputs of the whole graph."""
    sent, results = {}, {}
    for stage in stages:
        if stage.graph.nodes:
            validate(stage.graph)
        received = {e.name for e in stage.receives}
        assert {i.name for i in stage.graph.inputs} - received <= values.keys()
        given = {v.name: values[v.name] for v in stage.graph.variables}
        for i in stage.graph.inputs:
            given[i.name] = sent[i.name, stage.index] if i.name in received else values[i.name]
        made = run(stage.graph, given)
        for edge, value in zip(stage.sends, made, strict=False):
            assert edge.producer == stage.index and all(c > stage.index for c in edge.consumers)
            sent.update({(edge.name, c): value for c in edge.consumers})
        results.update(zip(stage.results, made[len(stage.sends) :], strict=True))
    return [results[i] for i in range(outputs)]


def parameter(name, *shape, **more):
    return Variable(name, TensorType(shape, "float32"), **more)


INPUTS = (
    Input("input_ids", TensorType((B, S), "int64")),
    Input("position_ids", TensorType((B, S), "int64")),
)
VARIABLES = (
    parameter("table", 8, WIDTH),
    parameter("w0", WIDTH, WIDTH),
    parameter("w1", WIDTH, WIDTH),
    parameter("idle", 3),
    parameter("frequencies", WIDTH, kind="buffer", trainable=False),
)


@st.composite
def graphs(draw):
    """A random DAG of hidden states, of tables made of positions, and of values with several results."""
    b = Builder(INPUTS, VARIABLES)
    position = b("position", "aten.to.dtype", Ref("position_ids"), DType("float32"))
    column = b("column", "aten.unsqueeze", position, -1)
    tables = [b("angles", "aten.mul.Tensor", column, Ref("frequencies"))]
    hidden = [b("embedded", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)]
    for i in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["add", "linear", "table", "rotate", "chunk", "fold"]))
        x, y = draw(st.sampled_from(hidden)), draw(st.sampled_from(hidden))
        if kind == "add":
            hidden.append(b(f"n{i}", "aten.sub.Tensor", x, y, 1))
        elif kind == "linear":
            hidden.append(b(f"n{i}", "aten.linear", x, Ref(draw(st.sampled_from(["w0", "w1"]))), None))
        elif kind == "table":
            tables.append(b(f"n{i}", "aten.cos", draw(st.sampled_from(tables))))
        elif kind == "rotate":
            hidden.append(b(f"n{i}", "aten.mul.Tensor", x, draw(st.sampled_from(tables))))
        elif kind == "chunk":
            b(f"n{i}", "aten.chunk", x, 2, -1)
            part = b(f"n{i}a", "aten.mul.Tensor", Ref(f"n{i}", 0), Ref(f"n{i}", 1))
            hidden.append(b(f"n{i}b", "aten.linear", part, b_half(b), None))
        else:
            flat = b(f"n{i}", "aten.reshape", x, (B * S, WIDTH))
            hidden.append(b(f"n{i}a", "aten.reshape", flat, (B, S, WIDTH)))
    count = draw(st.integers(1, 2))
    return b.graph(*hidden[-count:])


def b_half(b):
    """(WIDTH, WIDTH / 2): the first half of w0's columns."""
    b(f"half{len(b.nodes)}", "aten.chunk", Ref("w0"), 2, 1)
    return Ref(b.nodes[-1].name, 0)


@st.composite
def cut_graphs(draw):
    graph = draw(graphs())
    places = st.sampled_from(range(1, len(graph.nodes)))
    return graph, tuple(sorted(draw(st.sets(places, max_size=5))))


def values_of(graph, seed=0):
    random = np.random.default_rng(seed)
    values = {v.name: random.normal(size=v.type.shape).astype(np.float32) for v in graph.variables}
    values["input_ids"] = random.integers(0, 8, (2, 3))
    values["position_ids"] = np.tile(np.arange(3), (2, 1))
    return values


@settings(max_examples=examples(150))
@given(cut_graphs())
def test_any_cuts_give_the_same_result(cut):
    graph, cuts = cut
    values = values_of(graph)
    stages = split(graph, cuts)
    assert len(stages) == len(cuts) + 1
    for got, wanted in zip(run_stages(stages, values, len(graph.outputs)), run(graph, values), strict=True):
        np.testing.assert_array_equal(got, wanted)


@settings(max_examples=examples(100))
@given(cut_graphs())
def test_a_stage_holds_what_it_reads_under_the_names_of_the_whole(cut):
    graph, cuts = cut
    stages = split(graph, cuts)
    of_whole = {n.name: n.op for n in graph.nodes}
    used = {r.name for n in needed(graph, graph.outputs) for r in n.refs()}
    held = {v.name for s in stages for v in s.graph.variables}
    assert held == {v.name for v in graph.variables}
    for stage in stages:
        read = {r.name for n in stage.graph.nodes for r in n.refs()} | {r.name for r in stage.graph.outputs}
        assert all(of_whole[n.name] == n.op for n in stage.graph.nodes)
        assert {v.name for v in stage.graph.variables if v.name in used} <= read
        assert {e.name for e in stage.receives} <= read
        for edge in stage.receives:
            assert edge in stages[edge.producer].sends and stage.index in edge.consumers
    everywhere = sum(len(n.results) for s in stages for n in s.graph.nodes if n.op == "aten.linear")
    assert everywhere <= sum(n.op == "aten.linear" for n in graph.nodes)  # work is never repeated


@settings(max_examples=examples(100))
@given(graphs(), st.data())
def test_legal_cuts_leave_no_stage_empty_and_stand_for_all(graph, data):
    legal = legal_cuts(graph)
    if not legal:
        return
    chosen = sorted(data.draw(st.sets(st.sampled_from(legal), min_size=1)))
    assert all(stage.graph.nodes for stage in split(graph, chosen))
    cut = data.draw(st.integers(legal[0], len(graph.nodes) - 1))
    found, stands = (split(graph, (c,)) for c in (cut, max(c for c in legal if c <= cut)))
    # What is made of weights alone is behind a legal cut, and a cut after the last node that counts leaves nothing behind it.
    weights = made_of_weights(graph)
    assert [apart(s, weights) for s in found] == [apart(s, weights) for s in stands] or not found[
        1
    ].graph.nodes


def apart(stage, names):
    return [node.name for node in stage.graph.nodes if node.name not in names]


@settings(max_examples=examples(100))
@given(graphs(), st.data())
def test_crossing_bytes_are_those_of_the_edges(graph, data):
    live = {n.name for s in split(graph, ()) for n in s.graph.nodes}
    if live != {n.name for n in graph.nodes}:
        return  # what only unused nodes read is counted, though it is not sent
    cut = data.draw(st.integers(1, len(graph.nodes) - 1))
    edges = split(graph, (cut,))[0].sends
    total = sum(4 * int(np.prod([bind(d, SIZES) for d in e.type.shape])) for e in edges)
    assert crossings(graph, SIZES)[0][cut] == total


def chain(blocks):
    b = Builder(INPUTS, VARIABLES)
    x = b("embedded", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    for i in range(blocks):
        y = b(f"up{i}", "aten.linear", x, Ref("w0"), None)
        x = b(f"add{i}", "aten.add.Tensor", x, y, 1)
    return b.graph(x)


def test_a_skip_edge_goes_straight_to_its_consumer():
    b = Builder(INPUTS, VARIABLES)
    x = b("x", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    y = b("y", "aten.linear", x, Ref("w0"), None)
    z = b("z", "aten.linear", y, Ref("w1"), None)
    stages = split(b.graph(b("sum", "aten.add.Tensor", x, z, 1)), (1, 2, 3))
    (edge,) = stages[0].sends
    assert edge.consumers == (1, 3) and edge.needs_gradient and edge.name == edge_name(x) == "x/0"
    assert [e.name for e in stages[3].receives] == ["x/0", "z/0"]
    assert [e.name for e in stages[2].receives] == ["y/0"]


def test_tables_of_positions_are_repeated_not_sent():
    b = Builder(INPUTS, VARIABLES)
    position = b("position", "aten.to.dtype", Ref("position_ids"), DType("float32"))
    angles = b("angles", "aten.mul.Tensor", b("column", "aten.unsqueeze", position, -1), Ref("frequencies"))
    x = b("x", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    y = b("y", "aten.mul.Tensor", x, angles)
    z = b("z", "aten.mul.Tensor", y, angles)
    first, last = split(b.graph(z), (5,))
    assert [e.name for e in last.receives] == ["y/0"]
    assert [n.name for n in last.graph.nodes] == ["position", "column", "angles", "z"]
    assert [i.name for i in last.graph.inputs] == ["position_ids", "y/0"]
    assert [v.name for v in last.graph.variables] == ["frequencies"]
    assert [n.name for n in first.graph.nodes] == ["position", "column", "angles", "x", "y"]
    assert tie_groups((first, last)) == ()  # a copy of a buffer has no gradient to share


def test_content_is_sent_not_read_again():
    b = Builder(INPUTS, VARIABLES)
    doubled = b("doubled", "aten.add.Tensor", Ref("input_ids"), Ref("input_ids"), 1)
    x = b("x", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    y = b("y", "aten.add.Tensor", x, b("wide", "aten.unsqueeze", doubled, -1), 1)
    last = split(b.graph(y), (2,))[1]
    assert [(e.name, e.needs_gradient) for e in last.receives] == [("doubled/0", False), ("x/0", True)]
    assert "input_ids" not in {i.name for i in last.graph.inputs}


def test_many_stages_are_work_in_proportion_to_their_number():
    def cut(layers):
        graph = chain(layers)
        return operations(lambda: split(graph, legal_cuts(graph)))

    few, many = cut(20), cut(160)
    assert many < 12 * few


def test_what_tells_the_sizes_is_not_looked_for_among_all_inputs_by_each_stage():
    def cut(count):
        inputs = [Input(f"x{i}", TensorType((2 * S,), "bool")) for i in range(count)]  # none tells it
        b = Builder([*inputs, Input("y", TensorType((1,), "float32"))])
        made = [b(f"n{i}", "aten.expand", Ref("y"), (S,)) for i in range(count)]
        graph = b.graph(*made)
        return operations(lambda: split(graph, tuple(range(1, count))))

    assert cut(160) < 6 * cut(40)


def test_cuts_that_repeat_what_is_cheap_without_end_are_refused(monkeypatch):
    monkeypatch.setattr("fusion.dag.cutting.cuts.MAX_REPEATED", 50)
    b = Builder(INPUTS, VARIABLES)
    mask = b("mask", "aten.to.dtype", Ref("position_ids"), DType("float32"))
    for i in range(20):
        mask = b(f"mask{i}", "aten.neg", mask)
    row = b("row", "aten.unsqueeze", mask, -1)
    x = b("x", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    for i in range(8):
        x = b(f"x{i}", "aten.add.Tensor", x, row, 1)
    graph = b.graph(x)
    assert len(split(graph, (24, 25))) == 3
    with pytest.raises(GraphError, match="repeat more than 50 nodes"):
        split(graph, (24, 25, 26, 27, 28, 29))


def test_a_stage_is_given_what_tells_its_sizes():
    b = Builder(INPUTS, VARIABLES)
    x = b("x", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    flat = b("flat", "aten.reshape", x, (B * S, WIDTH))
    graph = b.graph(
        b("back", "aten.reshape", b("linear", "aten.linear", flat, Ref("w0"), None), (B, S, WIDTH))
    )
    last = split(graph, (2,))[1]
    assert [i.name for i in last.graph.inputs] == ["position_ids", "flat/0"]


def test_tied_parameters_form_a_group():
    stages = split(chain(3), (2, 5))
    (group,) = tie_groups(stages)
    assert (group.variable, group.stages) == ("w0", (0, 1, 2))


def test_a_variable_that_nothing_reads_is_kept_frozen_by_the_first_stage():
    stages = split(chain(2), (3,))
    idle = [(s.index, v.trainable) for s in stages for v in s.graph.variables if v.name == "idle"]
    assert idle == [(0, False)]


def test_gradients_stop_at_whole_numbers_and_detach():
    b = Builder(INPUTS, VARIABLES)
    x = b("x", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    number = b("number", "aten.argmax", x, -1, False)
    real = b("real", "aten.to.dtype", number, DType("float32"))
    cut_off = b("cut_off", "aten.detach", x)
    joined = b("joined", "aten.mul.Tensor", cut_off, x)
    found = differentiable(b.graph(real, joined))
    assert {x, joined} <= found and not {number, real, cut_off} & found


def test_what_no_gradient_comes_back_to_is_frozen_and_sent_without_one():
    """An optimizer would decay it, wherever a gradient of zeros came from another stage; without cuts it would not."""
    b = Builder(INPUTS, VARIABLES)
    x = b("x", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    y = b("y", "aten.linear", x, Ref("w0"), None)
    cut_off = b("cut_off", "aten.detach", y)
    graph = b.graph(b("z", "aten.linear", cut_off, Ref("w1"), None))
    for cuts in ((), (1,), (2,), (1, 2, 3)):
        stages = split(graph, cuts)
        trained = {v.name for s in stages for v in s.graph.variables if v.kind == "parameter" and v.trainable}
        assert trained == {"w1"}
        assert not any(edge.needs_gradient for stage in stages for edge in stage.sends)


@pytest.mark.parametrize("cuts", [(0,), (5,), (2, 2), (3, 2), (True,), (1.0,), (-1,)])
def test_bad_cuts_are_refused(cuts):
    with pytest.raises(GraphError, match="cuts must be whole numbers"):
        split(chain(2), cuts)


def test_a_written_buffer_stays_with_all_that_write_to_it():
    row = TensorType((WIDTH,), "float32")
    stats = [Variable(n, row, "buffer", False) for n in ("mean", "var")]
    b = Builder([Input("x", TensorType((B, WIDTH), "float32"))], stats)
    norm = (None, None, Ref("mean"), Ref("var"), True, 0.1, 1e-5)
    x = b("one", "aten.batch_norm", Ref("x"), *norm)
    x = b("two", "aten.neg", x)
    x = b("three", "aten.batch_norm", x, *norm)
    graph = b.graph(b("four", "aten.neg", x))
    assert legal_cuts(graph) == (3,)
    assert len(split(graph, (3,))) == 2
    with pytest.raises(GraphError, match="one and three"):
        split(graph, (2,))


def test_what_is_kept_stays_with_all_that_read_it_though_nothing_reads_what_is_kept():
    row = TensorType((WIDTH,), "float32")
    b = Builder([Input("x", TensorType((B, WIDTH), "float32"))], [Variable("mean", row, "buffer", False)])
    x = b("one", "aten.sub.Tensor", Ref("x"), Ref("mean"), 1)
    mean = b("two", "aten.mean.dim", x, (0,), False, None)
    b("three", KEEP, Ref("mean"), mean)
    graph = without_dead_nodes(b.graph(b("five", "aten.neg", b("four", "aten.neg", x))))
    assert [node.name for node in graph.nodes] == ["one", "two", "three", "four", "five"]
    assert legal_cuts(graph) == (3, 4)
    assert [[n.name for n in s.graph.nodes] for s in split(graph, (3,))] == [
        ["one", "two", "three"],
        ["four", "five"],
    ]
    validate(graph)
    for buffer in ("x", "one"):
        hostile = [replace(n, args=(Ref(buffer), n.args[1])) if n.op == KEEP else n for n in graph.nodes]
        with pytest.raises(GraphError, match=r"fusion\.keep"):
            validate(replace(graph, nodes=tuple(hostile)))
    twice = (*graph.nodes, replace(graph.nodes[2], name="again"))
    with pytest.raises(GraphError, match=r"again: fusion\.keep writes to what is no buffer, or to one twice"):
        validate(replace(graph, nodes=twice))


def test_no_cut_parts_what_is_made_of_a_weight_from_the_node_behind_it():
    """A norm of 1 + weight, as Gemma's: its scale would be sent with each microbatch."""
    b = Builder(INPUTS, VARIABLES)
    x = b("x", "aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    y = b("y", "aten.linear", x, Ref("w0"), None)
    scale = b("scale", "aten.add.Tensor", Ref("w1"), Ref("w1"), 1)
    scale = b("more", "aten.neg", scale)
    graph = b.graph(b("last", "aten.neg", b("z", "aten.linear", y, scale, None)))
    assert legal_cuts(graph) == (1, 2, 5)
    assert [e.name for e in split(graph, (2,))[0].sends] == ["y/0"]


def test_candidates_are_the_cheap_cuts_of_each_part_of_the_work():
    graph = chain(20)
    legal = legal_cuts(graph)
    assert candidate_cuts(graph, SIZES, 1000) == legal
    few = candidate_cuts(graph, SIZES, 10)
    assert 5 <= len(few) <= 10 and set(few) <= set(legal)
    # between blocks one value crosses, inside a block two do
    assert all(graph.nodes[c - 1].name.startswith(("add", "embedded")) for c in few)
