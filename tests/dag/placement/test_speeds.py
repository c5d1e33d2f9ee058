import numpy as np
import pytest
from support.staged import make

from fusion.dag.cutting.costs import node_costs
from fusion.dag.placement.network import Device
from fusion.dag.placement.segments import measure
from fusion.dag.placement.speeds import (
    DRAWN,
    KINDS,
    NODES,
    PRODUCTS,
    UPDATE_NODES,
    UPDATE_TOUCHES,
    Speeds,
    demands,
)

SPEEDS = Speeds(
    product_flop=1e-11, attention_flop=2e-11, convolution_flop=3e-11, streamed_byte=1e-10, touched_byte=2e-10,
    normed_byte=4e-10, drawn_element=5e-9, convolution=1e-4, node=5e-6, updated_byte=1e-10,
)  # fmt: skip


def test_parts_come_back_and_what_a_later_release_adds_is_passed_over() -> None:
    assert Speeds.of(SPEEDS.parts) == SPEEDS
    assert Speeds.of((*SPEEDS.parts, 7.0)) == SPEEDS
    for wrong in ((), SPEEDS.parts[:-1], (0.0, *SPEEDS.parts[1:]), (-1e-9, *SPEEDS.parts[1:]), (1e7, *SPEEDS.parts[1:])):  # fmt: skip
        with pytest.raises(ValueError):
            Speeds.of(wrong)


def test_the_best_of_two_measurements_is_that_of_each_figure() -> None:
    slow = Speeds.of([2 * part for part in SPEEDS.parts])
    mixed = Speeds.of([part * (1 + i % 2) for i, part in enumerate(SPEEDS.parts)])
    assert slow.best(SPEEDS) == SPEEDS == mixed.best(SPEEDS) and slow.best(mixed) != slow


def test_every_node_asks_for_its_flops_its_bytes_and_a_beginning() -> None:
    costs = node_costs(make("dropout").graph, {"batch": 2, "sequence": 12})
    forward, backward = demands(costs)
    assert forward.shape == backward.shape == (KINDS, len(costs))
    assert forward[NODES].sum() == len(costs)
    assert forward[:3].sum() == sum(cost.forward_flops for cost in costs)
    assert backward[:3].sum() == sum(cost.backward_flops for cost in costs)
    assert forward[3:6].sum() == sum(cost.moved_bytes for cost in costs)
    # Of the embedding and of two blocks: what attention may drop, and what its products and those after it give.
    hidden, probabilities = 2 * 12 * 16, 2 * 2 * 12 * 12
    assert forward[DRAWN].sum() == 2 * probabilities + 5 * hidden and backward[DRAWN].sum() == 0


def test_of_a_device_of_which_less_is_known_all_operators_run_alike() -> None:
    graph, sizes = make("tied").graph, {"batch": 2, "sequence": 12}
    costs = node_costs(graph, sizes)
    device = Device(peer="p", flops_per_second=1e9, memory_bytes=1, memory_bytes_per_second=1e8)
    segments = measure(graph, (), sizes, True)
    forward, backward = segments.passes(0, 1, device.speeds.seconds)
    moved = sum(cost.moved_bytes for cost in costs) / 1e8
    assert float(forward) == pytest.approx(sum(c.forward_flops for c in costs) / 1e9 + moved)
    assert float(backward) == pytest.approx(sum(c.backward_flops for c in costs) / 1e9 + 2 * moved)


def test_an_update_costs_what_it_touches_and_a_beginning_for_each_tensor() -> None:
    """Of 314 small tensors, those of a ResNet-101, most of an update was not counted."""
    graph, sizes = make("tied").graph, {"batch": 2, "sequence": 12}
    segments = measure(graph, (10,), sizes, True)
    trained = [v for v in graph.variables if v.kind == "parameter" and v.trainable]
    whole = measure(graph, (), sizes, True).updates(0, 1, 0.0, 1e-6)
    assert float(whole) == pytest.approx(UPDATE_NODES * len(trained) * 1e-6)
    first, last = np.array([0, 1]), np.array([1, 2])
    parts = segments.updates(first, last, np.array([1e-9, 2e-9]), np.array([1e-6, 1e-6]))
    counted = np.diff(segments.tensors)
    assert counted.sum() == len(trained) and counted.min() > 0
    touched = UPDATE_TOUCHES * segments.memory_tables.static_bytes[first, last] * np.array([1e-9, 2e-9])
    assert parts == pytest.approx(touched + UPDATE_NODES * counted * 1e-6)


def test_what_was_measured_of_a_kind_counts_for_that_kind_alone() -> None:
    graph, sizes = make("tied").graph, {"batch": 2, "sequence": 12}
    segments = measure(graph, (), sizes, False)
    twice = Speeds.of([part * (2 if i == PRODUCTS else 1) for i, part in enumerate(SPEEDS.parts)])
    (before, _), (after, _) = (segments.passes(0, 1, each.seconds) for each in (SPEEDS, twice))
    assert float(after - before) == pytest.approx(float(segments.forward[PRODUCTS, -1]) * SPEEDS.product_flop)
    assert np.all(segments.backward == 0)
