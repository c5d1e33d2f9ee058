"""The codecs of a job's edges from what is known of its links: pure, and the same for launcher, plan and lead."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.compression.adaptive import CodecSpeed
from fusion.compression.reference_speeds import REFERENCE
from fusion.compression.spec import MAX_MILLIONTHS, MIN_MILLIONTHS, parse
from fusion.dag.cutting.stage import Edge
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import DTYPE_BYTES, Ref, TensorType
from fusion.dag.placement.codec_cost import DENSE
from fusion.dag.placement.network import Device, Link, Network
from fusion.runtime.job.manifest import CompressionConfig, EdgeCodecs
from fusion.runtime.placing.codec_choice import StageTraffic, Tie, choose_codecs, codec_costs

MBPS = 1e6 / 8
SIZES = {"batch": 4}
AT_ONCE = CodecSpeed(encode_bytes_per_second=math.inf, decode_bytes_per_second=math.inf)
FREE = dict.fromkeys(REFERENCE, AT_ONCE)
TOPK = CompressionConfig(kind="adaptive", ratio=20.0, families=("topk",))
GENTLE = CompressionConfig(kind="adaptive", ratio=8.0, families=("bf16", "int8"))


def edge(
    producer: int, *consumers: int, elements: int = 1 << 16, dtype: str = "float32", gradient: bool = True
) -> Edge:
    name = f"v{producer}to{'and'.join(map(str, consumers))}"
    kind = TensorType((symbol("batch"), elements), dtype)
    return Edge(f"{name}/0", Ref(name), kind, producer, consumers, gradient and "float" in dtype)


def line(*mbps: float, back: tuple[float, ...] = (), up: dict[int, float] | None = None) -> Network:
    """Peers in a row, so fast from each to the next (and back)."""
    lines = {} if up is None else up
    devices = tuple(
        Device(
            peer=f"p{i}",
            flops_per_second=1e9,
            memory_bytes=1 << 30,
            up_bytes_per_second=lines.get(i, math.inf) * MBPS,
        )
        for i in range(len(mbps) + 1)
    )
    links = {}
    for i, (there, again) in enumerate(zip(mbps, back or mbps, strict=True)):
        links[f"p{i}", f"p{i + 1}"] = Link(alpha_seconds=0.01, bytes_per_second=there * MBPS)
        links[f"p{i + 1}", f"p{i}"] = Link(alpha_seconds=0.01, bytes_per_second=again * MBPS)
    return Network(devices=devices, links=links)


def owners(network: Network) -> list[str]:
    return [device.peer for device in network.devices]


def choose(
    edges: list[Edge],
    network: Network,
    config: CompressionConfig = TOPK,
    *,
    ties: tuple[Tie, ...] = (),
    at: list[str] | None = None,
    speeds: dict[str, CodecSpeed] | None = None,
    compute: float = 0.0,
) -> EdgeCodecs:
    speeds = FREE if speeds is None else speeds
    traffic = StageTraffic(
        edges=tuple(edges), ties=ties, sizes=SIZES, owners=at or owners(network), network=network
    )
    return choose_codecs(traffic, config, speeds, compute)


def busy(
    edges: list[Edge], network: Network, codecs: EdgeCodecs, *, reuse_mask: bool = True
) -> dict[tuple[str, str], float]:
    """Seconds that each link is busy with a microbatch, by (from, to)."""
    costs, found = codec_costs(codecs, edges, SIZES, FREE, reuse_mask), {}
    for one in edges:
        elements = SIZES["batch"] * one.type.shape[1]
        for consumer in one.consumers:
            a, b = f"p{one.producer}", f"p{consumer}"
            for way, pair in (("forward", (a, b)), ("backward", (b, a))):
                if way == "forward" or one.needs_gradient:
                    bytes_ = costs.get((one.name, way), DENSE[one.type.dtype]).bytes(elements)
                    found[pair] = found.get(pair, 0.0) + bytes_ / network.rate(*pair)
    return found


def test_none_is_no_table_and_uniform_is_the_same_for_all_that_floats() -> None:
    edges = [edge(0, 1), edge(1, 2, dtype="int64"), edge(2, 3, gradient=False), edge(2, 4, dtype="float64")]
    tie = Tie(variable="w", elements=1 << 16, itemsize=4, stages=(0, 3))
    network = line(10, 10, 10, 10)
    assert choose(edges, network, CompressionConfig(), ties=(tie,)) == ()
    every = choose(edges, network, CompressionConfig(kind="uniform", codec="int8"), ties=(tie,))
    assert every == (("v0to1/0", "int8", "int8"), ("v2to3/0", "int8", "int8"), ("w", "int8", "none"))
    assert choose(edges, network, CompressionConfig(kind="uniform", codec="none"), ties=(tie,)) == ()


def test_slow_links_are_compressed_in_the_order_of_the_edges_and_fast_ones_not_at_all() -> None:
    edges = [edge(0, 1), edge(1, 2), edge(2, 3)]
    network = line(1000, 10, 40)
    table = choose(edges, network)
    assert [name for name, _, _ in table] == ["v1to2/0", "v2to3/0"]
    for _, forward, backward in table:
        assert forward == backward == str(parse(forward)) and parse(forward).family == "topk"
    assert parse(table[0][1]).millionths < parse(table[1][1]).millionths
    assert choose(edges, network) == table
    assert choose(edges, network, GENTLE) == (("v1to2/0", "int8", "int8"), ("v2to3/0", "bf16", "bf16"))


def test_without_the_mask_each_direction_has_its_own_density() -> None:
    network = line(1000, back=(10,))
    (masked,) = choose([edge(0, 1)], network)
    assert masked[1] == masked[2] != "none"
    (alone,) = choose([edge(0, 1)], network, replace(TOPK, reuse_mask=False))
    assert alone[1] == "none" and alone[2].startswith("topk:")


def test_a_gradient_that_does_not_come_back_is_none() -> None:
    assert [way[2] for way in choose([edge(0, 1, gradient=False)], line(10))] == ["none"]


def test_a_link_faster_than_the_codec_stays_dense() -> None:
    edges, network = [edge(0, 1), edge(1, 2)], line(10, 3000)
    slow = dict.fromkeys(REFERENCE, CodecSpeed(encode_bytes_per_second=2e8, decode_bytes_per_second=2e8))
    for config in (replace(TOPK, ratio=1000.0), replace(GENTLE, ratio=1000.0)):
        assert [name for name, _, _ in choose(edges, network, config, speeds=slow)] == ["v0to1/0"]
        assert len(choose(edges, network, config)) == 2  # a codec that takes no time pays there too


def test_what_computing_hides_stays_dense_and_families_without_a_speed_are_not_chosen() -> None:
    edges, network = [edge(0, 1)], line(10)
    dense = busy(edges, network, ())["p0", "p1"]
    assert choose(edges, network, compute=dense) == ()
    assert choose(edges, network, GENTLE, compute=dense / 1.9) == (("v0to1/0", "bf16", "bf16"),)
    assert choose(edges, network, GENTLE, speeds={"bf16": AT_ONCE}) == (("v0to1/0", "bf16", "bf16"),)
    assert choose(edges, network, GENTLE, speeds={}) == ()


def test_stages_on_one_peer_send_nothing() -> None:
    edges, network = [edge(0, 1), edge(1, 2)], line(10, 10)
    assert [n for n, _, _ in choose(edges, network, at=["p0", "p0", "p1"])] == ["v1to2/0"]
    tie = Tie(variable="w", elements=1 << 20, itemsize=4, stages=(0, 1))
    assert choose([], network, GENTLE, ties=(tie,), at=["p0", "p0", "p1"]) == ()


def test_one_codec_for_all_who_read_an_edge_that_of_the_slowest() -> None:
    network = line(1000, 1000)
    links = {**network.links}
    for pair in (("p0", "p2"), ("p2", "p0")):
        links[pair] = Link(alpha_seconds=0.01, bytes_per_second=10 * MBPS)
    network = Network(devices=network.devices, links=links)
    for config in (TOPK, GENTLE, replace(TOPK, reuse_mask=False)):
        ((name, forward, backward),) = choose([edge(0, 1, 2)], network, config)
        assert name == "v0to1and2/0" and "none" not in (forward, backward)


def test_those_who_share_an_uplink_are_as_slow_as_what_they_have_of_it() -> None:
    edges = [edge(0, 1), edge(0, 2), edge(1, 3)]
    network = Network(
        devices=tuple(
            Device(
                peer=f"p{i}",
                flops_per_second=1e9,
                memory_bytes=1,
                up_bytes_per_second=(20 if i == 0 else 1e4) * MBPS,
            )
            for i in range(4)
        ),
        links={
            (f"p{a}", f"p{b}"): Link(
                alpha_seconds=0.0, bytes_per_second=(10 if {a, b} == {1, 3} else 1e4) * MBPS
            )
            for a in range(4)
            for b in range(4)
            if a != b
        },
    )
    config = replace(TOPK, reuse_mask=False)
    densities = {name: forward for name, forward, _ in choose(edges, network, config)}
    # Two edges share 20 Mbps, so each is as slow as the one that has 10 for itself.
    assert len(set(densities.values())) == 1 and len(densities) == 3


def test_ties_are_never_sparse() -> None:
    tie = Tie(variable="w", elements=1 << 22, itemsize=4, stages=(0, 1))
    edges, network = [edge(0, 1)], line(10)
    assert choose(edges, network, TOPK, ties=(tie,))[-1] == ("w", "int8", "none")
    assert choose(edges, network, replace(GENTLE, families=("bf16",)), ties=(tie,))[-1] == (
        "w",
        "bf16",
        "none",
    )
    small = replace(tie, elements=64)
    assert [n for n, _, _ in choose(edges, network, GENTLE, ties=(small,))] == ["v0to1/0"]


def test_costs_are_what_is_sent() -> None:
    edges, elements = [edge(0, 1), edge(1, 2), edge(2, 3, elements=1)], 4 << 16
    codecs: EdgeCodecs = (
        ("v0to1/0", "topk:0.01", "topk:0.01"),
        ("v1to2/0", "int8", "none"),
        ("v2to3/0", "int4", "int4"),
        ("w", "int8", "none"),
    )
    costs = codec_costs(codecs, edges, SIZES, REFERENCE, True)
    topk = parse("topk:0.01")
    there, back = costs["v0to1/0", "forward"], costs["v0to1/0", "backward"]
    assert there.bytes(elements) == pytest.approx(topk.payload_bytes(elements, 4), rel=1e-12)
    assert back.bytes(elements) == pytest.approx(topk.payload_bytes_at(elements, 4), rel=1e-12)
    assert there.name == back.name == "topk:0.01"
    unmasked = codec_costs(codecs, edges, SIZES, REFERENCE, False)["v0to1/0", "backward"]
    assert unmasked == there
    assert there.encode_seconds_per_element == 4 / REFERENCE["topk"].encode_bytes_per_second
    assert costs["v1to2/0", "backward"] == DENSE["float32"]
    assert codec_costs(codecs, edges, SIZES, {}, True)["v1to2/0", "forward"].encode_seconds_per_element == 0.0
    assert ("w", "forward") not in costs
    half = codec_costs((("v0to1/0", "fp16", "fp16"),), [edge(0, 1, dtype="float16")], SIZES, REFERENCE, True)
    assert half["v0to1/0", "forward"] == DENSE["float16"]  # it would not be smaller


RATES = st.floats(1, 10_000)


@st.composite
def swarms(draw: Any) -> tuple[list[Edge], Network]:
    count = draw(st.integers(2, 6))
    network = line(
        *(draw(RATES) for _ in range(count)),
        back=tuple(draw(RATES) for _ in range(count)),
        up={i: draw(st.one_of(st.just(math.inf), RATES)) for i in range(count + 1)},
    )
    return [edge(i, i + 1, elements=draw(st.integers(5_000, 1 << 18))) for i in range(count)], network


@given(swarms(), st.floats(1, 100), st.booleans(), st.sampled_from((TOPK, GENTLE)), st.floats(0, 0.1))
@settings(max_examples=examples(100))
def test_never_more_bytes_than_dense_and_always_the_same_table(
    swarm: tuple[list[Edge], Network],
    ratio: float,
    reuse_mask: bool,
    config: CompressionConfig,
    compute: float,
) -> None:
    edges, network = swarm
    config = replace(config, ratio=ratio, reuse_mask=reuse_mask)
    table = choose(edges, network, config, compute=compute, speeds=dict(REFERENCE))
    assert table == choose(edges, network, config, compute=compute, speeds=dict(REFERENCE))
    place = {one.name: i for i, one in enumerate(edges)}
    assert [place[name] for name, _, _ in table] == sorted({place[name] for name, _, _ in table})
    costs = codec_costs(table, edges, SIZES, REFERENCE, reuse_mask)
    for one in edges:
        for way in ("forward", "backward"):
            cost = costs.get((one.name, way), DENSE["float32"])
            assert cost.bytes_per_element <= DTYPE_BYTES["float32"]
    for _, forward, backward in table:
        for spec in (forward, backward):
            assert str(parse(spec)) == spec and parse(spec).family in ("none", *config.families)
        if reuse_mask and parse(forward).family == "topk":
            assert forward == backward


@given(
    st.lists(RATES, min_size=2, max_size=7),
    st.lists(st.integers(5_000, 1 << 18), min_size=7, max_size=7),
    st.floats(1.5, 100),
)
@settings(max_examples=examples(100))
def test_under_topk_slow_links_are_busy_for_within_a_tenth_of_each_other(
    rates: list[float], elements: list[int], ratio: float
) -> None:
    """Each link alone, both ways alike: what is compressed meets the target, what is not was below it."""
    edges = [edge(i, i + 1, elements=n) for i, n in zip(range(len(rates)), elements, strict=False)]
    network = line(*rates)
    config = replace(TOPK, ratio=ratio, reuse_mask=False)
    table = {name: forward for name, forward, _ in choose(edges, network, config)}
    dense, found = (
        busy(edges, network, ()),
        busy(edges, network, choose(edges, network, config), reuse_mask=False),
    )
    target = max(dense.values()) / ratio
    for i, one in enumerate(edges):
        pair = f"p{i}", f"p{i + 1}"
        spec = parse(table.get(one.name, "none"))
        if spec.family == "none":
            assert dense[pair] <= target * (1 + 1e-9)
        elif MIN_MILLIONTHS < spec.millionths < MAX_MILLIONTHS // 1000 * 1000:
            assert 0.9 * target <= found[pair] <= target * (1 + 1e-9)


@pytest.mark.process
def test_it_needs_no_torch() -> None:
    code = "import sys, fusion.runtime.placing.codec_choice; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
