"""Of a graph of training and one of evaluation: what the merged one computes in each mode is what each of them does."""

from __future__ import annotations

import random

import numpy as np

from fusion.dag.cutting.mode import computed, in_mode
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Node, Ref
from fusion.dag.ir.opset_pointwise import BY_MODE
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.by_mode import by_mode

B, S = symbol("batch"), symbol("sequence")
IDS, TABLE = Ref("input_ids"), Ref("table")
WIDTH = 6
OPS = ("aten.tanh", "aten.sigmoid", "aten.relu")


def drawn(build, seed, length):
    """A chain of layers and functions, in which each reads one or two of the values before it."""
    draw = random.Random(seed)
    b = build(table=(9, WIDTH), w0=(WIDTH, WIDTH), w1=(WIDTH, WIDTH), w2=(WIDTH, WIDTH))
    made = [b("aten.embedding", TABLE, IDS, -1, False)]
    for _ in range(length):
        kind, x = draw.randrange(4), draw.choice(made[-3:])
        if kind == 0:
            made.append(b("aten.linear", x, Ref(f"w{draw.randrange(3)}"), None))
        elif kind == 1:
            made.append(b("aten.mul.Tensor", x, draw.choice(made)))
        else:
            made.append(b(draw.choice(OPS), x))
    return b.graph(b("aten.mean.dim", made[-1], (-1,), False, None))


def changed(build, graph, seed):
    """The same with some nodes left out, doubled or of another function."""
    draw = random.Random(seed)
    b = build(table=(9, WIDTH), w0=(WIDTH, WIDTH), w1=(WIDTH, WIDTH), w2=(WIDTH, WIDTH))
    at = {Ref(name): Ref(name) for name in (*graph.input_names, *graph.variable_names)}
    for node in graph.nodes:
        args = tuple(at[a] if isinstance(a, Ref) else a for a in node.args)
        if node.op in OPS and draw.random() < 0.3:
            at[Ref(node.name)] = draw.choice([args[0], b("aten.tanh", b("aten.sigmoid", args[0]))])
        else:
            at[Ref(node.name)] = b(node.op, *args)
    return b.graph(at[graph.outputs[0]])


def in_one(graph: Graph, training: bool) -> Graph:
    """As a plane runs it."""
    wanted = computed(graph, training=training)
    nodes = tuple(
        Node(n.name, *in_mode(n, training=training), n.results) for n in graph.nodes if n.name in wanted
    )
    return Graph(graph.inputs, graph.variables, nodes, graph.outputs, graph.symbols)


def test_each_mode_computes_its_own_graph(build, evaluate) -> None:
    values = {"input_ids": np.arange(6).reshape(2, 3), "position_ids": np.zeros((2, 3), np.int64)}
    table = np.random.default_rng(0)
    values |= {"table": table.normal(size=(9, WIDTH))} | {
        f"w{i}": table.normal(size=(WIDTH, WIDTH)) for i in range(3)
    }
    joined, sizes = 0, {"batch": 2, "sequence": 3}
    for seed in range(40):
        training = drawn(build, seed, 12)
        evaluated = changed(build, training, seed)
        merged = by_mode(training, evaluated)
        validate(merged)
        joined += len(merged.nodes) < len(training.nodes) + len(evaluated.nodes)
        for graph, mode in ((training, True), (evaluated, False)):
            np.testing.assert_allclose(
                evaluate(in_one(merged, mode), values, sizes), evaluate(graph, values, sizes)
            )
    assert joined == 40


def test_the_same_graph_twice_is_that_graph(build) -> None:
    graph = by_mode(drawn(build, 1, 12), drawn(build, 1, 12))
    assert by_mode(graph, graph) == graph and all(node.op != BY_MODE for node in graph.nodes)


def test_a_part_of_evaluation_alone_lies_beside_what_is_the_same(build) -> None:
    graphs = []
    for more in (False, True):
        b = build(table=(9, WIDTH), w=(WIDTH, WIDTH), v=(WIDTH, WIDTH))
        x = b("aten.embedding", TABLE, IDS, -1, False, name="x")
        for i in range(20):
            x = b("aten.tanh", x, name=f"t{i}")
            if more and i == 10:
                x = b("aten.sigmoid", b("aten.linear", x, Ref("v"), None))
        graphs.append(b.graph(b("aten.linear", x, Ref("w"), None)))
    merged = by_mode(*graphs)
    assert len(merged.nodes) == len(graphs[0].nodes) + 3
    [chosen] = (i for i, node in enumerate(merged.nodes) if node.op == BY_MODE)
    assert merged.nodes[chosen].args[0] == Ref("t10") and merged.nodes[chosen + 1].name == "t11"
