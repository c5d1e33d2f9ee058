"""The step model, written out by hand where that can be done, and against the simulator where it cannot."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from fusion.dag.placement.codec_cost import CodecCost
from fusion.dag.placement.machine import Machine
from fusion.dag.placement.network import Device, Link, Network
from fusion.dag.placement.pipeline import Flow, Pipeline, StageLoad
from fusion.dag.placement.simulate import simulate
from fusion.dag.placement.step_model import step_seconds

BYTE = CodecCost(name="byte", bytes_per_element=1)


def line(
    loads, bytes_, link, microbatches, *, up=inf, down=inf, depth=64, schedule="1f1b", wire=BYTE, skips=()
):
    """A chain of stages, `bytes_` each way over every link; `skips` are (producer, consumer) more."""
    names = tuple(f"p{i}" for i in range(len(loads)))
    devices = tuple(
        Device(peer=n, flops_per_second=1, memory_bytes=0, up_bytes_per_second=up, down_bytes_per_second=down)
        for n in names
    )
    hops = [*((i, i + 1) for i in range(len(loads) - 1)), *skips]
    return Pipeline(
        stages=tuple(
            StageLoad(forward_seconds=f, backward_seconds=b, update_seconds=u, memory_bytes=0) for f, b, u in loads
        ),
        flows=tuple(Flow(name=f"{a}-{b}", producer=a, consumer=b, elements=bytes_, forward=wire, backward=wire)
                    for a, b in sorted(hops)),
        owners=names,
        network=Network(devices=devices, links={(a, b): link for a in names for b in names}),
        microbatches=microbatches,
        training=True,
        schedule=schedule,
        depth=depth,
    )  # fmt: skip


def test_one_stage_computes_and_updates():
    found = step_seconds(line([(1, 2, 0.5)], 0, Link(alpha_seconds=9, bytes_per_second=1), 4))
    assert found.seconds == found.bound_seconds == 4 * 3 + 0.5
    assert found.stage_busy_seconds == (12.5,) and found.bottleneck == "compute of stage 0 on p0"


def test_the_slowest_stage_sets_the_pace():
    found = step_seconds(
        line([(1, 2, 0), (2, 4, 0), (1, 2, 0)], 0, Link(alpha_seconds=0, bytes_per_second=1), 10)
    )
    assert found.seconds == 12 + 9 * 6 and found.period_seconds == 6
    assert found.bottleneck == "compute of stage 1 on p1"


def test_a_link_works_both_ways_at_once_and_an_uplink_is_shared_by_both_passes():
    loads = [(0.1, 0.2, 0)] * 3
    free = Link(alpha_seconds=0, bytes_per_second=10)
    pair = step_seconds(line(loads, 20, free, 8))
    assert pair.period_seconds == 2 and pair.link_busy_seconds["p0", "p1"] == 16
    shared = step_seconds(line(loads, 20, free, 8, up=10))
    # The middle one sends activations on and gradients back.
    assert shared.period_seconds == 4 and shared.bottleneck == "uplink of p1"
    assert shared.uplink_busy_seconds == {"p0": 16, "p1": 32, "p2": 16}
    assert step_seconds(line(loads, 20, free, 8, down=10)).bottleneck == "downlink of p1"


def test_the_fill_goes_once_through_everything():
    link = Link(alpha_seconds=0.25, bytes_per_second=10)
    found = step_seconds(line([(1, 2, 0), (1, 2, 0)], 20, link, 1))
    # forward, link, forward, backward, link, backward; the lead is stage 0 and has the last word itself
    assert found.seconds == 1 + 2.25 + 1 + 2 + 2.25 + 2
    late = step_seconds(line([(1, 2, 0), (1, 2, 5)], 20, link, 1))
    assert late.seconds == 0.25 + 5 + 1 + 2 + 2.25 + 2  # told to commit, the second stage first updates


def test_latency_needs_microbatches_in_flight():
    loads, link = [(1, 1, 0), (1, 1, 0)], Link(alpha_seconds=2, bytes_per_second=inf)
    shallow, deep = (step_seconds(line(loads, 1, link, 101, depth=d)) for d in (1, 3))
    assert shallow.period_seconds == 8 / 2 and "2 microbatches in flight" in shallow.bottleneck
    assert deep.period_seconds == 2


def test_one_slow_hop_among_many_stages_is_a_loop_of_its_own():
    loads = [(1, 1, 0)] * 6
    line_ = line(loads, 1, Link(alpha_seconds=0, bytes_per_second=inf), 65, depth=1)
    links = {**line_.network.links, ("p2", "p3"): Link(alpha_seconds=4, bytes_per_second=inf)}
    network = Network(devices=line_.network.devices, links=links)
    slow = Pipeline(**{**vars(line_), "network": network})
    found = step_seconds(slow)
    assert found.period_seconds == (4 + 4) / 2 and "between stages 2 and 3" in found.bottleneck
    assert found.seconds == pytest.approx(simulate(slow).step_seconds, rel=0.05)


def test_gpipe_runs_its_passes_one_after_the_other():
    link = Link(alpha_seconds=0, bytes_per_second=10)
    found = step_seconds(line([(1, 1, 0), (1, 1, 0)], 20, link, 8, schedule="gpipe"))
    assert found.period_seconds == 2 + 2


def test_codecs_work_beside_compute_and_count_as_busy():
    wire = CodecCost(
        name="x", bytes_per_element=0.1, encode_seconds_per_element=0.2, decode_seconds_per_element=0.1
    )
    found = step_seconds(line([(1, 1, 0)] * 3, 10, Link(alpha_seconds=0, bytes_per_second=1e9), 8, wire=wire))
    assert found.period_seconds == pytest.approx(6) and found.bottleneck == "codec of p1"


def test_a_branch_that_skips_stages_runs_beside_them():
    loads, link = [(1, 0, 0), (5, 0, 0), (1, 0, 0)], Link(alpha_seconds=0, bytes_per_second=1)
    assert step_seconds(line(loads, 2, link, 1, skips=[(0, 2)])).fill_seconds == 1 + 2 + 5 + 2 + 1 + 2 + 2
    far = step_seconds(line(loads, 2, link, 1, skips=[(0, 2)], up=1))
    assert (
        far.fill_seconds == 1 + 2 + 5 + 2 + 1 + 4 + 2
    )  # stage 2 sends two gradients, the skipping one first


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_model_agrees_with_the_simulator(schedule):
    ratios = []
    for seed in range(60):
        random = np.random.default_rng(seed)
        count, spread = int(random.integers(2, 8)), random.uniform(0.5, 2, 12)
        loads = [(float(s), 2 * float(s), 0.1) for s in spread[:count]]
        skips = [(0, count - 1)] if count > 2 and random.random() < 0.5 else []
        found = line(
            loads, int(random.integers(1, 60)), Link(alpha_seconds=float(random.uniform(0, 1)), bytes_per_second=20),
            int(random.choice([4, 8, 24])), depth=int(random.integers(1, 4)), schedule=schedule, skips=skips,
            up=float(random.choice([15, inf])), down=float(random.choice([30, inf])),
        )  # fmt: skip
        ratios.append(step_seconds(found).seconds / simulate(found).step_seconds)
    assert abs(np.median(ratios) - 1) < 0.02 and np.quantile(np.abs(np.array(ratios) - 1), 0.9) < 0.15


def on_one_machine(pipeline, *shared):
    devices = [replace(d, machine=s) for d, s in zip(pipeline.network.devices, shared, strict=True)]
    return replace(pipeline, network=replace(pipeline.network, devices=tuple(devices)))


def test_peers_of_one_machine_have_its_cores_together():
    loads, link = [(1, 2, 0.5)] * 3, Link(alpha_seconds=0, bytes_per_second=100)
    alone = line(loads, 10, link, 10)
    carrying = Machine(name="here", cores=2.0, message_seconds=0.1, byte_seconds=0.01)
    found = step_seconds(on_one_machine(alone, carrying, carrying, carrying))
    # Four messages of 10 bytes, of each microbatch, of which the stage in the middle has half.
    message = 0.1 + 10 * 0.01
    assert found.period_seconds == pytest.approx((3 + 2 * message) / (2 / 3)), "two thirds of a core for each"
    assert found.bottleneck == "cores of the machine of p1"
    assert found.bound_seconds == pytest.approx((10 * (3 * 3 + 4 * message) + 3 * 0.5) / 2)
    assert step_seconds(alone).period_seconds == 3
    elsewhere = step_seconds(on_one_machine(alone, *(replace(carrying, name=n) for n in "abc")))
    assert elsewhere.period_seconds == 3, "two cores for each of them"


@pytest.mark.parametrize("cores", [1.0, 1.5, 2.0, 8.0])
@pytest.mark.parametrize("seed", range(6))
def test_on_shared_cores_it_keeps_to_the_simulator(cores, seed):
    random = np.random.default_rng(seed)
    loads = [tuple(random.uniform(0.9, 1.1, 3)) for _ in range(int(random.integers(1, 5)))]
    shared = Machine(
        name="here", cores=cores, message_seconds=float(random.uniform(0, 0.3)), byte_seconds=0.01
    )
    link = Link(alpha_seconds=0.01, bytes_per_second=100)
    given = on_one_machine(line(loads, 10, link, 8, depth=1), *(shared for _ in loads))
    found, played = step_seconds(given), simulate(given).step_seconds
    assert found.bound_seconds <= played * (1 + 1e-9)
    assert 0.75 * played <= found.seconds <= 1.2 * played
