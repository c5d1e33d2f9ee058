from __future__ import annotations

import pytest
from support.instances import Builder

from fusion.dag.cutting.costs import node_costs
from fusion.dag.cutting.cuts import split
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.runtime.device.overrun import IN_A_ROW, SPARE_SECONDS, TIMES, Overrun, call_seconds


def test_three_calls_in_a_row_of_ten_times_the_estimate_are_enough() -> None:
    watched = Overrun(2.0)
    late, timely = 2.0 * TIMES + 0.1, 2.0 * TIMES - 0.1
    assert not any(watched.took(seconds) for seconds in [late, late, timely] * 5)
    assert [watched.took(late) for _ in range(IN_A_ROW)] == [False] * (IN_A_ROW - 1) + [True]


def test_a_small_call_may_take_a_second() -> None:
    watched = Overrun(1e-6)
    assert not any(watched.took(SPARE_SECONDS) for _ in range(100))
    assert [watched.took(1.01 * SPARE_SECONDS) for _ in range(IN_A_ROW)][-1]


def test_a_call_takes_longer_the_more_there_is_to_compute() -> None:
    def seconds(width: int, batch: int, rate: float = 1e9) -> float:
        built = Builder(width)
        built.block(width, width)
        (stage,) = split(built.graph(), ())
        return call_seconds(stage, {"batch": batch}, rate)

    assert seconds(512, 64, 1e9) > 2 * 64 * 512 * 512 / 1e9, "no less than the product"
    assert seconds(512, 4096) == pytest.approx(64 * seconds(512, 64), rel=0.3)
    assert seconds(512, 4096, 1e10) < seconds(512, 4096, 1e9)


def test_all_rows_may_choose_the_experts_that_are_held_here() -> None:
    def seconds(of: int) -> float:
        types = {
            Ref("x"): TensorType((64, 32), "float32"),
            Ref("ids"): TensorType((64,), "int64"),
            Ref("w"): TensorType((2, 16, 32), "float32"),
        }
        args = (Ref("x"), Ref("ids"), Ref("w"), None, 0, of, False)
        node = Node("y", "fusion.expert_linear", args, infer("fusion.expert_linear", args, types))
        inputs = (Input("x", types[Ref("x")]), Input("ids", types[Ref("ids")]))
        graph = Graph(inputs, (Variable("w", types[Ref("w")]),), (node,), (Ref("y"),))
        assert node_costs(graph, {})[0].forward_flops == 64 * 2 * 32 * 16 * 2 // of, "the mean"
        (stage,) = split(graph, ())
        return call_seconds(stage, {}, 1e3)

    assert seconds(65536) == seconds(2) > 64 * 2 * 32 * 16 / 1e3


def test_what_grows_as_a_size_falls_takes_as_long_as_at_its_most() -> None:
    x, size = TensorType((symbol("batch"),), "float32"), 10**9 - 10**8 * symbol("batch")
    types, nodes = {Ref("x"): x}, []
    for name, op, *args in (
        ("ones", "aten.ones", (size,), None),
        ("sum", "aten.sum", Ref("ones"), None),
        ("y", "aten.add.Tensor", Ref("x"), Ref("sum"), 1),
    ):
        nodes.append(Node(name, op, tuple(args), infer(op, tuple(args), types)))
        types[Ref(name)] = nodes[-1].results[0]
    (stage,) = split(Graph((Input("x", x),), (), tuple(nodes), (Ref("y"),)), ())
    assert call_seconds(stage, {"batch": 10}, 1e9) > 0.9  # additions of one row
