"""Placement: balanced, within memory, as good as trying everything, and clear when nothing fits."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.dag.costs import stage_cost
from fusion.dag.cuts import candidate_cuts, split
from fusion.dag.dims import symbol
from fusion.dag.errors import PlacementError
from fusion.dag.ir import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.opset import infer
from fusion.dag.placement import UNKNOWN_LINK, Device, Link, place
from fusion.dag.segments import measure

B = symbol("batch")
SIZES = {"batch": 32}
GIB = 1 << 30
LAN = Link(alpha_seconds=1e-4, bytes_per_second=1e9)


def mlp(widths):
    """A chain of linears and tanhs: widths[0] -> widths[1] -> ..."""
    x = Input("x", TensorType((B, widths[0]), "float32"))
    types, variables, nodes = {Ref("x"): x.type}, [], []
    at = Ref("x")
    for i, (inner, outer) in enumerate(pairwise(widths)):
        weight = Variable(f"w{i}", TensorType((outer, inner), "float32"))
        variables.append(weight)
        types[Ref(weight.name)] = weight.type
        for name, op, args in (
            (f"linear{i}", "aten.linear", (Ref(f"w{i}"), None)),
            (f"tanh{i}", "aten.tanh", ()),
        ):
            node = Node(name, op, (at, *args), infer(op, (at, *args), types))
            nodes.append(node)
            at = Ref(name)
            types[at] = node.results[0]
    return Graph((x,), tuple(variables), tuple(nodes), (at,), ("batch",))


def device(name, speed=1e9, memory=64 * GIB):
    return Device(peer=name, flops_per_second=speed, memory_bytes=memory)


def links(devices, link=LAN):
    return {(a.peer, b.peer): link for a in devices for b in devices}


def test_equal_devices_get_equal_work():
    graph = mlp([64] * 25)
    devices = [device("a"), device("b"), device("c")]
    for stages in (2, 3):
        found = place(graph, devices, links(devices), SIZES, 8, stages)
        assert len(found.owners) == len(set(found.owners)) == stages
        assert max(found.stage_seconds) < 1.05 * min(found.stage_seconds)
        flops = [stage_cost(s, SIZES).forward_flops for s in split(graph, found.cuts)]
        assert max(flops) < 1.05 * min(flops)


def test_work_goes_by_speed():
    graph = mlp([64] * 31)
    devices = [device("slow", 1e9), device("fast", 2e9)]
    found = place(graph, devices, links(devices), SIZES, 8, 2)
    flops = dict(
        zip(found.owners, (stage_cost(s, SIZES).forward_flops for s in split(graph, found.cuts)), strict=True)
    )
    assert 1.8 < flops["fast"] / flops["slow"] < 2.2


def test_more_microbatches_bring_the_pipeline_to_its_bound():
    graph = mlp([64] * 33)
    devices = [device("a"), device("b")]
    alone = place(graph, devices[:1], {}, SIZES, 8)
    both = place(graph, devices, links(devices), SIZES, 8)
    assert 0.95 * 16 / 9 < alone.predicted_seconds / both.predicted_seconds <= 16 / 9
    assert (
        both.predicted_seconds < place(graph, devices, {}, SIZES, 8, 2).predicted_seconds
    )  # unknown links are slow


def test_a_slow_link_is_not_worth_crossing():
    graph = mlp([64] * 9)
    devices = [device("a"), device("b")]
    slow = links(devices, Link(alpha_seconds=0.5, bytes_per_second=1e3))
    assert place(graph, devices, slow, SIZES, 8).owners == ("a",)


def test_cuts_fall_where_little_crosses():
    graph = mlp([256, 256, 256, 4, 256, 256, 256])
    devices = [device("a"), device("b")]
    slow = links(devices, Link(alpha_seconds=0.0, bytes_per_second=2e5))
    found = place(graph, devices, slow, SIZES, 4, 2)
    assert found.sent_bytes == (32 * 4 * 4,)


def test_slow_peers_are_left_out():
    graph = mlp([64] * 17)
    devices = [device("a", 1e9), device("snail", 1e5), device("b", 1e9)]
    assert set(place(graph, devices, links(devices), SIZES, 8).owners) == {"a", "b"}


def test_memory_binds():
    graph = mlp([64] * 13)
    roomy = place(graph, [device("a")], {}, SIZES, 4)
    (need,) = roomy.memory_bytes
    devices = [device("fast", 1e10, need // 4), device("slow", 1e8, need)]
    found = place(graph, devices, links(devices), SIZES, 4, 2)
    for owner, held in zip(found.owners, found.memory_bytes, strict=True):
        assert held <= {d.peer: d.memory_bytes for d in devices}[owner]
    assert place(graph, devices, links(devices), SIZES, 4, 1).owners == ("slow",)
    with pytest.raises(
        PlacementError, match=r"does not fit in 1 stages with 4 microbatches: it needs at least .* GiB"
    ):
        place(graph, devices[:1], {}, SIZES, 4, 1)


def test_training_needs_more_memory_than_serving():
    graph, one = mlp([64] * 9), [device("a")]
    training, serving = (place(graph, one, {}, SIZES, 4, training=t) for t in (True, False))
    weights = 8 * 64 * 64 * 4
    assert serving.memory_bytes == (weights,)
    assert training.memory_bytes[0] > 4 * weights
    two = [device("a"), device("b")]
    held = [place(graph, two, links(two), SIZES, m, 2).memory_bytes for m in (1, 4)]
    assert held[0][0] < held[1][0]  # the first of two stages keeps two microbatches


def test_a_tied_weight_counts_once_in_each_stage_that_reads_it():
    graph = mlp([8] * 5)
    nodes = tuple(
        Node(n.name, n.op, tuple(Ref("w0") if a == Ref("w3") else a for a in n.args), n.results)
        for n in graph.nodes
    )
    tied = Graph(graph.inputs, graph.variables[:3], nodes, graph.outputs, graph.symbols)
    segments = measure(tied, (2, 4, 6), SIZES, training=False)
    one = 8 * 8 * 4
    assert segments.weight_bytes[0, 4] == 3 * one  # w0, w1, w2
    assert [segments.weight_bytes[i, i + 1] for i in range(4)] == [one] * 4
    assert segments.weight_bytes[1, 4] == 3 * one


@pytest.mark.parametrize("stages", [0, 3, 9])
def test_a_number_of_stages_that_cannot_be(stages):
    devices = [device("a"), device("b")]
    with pytest.raises(PlacementError, match="there are 2 peers"):
        place(mlp([8] * 4), devices, {}, SIZES, 2, stages)


def test_nobody_to_place_on():
    with pytest.raises(PlacementError, match="no peer"):
        place(mlp([8] * 4), [], {}, SIZES, 2)


def predicted(segments, order, cuts, network, microbatches):
    """The pipeline model once more, written out."""
    bounds = [segments.bounds.index(c) for c in (0, *cuts, segments.bounds[-1])]
    total, longest = 0.0, 0.0
    for s, (a, b) in enumerate(pairwise(bounds)):
        d = order[s]
        compute = float(segments.seconds(d.flops_per_second, d.memory_bytes_per_second, microbatches)[a, b])
        sending = 0.0
        if s:
            sending += segments.backward_bytes[a] / network[d.peer, order[s - 1].peer].bytes_per_second
        if s + 1 < len(order):
            there, back = network[d.peer, order[s + 1].peer], network[order[s + 1].peer, d.peer]
            sending += segments.forward_bytes[b] / there.bytes_per_second
            total += there.alpha_seconds + segments.forward_bytes[b] / there.bytes_per_second
            total += back.alpha_seconds + segments.backward_bytes[b] / back.bytes_per_second
        total += compute
        longest = max(longest, compute, float(sending))
    return total + (microbatches - 1) * longest


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([4, 16, 64, 200]), min_size=4, max_size=6),
    st.lists(st.sampled_from([1e8, 3e8, 1e9]), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(0, 2**32 - 1),
)
def test_near_the_best_of_all_placements(widths, speeds, microbatches, seed):
    graph = mlp(widths)
    devices = [device(f"p{i}", s) for i, s in enumerate(speeds)]
    random = np.random.default_rng(seed)
    network = {
        (a.peer, b.peer): Link(alpha_seconds=float(random.choice([0, 1e-3])), bytes_per_second=float(random.choice([1e6, 1e8])))
        for a in devices
        for b in devices
    }  # fmt: skip
    found = place(graph, devices, network, SIZES, microbatches)
    cuts = candidate_cuts(graph, SIZES, 128)
    segments = measure(graph, cuts, SIZES, training=True)
    owners = [next(d for d in devices if d.peer == o) for o in found.owners]
    assert found.predicted_seconds == pytest.approx(
        predicted(segments, owners, found.cuts, network, microbatches)
    )
    best = min(
        predicted(segments, order, chosen, network, microbatches)
        for count in range(1, len(devices) + 1)
        for order in permutations(devices, count)
        for chosen in combinations(cuts, count - 1)
    )
    assert best <= found.predicted_seconds * (1 + 1e-9) <= best * 1.1


def test_many_devices_are_placed_in_order_of_their_links():
    graph = mlp([64] * 41)
    devices = [device(f"p{i}", 1e9 + 1e7 * (i % 3)) for i in range(12)]
    near = {
        (a.peer, b.peer): LAN if int(a.peer[1:]) // 6 == int(b.peer[1:]) // 6 else UNKNOWN_LINK
        for a in devices
        for b in devices
    }
    found = place(graph, devices, near, SIZES, 16, 12)
    sites = [int(o[1:]) // 6 for o in found.owners]
    assert sum(a != b for a, b in pairwise(sites)) == 1  # one crossing between the two sites


def test_devices_and_links_are_checked():
    with pytest.raises(ValueError, match="device a"):
        device("a", speed=0)
    with pytest.raises(ValueError, match="link"):
        Link(alpha_seconds=-1, bytes_per_second=1)
