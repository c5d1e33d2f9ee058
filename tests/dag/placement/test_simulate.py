"""The simulator against what can be worked out by hand, and against the closed form on random pipelines."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.dag.placement.codec_cost import CodecCost
from fusion.dag.placement.machine import Machine, packet_bytes
from fusion.dag.placement.network import Device, Link, Network
from fusion.dag.placement.pipeline import Flow, Pipeline, StageLoad
from fusion.dag.placement.simulate import simulate
from fusion.dag.placement.step_model import step_seconds

FREE = Link(alpha_seconds=0.0, bytes_per_second=inf)
BYTE = CodecCost(name="none", bytes_per_element=1.0)


def load(forward=1.0, backward=2.0, update=0.0):
    return StageLoad(
        forward_seconds=forward, backward_seconds=backward, update_seconds=update, memory_bytes=0
    )


def flow(producer, consumer, elements=0, *, forward=BYTE, backward=BYTE):
    return Flow(
        name=f"{producer}-{consumer}",
        producer=producer,
        consumer=consumer,
        elements=elements,
        forward=forward,
        backward=backward,
    )


def device(peer, up=inf, down=inf):
    return Device(
        peer=peer, flops_per_second=1.0, memory_bytes=0, up_bytes_per_second=up, down_bytes_per_second=down
    )


def pipe(
    stages,
    flows=None,
    *,
    microbatches=4,
    link=FREE,
    links=None,
    devices=None,
    owners=None,
    schedule="1f1b",
    depth=1,
    training=True,
):
    """A chain of stages, each on a peer of its own and all pairs on the same link, unless told otherwise."""
    names = owners or tuple(f"p{s}" for s in range(len(stages)))
    everyone = dict.fromkeys(names)
    return Pipeline(
        stages=tuple(stages),
        flows=tuple(flows if flows is not None else (flow(s, s + 1) for s in range(len(stages) - 1))),
        owners=names,
        network=Network(
            devices=devices or tuple(map(device, everyone)),
            links={(a, b): link for a in everyone for b in everyone} | (links or {}),
        ),
        microbatches=microbatches,
        training=training,
        schedule=schedule,
        depth=depth,
    )


def seconds(*args, **kwargs):
    return simulate(pipe(*args, **kwargs)).step_seconds


def test_one_stage_computes_all_the_time():
    trace = simulate(pipe([load(1.0, 2.0, update=0.5)], microbatches=7))
    assert trace.step_seconds == trace.stage_busy_seconds[0] == pytest.approx(7 * 3.0 + 0.5)
    assert not trace.links and not trace.uplinks


@pytest.mark.parametrize("stages", [1, 2, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 8, 32])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_lose_the_bubble_and_nothing_else(stages, microbatches, schedule):
    # GPipe, arXiv 1811.06965, section 2.3: (S - 1) / (M + S - 1) of the time; 1F1B has the same bubble.
    step = seconds([load()] * stages, microbatches=microbatches, schedule=schedule)
    bubble = 1 - microbatches * 3.0 / step
    assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_two_stages_at_the_pace_of_the_slower():
    # The first passes through, then the slower stage sets the pace, then the last gradient comes back.
    step = seconds([load(1.0, 1.0), load(2.0, 3.0)], microbatches=6)
    assert step == pytest.approx(1.0 + 6 * 5.0 + 1.0)


def test_a_slow_link_sets_the_pace():
    # 10 bytes at 2 bytes/s: 5 s a microbatch, against 1 s of computing; all forward transmissions, one after the other.
    link = Link(alpha_seconds=0.25, bytes_per_second=2.0)
    one_way = [flow(0, 1, 10, backward=None)]
    trace = simulate(pipe([load(1, 0), load(1, 0)], one_way, microbatches=8, link=link, schedule="gpipe"))
    last = 1 + 8 * 5 + 0.25 + 1  # the last forward; then eight backwards of no length
    assert trace.step_seconds == pytest.approx(last + 0.25)  # and the report to the lead
    assert trace.links["p0", "p1"].bytes == 80
    assert trace.links["p0", "p1"].busy_seconds == pytest.approx(40)


def test_an_uplink_is_shared_by_all_that_leaves():
    # Stage 0 sends 10 bytes to each of two others over an uplink of 5 bytes/s.
    stages, flows = [load(0.1, 0.0)] * 3, [flow(0, 1, 10, backward=None), flow(0, 2, 10, backward=None)]
    devices = (device("p0", up=5.0), device("p1"), device("p2"))
    step = seconds(stages, flows, microbatches=6, devices=devices, schedule="gpipe")
    assert step == pytest.approx(0.1 + 6 * 4.0 + 0.1)
    assert simulate(pipe(stages, flows, microbatches=6, devices=devices)).uplinks["p0"].busy_seconds == 24
    assert seconds(stages, flows, microbatches=6, schedule="gpipe") == pytest.approx(0.7)  # without a limit


def test_a_downlink_is_shared_by_all_that_arrives():
    stages, flows = [load(0.1, 0.0)] * 3, [flow(0, 2, 10, backward=None), flow(1, 2, 10, backward=None)]
    devices = (device("p0"), device("p1"), device("p2", down=5.0))
    step = seconds(stages, flows, microbatches=6, devices=devices, schedule="gpipe")
    assert step == pytest.approx(0.1 + 6 * 4.0 + 0.1)


def test_what_a_slow_pair_leaves_of_an_uplink_the_others_get():
    # 2 of 10 bytes/s are all that p1 can take; p2 gets 8 and is done after 2.5 s, p1 after 10 s.
    stages, flows = [load(0.0, 0.0)] * 3, [flow(0, 1, 20, backward=None), flow(0, 2, 20, backward=None)]
    devices = (device("p0", up=10.0), device("p1", down=2.0), device("p2"))
    trace = simulate(pipe(stages, flows, microbatches=1, devices=devices))
    assert trace.step_seconds == pytest.approx(10.0)
    alone = simulate(
        pipe(
            stages[:2],
            [flow(0, 1, 20, backward=None)],
            microbatches=1,
            devices=devices[::2],
            owners=("p0", "p2"),
        )
    )
    assert alone.step_seconds == pytest.approx(2.0)  # fmt: skip


def test_both_passes_share_an_uplink():
    # The middle one sends 10 bytes on and 10 bytes back each microbatch, over 4 bytes/s: 5 s, far above its computing.
    devices = (device("p0"), device("p1", up=4.0), device("p2"))
    flows = [flow(0, 1, 10), flow(1, 2, 10)]
    few, many = (
        seconds([load(0.1, 0.1)] * 3, flows, microbatches=m, devices=devices, depth=4) for m in (20, 40)
    )
    assert few - seconds([load(0.1, 0.1)] * 3, flows, microbatches=1, devices=devices) == pytest.approx(
        19 * 5, abs=5
    )
    assert many - few == pytest.approx(20 * 5)


@pytest.mark.parametrize(("depth", "held"), [(1, 2), (2, 3), (4, 5)])
def test_a_long_way_lets_through_what_may_be_under_way(depth, held):
    # There and back, once computed twice, takes 1 + 1 + 2 * 10 s; the first of two stages holds `held` microbatches.
    link = Link(alpha_seconds=10.0, bytes_per_second=inf)
    few, many = (
        seconds([load(0.5, 0.5), load(0.5, 0.5)], microbatches=m, link=link, depth=depth)
        for m in (4 * held, 8 * held)
    )
    assert (many - few) / (4 * held) == pytest.approx(22 / held, rel=0.05)


def test_a_codec_works_beside_the_computing():
    wire = CodecCost(
        name="x", bytes_per_element=0.0, encode_seconds_per_element=0.3, decode_seconds_per_element=0.1
    )
    hidden = [flow(0, 1, 1, forward=wire, backward=None)]
    step = seconds([load(1, 0), load(1, 0)], hidden, microbatches=10, schedule="gpipe")
    assert step == pytest.approx(1 + 0.3 + 0.1 + 10 * 1.0)
    slow = [flow(0, 1, 10, forward=wire, backward=None)]
    trace = simulate(pipe([load(1, 0), load(1, 0)], slow, microbatches=10, schedule="gpipe"))
    assert trace.step_seconds == pytest.approx(1 + 10 * 3.0 + 1.0 + 1)
    assert trace.codec_busy_seconds == pytest.approx({"p0": 30.0, "p1": 10.0})


def test_stages_of_one_peer_share_its_computing_and_no_link():
    owners = ("p0", "p1", "p0")
    trace = simulate(pipe([load(1, 1)] * 3, owners=owners, microbatches=16, depth=2))
    assert 2 * 16 * 2 <= trace.step_seconds < 1.1 * 2 * 16 * 2
    alone = simulate(pipe([load(1, 1)] * 2, [flow(0, 1, 9)], owners=("p0", "p0"), microbatches=4))
    assert alone.step_seconds == pytest.approx(16) and not alone.links


def test_a_value_that_skips_stages_goes_straight_to_its_reader():
    flows = [flow(0, 1), flow(1, 2), flow(0, 2, 100, backward=None)]
    links = {("p0", "p2"): Link(alpha_seconds=0.0, bytes_per_second=5.0)}
    step = seconds([load(1, 0)] * 3, flows, links=links, microbatches=5, schedule="gpipe")
    assert step == pytest.approx(1 + 5 * 20 + 1)


def test_others_update_while_the_next_step_begins():
    alone = seconds([load(1, 1, update=0.5), load(1, 1)], microbatches=4)
    assert alone == pytest.approx(0.5 + seconds([load(1, 1)] * 2, microbatches=4))
    assert seconds([load(1, 1), load(1, 1, update=0.5)], microbatches=4) == pytest.approx(alone - 0.5)


def test_serving_is_one_pass_and_the_answer():
    link = Link(alpha_seconds=0.5, bytes_per_second=10.0)
    flows = [flow(0, 1, 10, backward=None), flow(1, 2, 10, backward=None)]
    step = seconds([load(1, 0)] * 3, flows, link=link, microbatches=1, training=False)
    assert step == pytest.approx(3 * 1 + 2 * (1 + 0.5) + 0.5)


numbers = st.floats(0.0, 2.0)


@st.composite
def pipelines(draw):
    stages = draw(st.integers(1, 5))
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    chain = [(s, s + 1) for s in range(stages - 1)]
    skips = draw(st.sets(st.sampled_from(pairs), max_size=2)) if pairs else set()
    rates = st.sampled_from([5.0, 20.0, 100.0, inf])
    wire = st.builds(
        CodecCost,
        name=st.just("x"),
        bytes_per_element=st.sampled_from([0.5, 4.0]),
        encode_seconds_per_element=st.sampled_from([0.0, 0.01]),
        decode_seconds_per_element=st.sampled_from([0.0, 0.02]),
    )
    names = [f"p{s}" for s in range(stages)]
    return pipe(
        [load(draw(numbers), draw(numbers), draw(numbers)) for _ in range(stages)],
        [
            flow(a, b, draw(st.integers(0, 20)), forward=draw(wire), backward=draw(st.none() | wire))
            for a, b in sorted({*chain, *skips})
        ],
        microbatches=draw(st.integers(1, 12)),
        links={
            (a, b): Link(alpha_seconds=draw(st.sampled_from([0.0, 0.1, 1.0])), bytes_per_second=draw(rates))
            for a in names
            for b in names
        },
        devices=tuple(device(n, draw(rates), draw(rates)) for n in names),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        depth=draw(st.integers(1, 3)),
    )


@pytest.mark.heavy
@settings(max_examples=examples(200))
@given(pipelines())
def test_nothing_is_faster_than_its_busiest_part(given_pipeline):
    trace = simulate(given_pipeline)
    assert trace == simulate(given_pipeline)
    busy = [*trace.stage_busy_seconds, *trace.codec_busy_seconds.values()]
    for loads in (trace.links, trace.uplinks, trace.downlinks):
        busy += [one.busy_seconds for one in loads.values()]
    assert max(busy) <= trace.step_seconds * (1 + 1e-9)
    sent = given_pipeline.microbatches * sum(f.forward_bytes + f.backward_bytes for f in given_pipeline.flows)
    for loads in (trace.links, trace.uplinks, trace.downlinks):
        assert sum(one.bytes for one in loads.values()) == pytest.approx(sent)


def likely(random):
    """A chain with a few skips on links of a home to a data centre, every number drawn over its usual span."""
    stages, microbatches = int(random.integers(2, 9)), int(random.choice([4, 8, 16, 32]))
    names = [f"p{s}" for s in range(stages)]

    def wire():
        return CodecCost(
            name="x",
            bytes_per_element=float(random.choice([4.0, 1.0, 0.3])),
            encode_seconds_per_element=float(random.choice([0.0, 4e-9, 2e-8])),
            decode_seconds_per_element=float(random.choice([0.0, 4e-9])),
        )

    elements = 10 ** random.uniform(3.5, 5.5)
    seconds = 10 ** random.uniform(-2, 0) * random.uniform(0.7, 1.3, stages)
    ups = 10 ** random.uniform(6, 7.5, stages)
    return pipe(
        [load(s, 2 * s, 0.3 * s) for s in seconds],
        [
            flow(a, b, int(elements * random.uniform(0.5, 2)), forward=wire(), backward=wire())
            for a in range(stages)
            for b in range(a + 1, stages)
            if b == a + 1 or random.random() < 0.05
        ],
        microbatches=microbatches,
        links={
            (a, b): Link(
                alpha_seconds=float(random.choice([0.0005, 0.01, 0.03])),
                bytes_per_second=10 ** random.uniform(6, 8.5),
            )
            for a in names
            for b in names
        },
        devices=tuple(device(n, up, up * random.uniform(1, 5)) for n, up in zip(names, ups, strict=True)),
        schedule=str(random.choice(["1f1b", "1f1b", "gpipe"])),
        depth=int(random.integers(1, 5)),
    )


def test_the_closed_form_is_near():
    # The model knows no queues: here and there it is 30 % off, where few microbatches meet a line that both passes share.
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        one = likely(random)
        ratios.append(step_seconds(one).seconds / simulate(one).step_seconds)
    errors = np.abs(np.array(ratios) - 1)
    assert np.median(errors) < 0.05 and np.quantile(errors, 0.9) < 0.15 and errors.max() < 0.4


def test_many_stages_cost_as_many_events():
    # 10 000 stages take 100 times as long as these; each microbatch is computed twice and sent twice at each.
    trace = simulate(pipe([load()] * 100, [flow(s, s + 1, 9) for s in range(99)], microbatches=32))
    assert trace.events <= 32 * 2 * (100 + 2 * 99) + 2 * 100


def test_tasks_share_the_cores():
    # Six stages that send nothing: whatever the order, one core works all the time.
    pipeline = pipe([load(1.0, 2.0, update=0.5)] * 6, [], microbatches=4)
    assert simulate(pipeline).step_seconds == pytest.approx(4 * 3 + 0.5)
    for cores in (1, 2, 3):
        alone = 6 * (4 * 3 + 0.5)
        assert simulate(pipeline, Machine(cores=cores)).step_seconds == pytest.approx(alone / cores)
    assert simulate(pipeline, Machine(cores=6)).step_seconds == pytest.approx(4 * 3 + 0.5)


def test_only_peers_of_one_machine_share_its_cores():
    # p0 and p1 have a core together, p2 and p3 one each.
    machines = [Machine(name=name, cores=1.0) for name in ("here", "here", "there", "elsewhere")]
    devices = [replace(device(f"p{i}"), machine=machine) for i, machine in enumerate(machines)]
    pipeline = pipe([load(1.0, 2.0)] * 4, [], microbatches=4, devices=devices)
    assert simulate(pipeline).step_seconds == pytest.approx(2 * 4 * 3)
    assert simulate(pipeline, Machine(cores=1)).step_seconds == pytest.approx(4 * 4 * 3)
    # Of one machine, for peers with more threads, there are fewer cores: they share them all the same.
    devices[1] = replace(devices[1], machine=Machine(name="here", cores=2.0))
    pipeline = pipe([load(1.0, 2.0)] * 4, [], microbatches=4, devices=devices)
    assert simulate(pipeline).step_seconds == pytest.approx(2 * 4 * 3)


def test_a_task_that_begins_later_takes_its_share_from_then_on():
    # Alone for 1 s; then both get half a core: the second is done after 2 s of its own, the first 1 s of work later.
    stages = [load(0.0, 0.0, update=3.0), load(0.0, 0.0, update=1.0)]
    late = {("p0", "p1"): Link(alpha_seconds=1.0, bytes_per_second=inf)}
    trace = simulate(pipe(stages, [], microbatches=1, links=late), Machine(cores=1))
    assert trace.step_seconds == pytest.approx(4.0)
    assert trace.stage_busy_seconds == (3.0, 1.0)


def test_messages_cost_the_cores_of_both_ends():
    one_way = [flow(0, 1, 10, backward=None)]
    pipeline = pipe([load(0, 0), load(0, 0)], one_way, microbatches=5, schedule="gpipe")
    size = pipeline.flows[0].forward_bytes
    sent = Machine(cores=1, message_seconds=0.2, byte_seconds=0.01)
    assert simulate(pipeline, sent).step_seconds == pytest.approx(5 * (0.2 + 0.01 * size))
    alone = Machine(
        message_seconds=0.2, byte_seconds=0.01
    )  # one end sends while the other reads what came before
    assert simulate(pipeline, alone).step_seconds == pytest.approx(6 * (0.2 + 0.01 * size) / 2)


def test_a_slow_link_has_small_packets():
    # 8 Mbps: a segment at once, 100 Mbps: what goes over in a millisecond, 10 Gbps: all that IP can say.
    assert [packet_bytes(rate) for rate in (1e6, 12.5e6, 1.25e9, inf)] == [1448, 12_500, 65_536, 65_536]
    one_way = [flow(0, 1, 10, backward=None)]
    slow = {("p0", "p1"): Link(alpha_seconds=0.0, bytes_per_second=1e6)}
    sent = Machine(packet_seconds=10.0)
    took = [
        simulate(
            pipe([load(0, 0)] * 2, one_way, microbatches=1, schedule="gpipe", **links), sent
        ).step_seconds
        for links in ({"links": slow}, {})
    ]
    assert took[0] / took[1] == pytest.approx(65_536 / 1448, rel=0.01)
    assert sent.carry_seconds(14_480, 1e6) == pytest.approx(100.0)


@settings(max_examples=examples(100))
@given(pipelines(), st.sampled_from([1.0, 1.5, 2.0, 3.0]), st.sampled_from([0.0, 0.05]))
def test_no_more_is_done_than_the_cores_do(given_pipeline, cores, message_seconds):
    shared = Machine(cores=cores, message_seconds=message_seconds)
    trace = simulate(given_pipeline, shared)
    assert trace == simulate(given_pipeline, shared)
    messages = sum(1 + (f.backward is not None) for f in given_pipeline.flows) * given_pipeline.microbatches
    work = sum(trace.stage_busy_seconds) + sum(trace.codec_busy_seconds.values()) + messages * message_seconds
    assert trace.step_seconds >= work / cores * (1 - 1e-9)
    assert trace.step_seconds >= max(trace.stage_busy_seconds) * (1 - 1e-9)


@settings(max_examples=examples(50))
@given(pipelines())
def test_enough_cores_are_as_good_as_machines_of_their_own(given_pipeline):
    many = simulate(given_pipeline, Machine(cores=1e6))
    assert many.step_seconds == pytest.approx(simulate(given_pipeline).step_seconds)
