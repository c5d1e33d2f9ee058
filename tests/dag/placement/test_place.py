"""Placement: balanced, within memory, as good as trying everything, and clear when nothing fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.dag.cutting.cuts import candidate_cuts, split
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.dag.placement.codec_cost import CodecCost
from fusion.dag.placement.machine import Machine
from fusion.dag.placement.network import UNKNOWN_LINK, Device, Link, Network
from fusion.dag.placement.pipeline import Layout, pipeline
from fusion.dag.placement.place import place
from fusion.dag.placement.replicas import replicate
from fusion.dag.placement.search_space import DEPTHS
from fusion.dag.placement.segments import measure
from fusion.dag.placement.shortlist import shortlist
from fusion.dag.placement.step_model import step_seconds
from tests.support.stage_costs import stage_cost

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


def network(devices, link=LAN):
    links = {(a.peer, b.peer): link for a in devices for b in devices} if link else {}
    return Network(devices=tuple(devices), links=links)


def test_equal_devices_get_equal_work():
    graph = mlp([64] * 25)
    devices = [device("a"), device("b"), device("c")]
    for stages in (2, 3):
        found = place(graph, network(devices), SIZES, 8, stages=stages)
        assert len(found.owners) == len(set(found.owners)) == stages
        assert max(found.stage_seconds) < 1.05 * min(found.stage_seconds)
        flops = [stage_cost(s, SIZES).forward_flops for s in split(graph, found.cuts)]
        assert max(flops) < 1.05 * min(flops)


def test_each_machine_of_a_swarm_has_cores_of_its_own():
    """More machines than stages, whichever of them are taken; as peers on machines that nobody shares."""
    peers = [
        device(name, speed) for name, speed in zip("abcdef", (1e6, 1e6, 1e6, 1e6, 1e9, 1e9), strict=True)
    ]
    own = [replace(peer, machine=Machine(name=peer.peer, cores=4.0, message_seconds=1e-6)) for peer in peers]
    found = place(mlp([512] * 9), network(own), SIZES, 8, stages=2)
    alone = place(mlp([512] * 9), network(peers), SIZES, 8, stages=2)
    assert set(found.owners) == {"e", "f"}
    assert (found.cuts, found.predicted_seconds) == (alone.cuts, alone.predicted_seconds)


def test_work_goes_by_speed():
    graph = mlp([64] * 31)
    devices = [device("slow", 1e9), device("fast", 2e9)]
    found = place(graph, network(devices), SIZES, 8, stages=2)
    flops = dict(
        zip(found.owners, (stage_cost(s, SIZES).forward_flops for s in split(graph, found.cuts)), strict=True)
    )
    assert 1.8 < flops["fast"] / flops["slow"] < 2.2


def test_more_microbatches_bring_the_pipeline_to_its_bound():
    graph = mlp([64] * 33)
    devices = [device("a"), device("b")]
    alone = place(graph, network(devices[:1]), SIZES, 8)
    both = place(graph, network(devices), SIZES, 8)
    assert 0.95 * 16 / 9 < alone.predicted_seconds / both.predicted_seconds <= 16 / 9
    assert (
        both.predicted_seconds < place(graph, network(devices, None), SIZES, 8, stages=2).predicted_seconds
    )  # unknown links are slow


def test_a_slow_link_is_not_worth_crossing():
    graph = mlp([64] * 9)
    devices = [device("a"), device("b")]
    slow = network(devices, Link(alpha_seconds=0.5, bytes_per_second=1e3))
    assert place(graph, slow, SIZES, 8).owners == ("a",)


def test_cuts_fall_where_little_crosses():
    graph = mlp([256, 256, 256, 4, 256, 256, 256])
    devices = [device("a"), device("b")]
    slow = network(devices, Link(alpha_seconds=0.0, bytes_per_second=2e5))
    found = place(graph, slow, SIZES, 4, stages=2)
    assert found.sent_bytes == (32 * 4 * 4,)


def test_slow_peers_are_left_out():
    graph = mlp([64] * 17)
    devices = [device("a", 1e9), device("snail", 1e5), device("b", 1e9)]
    assert set(place(graph, network(devices), SIZES, 8).owners) == {"a", "b"}


def test_memory_binds():
    graph = mlp([64] * 13)
    roomy = place(graph, network([device("a")]), SIZES, 4)
    (need,) = roomy.memory_bytes
    devices = [device("fast", 1e10, need // 4), device("slow", 1e8, need)]
    found = place(graph, network(devices), SIZES, 4, stages=2)
    for owner, held in zip(found.owners, found.memory_bytes, strict=True):
        assert held <= {d.peer: d.memory_bytes for d in devices}[owner]
    assert place(graph, network(devices), SIZES, 4, stages=1).owners == ("slow",)
    with pytest.raises(
        PlacementError,
        match=r"does not fit in 1 stages with 4 microbatches: it needs at least .* MiB; .*: fast .* MiB",
    ):
        place(graph, network(devices[:1]), SIZES, 4, stages=1)
    with pytest.raises(PlacementError, match=r"does not fit in 1 stages: it needs at least .* MiB"):
        place(graph, network([device("small", memory=1000)]), SIZES, 1, stages=1, training=False)


def test_a_baseline_that_finds_nothing_says_why_itself():
    graph = mlp([64] * 13)
    many = network([device(f"p{i}") for i in range(13)])
    with pytest.raises(PlacementError, match=r"^exact: it searches at most 12 peers, and there are 13"):
        place(graph, many, SIZES, 4, scheduler="exact")
    deep = network([device(f"p{i}") for i in range(12)])
    with pytest.raises(PlacementError, match=r"^exact: 12 peers and \d+ cuts are too many"):
        place(mlp([8] * 100), deep, SIZES, 4, scheduler="exact")
    (need,) = place(graph, network([device("a")]), SIZES, 4).memory_bytes
    uneven = network([device("a", memory=need), device("b", memory=need // 8)])
    assert place(graph, uneven, SIZES, 4).owners
    for scheduler in ("equal-ops", "equal-flops"):
        with pytest.raises(PlacementError, match=rf"^{scheduler}: its stage 1 needs .* and b, .* offers"):
            place(graph, uneven, SIZES, 4, scheduler=scheduler)


def test_the_exact_scheduler_counts_the_microbatches_that_gpipe_holds():
    graph, sizes = mlp([64] * 13), {"batch": 1024}
    half = float(measure(graph, (12,), sizes, training=True).memory(0, 1, 8))
    uneven = network([device("fast", 4e9, int(half)), device("slow", 1e9)])
    assert place(graph, uneven, sizes, 8, stages=2, scheduler="exact").owners
    found = place(graph, uneven, sizes, 8, stages=2, scheduler="exact", gpipe=True)
    stage = found.owners.index("fast")
    held = measure(graph, found.cuts, sizes, training=True).memory(stage, stage + 1, 8)
    assert half / 2 < held <= half


def test_a_misfit_does_not_say_that_equal_peers_offer_less():
    with pytest.raises(PlacementError, match=r"and 2 others at most as much$"):
        place(mlp([64] * 3), network([device(f"p{i}", memory=10) for i in range(10)]), SIZES, 1)


def test_training_needs_more_memory_than_serving():
    graph, one = mlp([64] * 9), [device("a")]
    training, serving = (place(graph, network(one), SIZES, 4, training=t) for t in (True, False))
    weights = 8 * 64 * 64 * 4
    assert serving.memory_bytes == (weights + 2 * 32 * 64 * 4,)  # two values of 64 at once, for 32 samples
    assert training.memory_bytes[0] > 4 * weights
    two = [device("a"), device("b")]
    held = [place(graph, network(two), SIZES, m, stages=2).memory_bytes for m in (1, 4)]
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
    assert segments.memory_tables.static_bytes[0, 4] == 3 * one  # w0, w1, w2
    assert [segments.memory_tables.static_bytes[i, i + 1] for i in range(4)] == [one] * 4
    assert segments.memory_tables.static_bytes[1, 4] == 3 * one


@pytest.mark.parametrize("stages", [0, 3, 9])
def test_a_number_of_stages_that_cannot_be(stages):
    devices = [device("a"), device("b")]
    with pytest.raises(PlacementError, match="there are 2 peers"):
        place(mlp([8] * 4), network(devices), SIZES, 2, stages=stages)


def test_nobody_to_place_on():
    with pytest.raises(PlacementError, match="no peer"):
        place(mlp([8] * 4), network([]), SIZES, 2)


def best_of_all(graph, found_in, microbatches):
    """The step of the best of all placements, schedules and depths, each asked of the model on its own."""
    cuts = candidate_cuts(graph, SIZES, 128)
    return min(
        step_seconds(pipeline(graph, Layout(
            cuts=chosen, owners=order, microbatches=microbatches, schedule=schedule, depth=depth
        ), found_in, SIZES)).seconds
        for count in range(1, len(found_in.devices) + 1)
        for order in permutations([d.peer for d in found_in.devices], count)
        for chosen in combinations(cuts, count - 1)
        for schedule, depth in (("gpipe", 1), *(("1f1b", d) for d in DEPTHS if d < 2 * microbatches))
    )  # fmt: skip


@pytest.mark.heavy
@settings(max_examples=examples(10))
@given(
    st.lists(st.sampled_from([4, 16, 64, 200]), min_size=4, max_size=5),
    st.lists(st.sampled_from([1e8, 3e8, 1e9]), min_size=1, max_size=3),
    st.sampled_from([1, 2, 6]),
    st.integers(0, 2**32 - 1),
)
def test_near_the_best_of_all_placements(widths, speeds, microbatches, seed):
    graph = mlp(widths)
    devices = [device(f"p{i}", s) for i, s in enumerate(speeds)]
    random = np.random.default_rng(seed)
    links = {
        (a.peer, b.peer): Link(alpha_seconds=float(random.choice([0, 1e-3])), bytes_per_second=float(random.choice([1e6, 1e8])))
        for a in devices
        for b in devices
    }  # fmt: skip
    known = Network(devices=tuple(devices), links=links)
    found = place(graph, known, SIZES, microbatches)
    asked = step_seconds(pipeline(graph, found, known, SIZES))
    assert found.predicted_seconds == asked.seconds and found.prediction == asked
    best = best_of_all(graph, known, microbatches)
    assert best <= found.predicted_seconds * (1 + 1e-9) <= best * 1.02


def test_many_devices_are_placed_in_order_of_their_links():
    graph = mlp([64] * 41)
    devices = [device(f"p{i}", 1e9 + 1e7 * (i % 3)) for i in range(12)]
    near = {
        (a.peer, b.peer): LAN if int(a.peer[1:]) // 6 == int(b.peer[1:]) // 6 else UNKNOWN_LINK
        for a in devices
        for b in devices
    }
    known = Network(devices=tuple(devices), links=near)
    found = place(graph, known, SIZES, 16, stages=12)
    sites = [int(o[1:]) // 6 for o in found.owners]
    assert sum(a != b for a, b in pairwise(sites)) == 1  # one crossing between the two sites


def test_devices_and_links_are_checked():
    with pytest.raises(ValueError, match="device a"):
        device("a", speed=0)
    with pytest.raises(ValueError, match="link"):
        Link(alpha_seconds=-1, bytes_per_second=1)
    with pytest.raises(ValueError, match="device a: up_"):
        Device(peer="a", flops_per_second=1, memory_bytes=0, up_bytes_per_second=0)
    with pytest.raises(ValueError, match="a name of its own"):
        network([device("a"), device("a")])


def test_latency_is_hidden_by_more_microbatches_in_flight_where_memory_allows():
    graph = mlp([64] * 17)
    far = Link(alpha_seconds=0.1, bytes_per_second=1e9)
    roomy = place(graph, network([device("a", 1e8), device("b", 1e8)], far), SIZES, 16, stages=2)
    assert roomy.schedule == "1f1b" and roomy.depth > 1
    shallow = max(measure(graph, roomy.cuts, SIZES, True).memory([0, 1], [1, 2], [2, 1]))
    devices = [device("a", 1e8, int(shallow)), device("b", 1e8, int(shallow))]
    tight = place(graph, network(devices, far), SIZES, 16, stages=2)
    assert tight.depth < roomy.depth and max(tight.memory_bytes) <= shallow
    assert tight.predicted_seconds > roomy.predicted_seconds
    assert "latency" in tight.prediction.bottleneck


def test_who_is_left_out_is_said():
    graph = mlp([64] * 17)
    found = place(graph, network([device("a"), device("snail", 1e5), device("b")]), SIZES, 8)
    assert found.left_out == ("snail",) and found.replicas == ((), ())


def test_spare_devices_serve_the_slowest_stage():
    graph = mlp([64] * 17)
    devices = [device("a", 1e8), device("b", 1e9), device("c", 5e8)]
    found = place(graph, network(devices), SIZES, 1, stages=2, training=False)
    (spare,) = {"a", "b", "c"} - set(found.owners)
    slowest = found.stage_seconds.index(max(found.stage_seconds))
    assert found.replicas[slowest] == (spare,) and not found.replicas[1 - slowest]
    assert found.left_out == ()


def test_a_spare_device_goes_where_it_fits_and_the_slowest_stage_has_the_first_choice():
    segments = measure(mlp([64, 256, 256, 64]), (2, 4), SIZES, training=False)  # 64 KiB, 256 KiB, 64 KiB
    owners = [device("a"), device("b"), device("c")]
    spare = [
        device("small", memory=150_000),
        device("slow", 1e8),
        device("fast", 2e9),
        device("none", memory=10),
    ]
    assert replicate(segments, owners, spare) == (("small",), ("fast", "slow"), ())


def test_a_cheaper_wire_makes_more_stages_worth_it():
    graph, devices = mlp([64] * 17), [device("a", 1e8), device("b", 1e8)]
    slow = network(devices, Link(alpha_seconds=0.0, bytes_per_second=4e4))
    dense = place(graph, slow, SIZES, 8)
    packed = place(graph, slow, SIZES, 8, wire=CodecCost(name="int4", bytes_per_element=0.5))
    assert len(dense.owners) == 1 and len(packed.owners) == 2
    assert packed.predicted_seconds < dense.predicted_seconds


def test_of_a_very_large_swarm_the_best_are_looked_at():
    devices = [device(f"p{i}", 1e9 + i, GIB * (100 - i)) for i in range(40)]
    assert shortlist(network(devices), limit=40).devices == tuple(devices)
    found = {d.peer for d in shortlist(network(devices, None), limit=8).devices}
    assert found == {"p39", "p38", "p37", "p36", "p0", "p1", "p35", "p34"}
