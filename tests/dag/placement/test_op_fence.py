"""OP-Fence: clusters, the path through them, and placements that nothing simpler beats."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support.instances import GIB, MBPS, SIZES, chain, instances, large_network, with_skips

from fusion.dag.cutting.cuts import legal_cuts
from fusion.dag.ir.errors import PlacementError
from fusion.dag.placement.baselines import equal_flops, equal_ops, exact
from fusion.dag.placement.network import Device, Link, Network
from fusion.dag.placement.op_fence import clusters, op_fence, path
from fusion.dag.placement.place import place
from fusion.dag.placement.search_space import space

FEW = 10
# The gate has the first of them, `make test-all` the others as well.
PARTS = [slice(0, 2), pytest.param(slice(2, FEW), marks=pytest.mark.slow)]


def sites(*sizes: int, far: float = 20 * MBPS) -> Network:
    devices = tuple(
        Device(peer=f"s{s}p{i}", flops_per_second=1e8, memory_bytes=GIB) for s, size in enumerate(sizes) for i in range(size)
    )  # fmt: skip
    near = Link(alpha_seconds=5e-4, bytes_per_second=1000 * MBPS)
    slow = Link(alpha_seconds=0.01, bytes_per_second=far)
    links = {
        (a.peer, b.peer): near if a.peer[:2] == b.peer[:2] else slow
        for a in devices
        for b in devices
        if a is not b
    }
    # The devices of a site are not listed together.
    return Network(devices=tuple(sorted(devices, key=lambda d: d.peer[::-1])), links=links)


def seconds(options, choice):
    return options.estimate(choice).seconds if choice else np.inf


def test_clusters_are_sites():
    network = sites(4, 3, 5)
    found = [{network.devices[i].peer[:2] for i in group} for group in clusters(network.rates)]
    assert sorted(map(sorted, found)) == [["s0"], ["s1"], ["s2"]]


def test_a_device_alone_joins_the_cluster_it_is_nearest_to():
    rates = sites(3, 3, 1).rates.copy()
    names = [d.peer for d in sites(3, 3, 1).devices]
    alone, friend = names.index("s2p0"), names.index("s1p0")
    rates[alone, friend] = rates[friend, alone] = 40 * MBPS
    (home,) = (group for group in clusters(rates) if alone in group)
    assert {names[i] for i in home} == {"s1p0", "s1p1", "s1p2", "s2p0"}


def test_equal_links_make_one_cluster():
    assert clusters(np.full((5, 5), 1e6)) == [[0, 1, 2, 3, 4]]


def test_the_path_avoids_the_narrowest_crossing():
    between = np.array([[9, 1, 5.0], [1, 9, 5], [5, 5, 9]])
    assert path(between)[1] == 2
    many = np.full((12, 12), 2.0)
    for a, b in pairwise(range(12)):
        many[a, b] = many[b, a] = 100.0
    assert [abs(a - b) for a, b in pairwise(path(many))] == [1] * 11


def test_the_cut_between_sites_falls_where_little_crosses():
    graph = chain([512, 512, 512, 512, 16, 512, 512, 512])
    found = place(graph, sites(2, 2), SIZES, 8, stages=4)
    crossings = [i for i, (a, b) in enumerate(pairwise(found.owners)) if a[:2] != b[:2]]
    assert [found.sent_bytes[i] for i in crossings] == [32 * 16 * 4]


@pytest.mark.heavy
@pytest.mark.parametrize("part", PARTS)
def test_never_worse_than_the_baselines_and_legal(part):
    for instance in list(instances(FEW, seed=7, most_devices=7))[part]:
        graph, network = instance.graph, instance.network
        options = space(graph, network, SIZES, instance.microbatches)
        simple = [seconds(options, find(options)) for find in (equal_ops, equal_flops)]
        try:
            found = place(graph, network, SIZES, instance.microbatches)
        except PlacementError:
            assert min(simple) == np.inf, instance.name
            continue
        assert found.predicted_seconds <= min(simple) * (1 + 1e-9), instance.name
        assert set(found.cuts) <= set(legal_cuts(graph)) and len(set(found.owners)) == len(found.owners)
        assert all(
            m <= network.device(o).memory_bytes for m, o in zip(found.memory_bytes, found.owners, strict=True)
        ), instance.name
        estimate = options.estimate(op_fence(options))
        assert estimate.seconds >= found.predicted_seconds * (1 - 1e-9)


@pytest.mark.slow
def test_near_the_optimum_of_chains():
    ratios = []
    for instance in instances(40, seed=3, most_devices=5):
        options = space(instance.graph, instance.network, SIZES, instance.microbatches)
        best = exact(options)
        if best is not None and "chain" in instance.name:
            ratios.append(seconds(options, op_fence(options)) / seconds(options, best.choice))
            assert best.seconds <= min(1.0, ratios[-1]) * seconds(options, best.choice) * (1 + 1e-9), (
                instance.name
            )
    assert len(ratios) > 10 and np.median(ratios) <= 1.0 + 1e-9 and max(ratios) < 1.05


@pytest.mark.heavy
@pytest.mark.parametrize("part", PARTS)
def test_one_more_device_never_makes_a_step_slower(part):
    for instance in list(instances(FEW, seed=11, most_devices=6))[part]:
        network, times = instance.network, []
        for count in range(2, len(network.devices) + 1):
            some = Network(devices=network.devices[:count], links=network.links)
            try:
                times.append(place(instance.graph, some, SIZES, instance.microbatches).predicted_seconds)
            except PlacementError:
                assert not times
        assert all(b <= a * (1 + 1e-9) for a, b in pairwise(times)), instance.name


@pytest.mark.parametrize("scheduler", ["op-fence", "equal-ops", "equal-flops", "exact"])
def test_every_scheduler_keeps_the_number_of_stages(scheduler):
    graph, network = chain([64] * 9), sites(2, 2)
    found = place(graph, network, SIZES, 4, stages=3, scheduler=scheduler)
    assert len(found.owners) == 3


@pytest.mark.slow
def test_many_devices_and_many_nodes():
    graph = with_skips(120, 64, np.random.default_rng(0))
    network = large_network(40, 5, seed=1, flops=1e8)
    found = place(graph, network, SIZES, 16)
    assert (
        found.predicted_seconds
        < place(graph, network, SIZES, 16, scheduler="equal-flops").predicted_seconds / 2
    )


@pytest.mark.parametrize("stages", [None, 14])
def test_the_two_that_have_room_for_its_ends_get_them(stages, monkeypatch):
    """Of more peers than `exact` tries all orders of."""
    monkeypatch.setattr("fusion.dag.placement.op_fence._MOVE_BUDGET", 1)  # any order that fits will do
    graph = chain([1024, *[64] * 25, 1024])
    large, small = 330_000, 45_000  # bytes: an end and something more; two of the layers between
    rooms = [small] * 5 + [large] * 2 + [small] * 10
    devices = [Device(peer=f"p{i}", flops_per_second=1e9, memory_bytes=r) for i, r in enumerate(rooms)]
    link = Link(alpha_seconds=1e-3, bytes_per_second=1e8)
    links = {(a.peer, b.peer): link for a in devices for b in devices}
    network = Network(devices=tuple(devices), links=links)
    found = place(graph, network, {"batch": 1}, 1, stages=stages, training=False)
    assert {found.owners[0], found.owners[-1]} == {"p5", "p6"}
    assert all(
        m <= network.device(o).memory_bytes for o, m in zip(found.owners, found.memory_bytes, strict=True)
    )
