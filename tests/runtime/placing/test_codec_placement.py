"""A placement and its codecs are chosen together, and nothing is taken away that does not make the step shorter."""

from __future__ import annotations

import pytest
from support.instances import SIZES, chain

from fusion.compression.adaptive import CodecSpeed
from fusion.compression.reference_speeds import REFERENCE
from fusion.dag.cutting.memory import MemoryConfig
from fusion.dag.placement.network import Device, Link, Network
from fusion.dag.placement.pipeline import pipeline
from fusion.dag.placement.simulate import simulate
from fusion.runtime.job.manifest import CompressionConfig
from fusion.runtime.placing.codec_placement import CodecPlacement, codec_families, place_with_codecs

GRAPH = chain([512] * 9)
ADAPTIVE = CompressionConfig(kind="adaptive", ratio=16.0, families=("bf16", "int8", "topk"))


def swarm(mbps: float, gflops: float = 1.0) -> Network:
    devices = tuple(
        Device(peer=f"p{i}", flops_per_second=gflops * 1e9, memory_bytes=1 << 30) for i in range(3)
    )
    link = Link(alpha_seconds=0.005, bytes_per_second=mbps * 1e6 / 8)
    return Network(devices=devices, links={(a.peer, b.peer): link for a in devices for b in devices})


def placed(
    network: Network,
    config: CompressionConfig = ADAPTIVE,
    speeds: dict[str, CodecSpeed] | None = None,
    stages: int | None = 2,
) -> CodecPlacement:
    return place_with_codecs(
        GRAPH,
        network,
        SIZES,
        8,
        config,
        speeds or dict(REFERENCE),
        MemoryConfig(),
        requested="1f1b",
        stages=stages,
    )


def seconds(found: CodecPlacement, network: Network) -> float:
    return simulate(pipeline(GRAPH, found.placement, network, SIZES, found.costs)).step_seconds


def test_codecs_make_the_step_shorter_and_may_let_more_devices_take_part() -> None:
    network = swarm(4)
    dense = placed(network, CompressionConfig())
    assert dense.codecs == () and dense.costs == {}
    wired = placed(network)
    assert wired.codecs and all(forward == backward for _, forward, backward in wired.codecs)
    assert seconds(wired, network) < seconds(dense, network)
    free, alone = placed(network, stages=None), placed(network, CompressionConfig(), stages=None)
    assert seconds(free, network) <= seconds(alone, network)
    assert len(free.placement.owners) >= len(alone.placement.owners)


def test_a_uniform_codec_is_taken_as_it_is() -> None:
    wired = placed(swarm(4), CompressionConfig(kind="uniform", codec="int4"))
    assert wired.codecs and {way[1:] for way in wired.codecs} == {("int4", "int4")}


@pytest.mark.parametrize("network", [swarm(40_000), swarm(100, gflops=0.001)])
def test_fast_links_and_slow_devices_leave_everything_dense(network: Network) -> None:
    wired = placed(network)
    assert wired.codecs == () and wired.costs == {}


def test_slow_codecs_leave_everything_dense() -> None:
    slow = CodecSpeed(encode_bytes_per_second=1e5, decode_bytes_per_second=1e5)
    assert placed(swarm(4), speeds=dict.fromkeys(REFERENCE, slow)).codecs == ()


def test_only_the_speeds_that_matter_are_measured() -> None:
    assert codec_families(CompressionConfig()) == ()
    assert codec_families(CompressionConfig(kind="uniform", codec="topk:0.1")) == ("topk",)
    assert codec_families(CompressionConfig(kind="uniform", codec="none")) == ()
    assert codec_families(CompressionConfig(kind="adaptive", families=("topk",))) == ("topk", "int8")
