"""When a running job's codecs change: for what pays, and for nothing else, whatever the noise."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from fusion.compression.reference_speeds import REFERENCE
from fusion.dag.cutting.stage import Edge
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Ref, TensorType
from fusion.dag.placement.network import Device, Link, Network
from fusion.dag.placement.step_model import step_seconds
from fusion.runtime.job.manifest import CompressionConfig, DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.placing.codec_choice import StageTraffic, Tie, choose_codecs
from fusion.runtime.training.lead.tuning import (
    CHANGED,
    GAIN,
    Job,
    Measurements,
    better_codecs,
    changed,
    codec_summary,
    pays,
    running,
)
from fusion.swarm.directory.records import Digest

MBIT = 1e6 / 8
NOISE = 0.15
FAMILIES = [("bf16", "int8"), ("int8", "topk"), ("topk",), ("bf16", "int8", "int4", "topk")]


def job(stages: int = 3, **compression: object) -> Job:
    """A chain with a skip edge from the first to the last stage, and a tied variable at its ends."""
    kind = TensorType((symbol("batch"), symbol("sequence"), 64), "float32")
    edges = [Edge(f"x{s}/0", Ref(f"x{s}"), kind, s, (s + 1,), True) for s in range(stages - 1)]
    edges.append(Edge("skip/0", Ref("skip"), kind, 0, (stages - 1,), True))
    return Job(
        config=TrainConfig(
            steps=1000, microbatches=4, microbatch_size=4, sequence=64, seed=0, optimizer=OptimizerConfig(),
            data=DataConfig(kind="tokens", train=Digest("")),
            compression=CompressionConfig(kind="adaptive", **compression),  # type: ignore[arg-type]
        ),
        edges=tuple(edges),
        ties=(Tie(variable="w", elements=8192, itemsize=4, stages=(0, stages - 1)),),
        memory_bytes=(1000,) * stages,
        state_bytes=(1000,) * stages,
    )  # fmt: skip


def measurements(
    mbps: dict[tuple[int, int], float], stages: int = 3, compute: float = 0.005, up: float = 1e4
) -> Measurements:
    owners = tuple(f"p{s}" for s in range(stages))
    pairs = {(a, b): mbps.get((a, b), 100.0) for a in range(stages) for b in range(stages) if a != b}
    network = Network(
        devices=tuple(
            Device(
                peer=owner, flops_per_second=1e9, memory_bytes=10_000,
                up_bytes_per_second=up * MBIT, down_bytes_per_second=up * MBIT,
            )
            for owner in owners
        ),
        links={
            (owners[a], owners[b]): Link(alpha_seconds=0.005, bytes_per_second=rate * MBIT)
            for (a, b), rate in pairs.items()
        },
    )  # fmt: skip
    return Measurements(owners=owners, network=network, compute_seconds=(compute,) * stages, speeds=REFERENCE)


def noisy(true: Measurements, draw: random.Random) -> Measurements:
    """The same, measured once more."""

    def about(value: float) -> float:
        return value * draw.uniform(1 - NOISE, 1 + NOISE)

    network = true.network
    devices = [
        replace(d, up_bytes_per_second=about(d.up_bytes_per_second), down_bytes_per_second=about(d.down_bytes_per_second))
        for d in network.devices
    ]  # fmt: skip
    links = {
        pair: replace(link, bytes_per_second=about(link.bytes_per_second))
        for pair, link in network.links.items()
    }
    return replace(
        true,
        network=Network(devices=tuple(devices), links=links),
        compute_seconds=tuple(about(seconds) for seconds in true.compute_seconds),
    )


def chosen(work: Job, now: Measurements) -> tuple[tuple[str, str, str], ...]:
    traffic = StageTraffic(
        edges=work.edges, ties=work.ties, sizes=work.config.sizes, owners=now.owners, network=now.network
    )
    return choose_codecs(traffic, work.config.compression, now.speeds, max(now.compute_seconds))


def test_a_link_cut_to_a_tenth_is_compressed_and_one_that_is_well_again_is_not() -> None:
    work, well = job(), measurements({})
    slow = measurements({(0, 1): 10.0, (1, 0): 10.0})
    before = chosen(work, well)
    after = better_codecs(work, before, slow, well)
    assert after is not None and {edge: there for edge, there, _ in after}["x0/0"] != "none"
    busy = [step_seconds(running(work, slow, codecs)).bound_seconds for codecs in (before, after)]
    assert GAIN * busy[1] < busy[0]
    fast = measurements({(a, b): 1e4 for a in range(3) for b in range(3)}, compute=0.02)
    assert better_codecs(work, after, fast, slow) == ()  # nothing takes longer, and nothing is taken away


def test_what_does_not_pay_is_left_alone() -> None:
    work = job()
    slow = measurements({(0, 1): 10.0, (1, 0): 10.0}, compute=10.0)
    assert better_codecs(work, (), slow) is None  # computing takes longer than any link
    assert better_codecs(work, (), measurements({}), measurements({})) is None


def test_a_table_is_as_good_as_itself() -> None:
    work, now = job(), measurements({(0, 1): 10.0})
    pipe = running(work, now, chosen(work, now))
    assert not pays(pipe, pipe)


@pytest.mark.parametrize(
    "families", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:])]
)
def test_noise_alone_never_changes_a_table_twice(families: tuple[str, ...]) -> None:
    work, count = job(families=families), 0
    for seed in range(60):
        draw = random.Random(seed)
        rates = {(a, b): 10 ** draw.uniform(0.5, 3.5) for a in range(3) for b in range(3) if a != b}
        true = measurements(rates, compute=10 ** draw.uniform(-4, -1), up=10 ** draw.uniform(1, 4))
        codecs, known, changes = chosen(work, measurements({})), None, 0
        for _ in range(25):
            now = noisy(true, draw)
            found = better_codecs(work, codecs, now, known)
            if found is not None:
                codecs, known, changes = found, now, changes + 1
        assert changes <= 1, f"seed {seed}"
        count += changes
    assert count > 20


def test_more_than_noise_counts_as_a_change() -> None:
    work, draw = job(), random.Random(1)
    true = measurements({(0, 1): 30.0})
    for _ in range(100):
        assert not changed(work, noisy(true, draw), noisy(true, draw))
    assert (1 + NOISE) / (1 - NOISE) < CHANGED
    assert changed(work, true, measurements({(0, 1): 3.0}))
    assert changed(work, true, measurements({(0, 1): 30.0}, compute=0.05))
    assert changed(work, true, measurements({(0, 1): 30.0}, up=20.0))
    unlimited = measurements({(0, 1): 30.0}, up=inf)
    assert not changed(work, true, unlimited) and not changed(work, unlimited, true)
    assert changed(work, true, replace(true, owners=("p1", "p0", "p2")))


def test_codecs_codec_summary() -> None:
    edges = ("a", "b", "c")
    assert codec_summary((), ()) == ""
    assert codec_summary((), edges) == "none on 3 of 3 edges"
    codecs = (("a", "int8", "int8"), ("b", "int8", "int8"), ("c", "topk:0.05", "int8"), ("w", "int8", "none"))
    assert codec_summary(codecs, edges) == "int8 on 2, topk:0.05/int8 on 1 of 3 edges"
