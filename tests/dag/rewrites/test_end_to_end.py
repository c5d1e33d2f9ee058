"""Which graphs may run several sequences as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.end_to_end import end_to_end

BATCH, SEQUENCE = symbol("batch"), symbol("sequence")
END = 2**63 - 1
HIDDEN = TensorType((BATCH, SEQUENCE, 4), "float32")


def graph(*steps: tuple[str, tuple[object, ...]], given: TensorType = HIDDEN) -> Graph:
    """Nodes n0, n1, ...: each op with its arguments, "x" for what came before."""
    at, nodes, types = Ref("x"), list[Node](), {Ref("x"): given}
    for i, (op, args) in enumerate(steps):
        args = tuple(at if a == "x" else Ref(a) if isinstance(a, str) else a for a in args)
        nodes.append(Node(f"n{i}", op, args, infer(op, args, types)))  # type: ignore[arg-type]
        at = Ref(f"n{i}")
        types[at] = nodes[-1].results[0]
    return Graph((Input("x", given),), (), tuple(nodes), (at,))


BY_HEAD = TensorType((BATCH, 2, SEQUENCE), "float32")
LAST = ("aten.slice.Tensor", ("x", 1, -1, END, 1))
TANH = ("aten.tanh", ("x",))


def test_positions_apart_may_lie_end_to_end() -> None:
    found = end_to_end(graph(TANH))
    assert found is not None
    assert (found.inputs, found.outputs, found.last, found.ends) == (
        {"x": (1, 1)},
        ((1, 1),),
        frozenset(),
        (False,),
    )


def product(frequencies: tuple[int, ...], op: str = "aten.matmul") -> Graph:
    """Of a matrix of the model's with what it is given, (batch, frequencies[2], sequence)."""
    given = TensorType((1, frequencies[2], SEQUENCE), "float32")
    matrix = Variable("frequencies", TensorType(frequencies, "float32"), trainable=False)
    args = Ref("frequencies"), Ref("x")
    made = infer(op, args, {Ref("x"): given, Ref("frequencies"): matrix.type})
    return Graph((Input("x", given),), (matrix,), (Node("n", op, args, made),), (Ref("n"),))


@pytest.mark.parametrize("op", ["aten.matmul", "aten.bmm"])
def test_frequencies_times_positions_are_numbers_one_by_one(op: str) -> None:
    """As transformers before 5.24 writes rotary embeddings."""
    found = end_to_end(product((1, 8, 1), op))
    assert found is not None and (found.inputs, found.outputs) == ({"x": (2, 1)}, ((2, 1),))
    assert (
        end_to_end(product((1, 8, 2), op)) is None
    )  # a library may sum up more by how many positions there are


def test_a_matrix_times_positions_does_not_lie_end_to_end_as_a_layer_either() -> None:
    """How its sums are made depends on how many positions there are, in whichever way it is written."""
    given = TensorType((SEQUENCE, 4), "float32")
    matrix = Variable("matrix", TensorType((8, 4), "float32"))
    types = {Ref("x"): given, Ref("matrix"): matrix.type}
    turned = Node("turned", "aten.t", (Ref("x"),), infer("aten.t", (Ref("x"),), types))
    args = Ref("matrix"), Ref("turned")
    made = Node(
        "made", "aten.matmul", args, infer("aten.matmul", args, types | {Ref("turned"): turned.results[0]})
    )
    found = Graph((Input("x", given),), (matrix,), (turned, made), (Ref("made"),))
    assert clean(found).nodes[-1].op == "aten.linear"
    assert end_to_end(found) is None and end_to_end(clean(found)) is None


def test_positions_times_positions_do_not_lie_end_to_end() -> None:
    turned = ("aten.transpose.int", ("x", 1, 2))
    row = TensorType((BATCH, 1, SEQUENCE), "float32")
    assert end_to_end(graph(turned, turned, ("aten.matmul", ("n0", "n1")), given=row)) is None
    assert end_to_end(graph(turned, turned, given=row)) is not None


@pytest.mark.parametrize(
    ("step", "along"),
    [
        (("aten.repeat_interleave.self_int", ("x", 2, 1)), (1, 2)),
        (("aten.repeat_interleave.self_int", ("x", 2, None)), (0, 8)),
        (("aten.reshape", ("x", (BATCH, SEQUENCE * 2, 2))), (1, 2)),
        (("aten.reshape", ("x", (-1, 4))), (0, 1)),
    ],
)
def test_a_position_may_have_several_rows_one_behind_the_other(
    step: tuple[str, tuple[object, ...]], along: tuple[int, int]
) -> None:
    found = end_to_end(graph(step))
    assert found is not None and found.outputs == (along,)
    again = end_to_end(graph(TANH, given=graph(step).nodes[0].results[0]))
    assert again is not None and again.inputs == {"x": along}


@pytest.mark.parametrize(
    "step",
    [
        ("aten.reshape", ("x", (BATCH, SEQUENCE * 2))),
        ("aten.repeat_interleave.self_int", ("x", 2, None)),
        ("aten.repeat", ("x", (1, 1, 2))),
    ],
)
def test_rows_of_a_position_that_lie_apart_run_alone(step: tuple[str, tuple[object, ...]]) -> None:
    assert end_to_end(graph(step, given=BY_HEAD)) is None


def test_the_cut_to_the_last_position_is_found_whatever_its_name() -> None:
    found = end_to_end(graph(TANH, LAST, TANH))
    assert found is not None
    assert (found.outputs, found.last, found.ends) == (((1, 1),), {"n1"}, (True,))


@pytest.mark.parametrize(
    "steps",
    [
        (("aten.cumsum", ("x", 1, None)),),
        (("aten.slice.Tensor", ("x", 1, 0, 1, 1)),),
        (LAST, ("aten.slice.Tensor", ("x", 2, 0, 2, 1))),
        (LAST, ("aten.add.Tensor", ("x", "n0", 1)), ("aten.sum.dim_IntList", ("x", (1,), False, None))),
        (("aten.mean.dim", ("x", (1,), True, None)),),
    ],
    ids=["sums along", "keeps the first", "a view of the last", "adds up the last", "averages"],
)
def test_what_mixes_positions_runs_alone(steps: tuple[tuple[str, tuple[object, ...]], ...]) -> None:
    assert end_to_end(graph(*steps)) is None


def test_what_reads_the_last_position_and_all_runs_alone() -> None:
    both = graph(TANH, LAST)
    args = (Ref("n0"), Ref("n1"), 1)
    types = {Ref("n0"): HIDDEN, Ref("n1"): both.nodes[1].results[0]}
    node = Node("n2", "aten.add.Tensor", args, infer("aten.add.Tensor", args, types))
    assert end_to_end(replace(both, nodes=(*both.nodes, node), outputs=(Ref("n2"),))) is None


def test_a_stage_after_the_cut_runs_alone() -> None:
    """What it receives does not say that it is one position of a sequence."""
    first, second = split(graph(TANH, LAST, TANH), [2])
    assert end_to_end(first.graph) is not None
    assert end_to_end(second.graph) is None
