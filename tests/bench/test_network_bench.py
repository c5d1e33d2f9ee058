"""A small run of `make bench-network`: three peers, two cases."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from bench import network, network_machine, network_results
from bench.network_cases import (
    BASELINE,
    CODECS,
    SCHEDULERS,
    SHAPES,
    Bench,
    Case,
    busiest_pairs,
    measurable,
    placed,
    predicted,
    seconds_of,
)
from bench.network_machine import Machine, Pace, Used, carrying, cores
from bench.network_table import HEAD
from box import kernel
from support.stolen import Stolen

from fusion.runtime.job.spec import GPTConfig

REASON = kernel.unavailable()
SWARM = """
[[peers]]
name = "quick"
gflops = 20
memory = "1GiB"
up_mbps = 100
down_mbps = 100
rtt_ms = 2
[[peers]]
name = "other"
gflops = 20
memory = "1GiB"
up_mbps = 100
down_mbps = 100
rtt_ms = 2
[[peers]]
name = "slow"
gflops = 20
memory = "1GiB"
up_mbps = 4
down_mbps = 8
rtt_ms = 10
"""


def small(folder: Path) -> Bench:
    (folder / "t.toml").write_text(SWARM)
    return Bench(
        name="T",
        path=folder / "t.toml",
        model=GPTConfig(blocks=2, width=32, heads=2, sequence=32, tied=False),
        microbatches=4,
        microbatch_size=1,
        warm_up_seconds=0.2,
        timed_seconds=0.2,
        curve_steps=4,
        evaluate_every=2,
        evaluate_batches=1,
        alone_steps=4,
        schedulers={"equal-ops": ("equal-ops", 3), "op-fence": ("op-fence", None)},
    )


@pytest.mark.slow
def test_there_are_enough_cases_and_the_baseline_is_first() -> None:
    benches = [measurable(name) for name in ("A", "B", "C")]
    cases = [case for bench in benches for case in bench.cases()]
    assert len(cases) == 3 * len(SCHEDULERS) * len(CODECS) and len(cases) >= 20
    for bench in benches:
        first = bench.cases()[0]
        assert first == bench.baseline and (first.scheduler, first.codec) == BASELINE


@pytest.mark.slow
def test_the_model_is_as_wide_as_the_slowest_link_allows(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(SWARM)
    (tmp_path / "quick.toml").write_text(SWARM.replace("4\n", "1000\n").replace("8\n", "1000\n"))
    slow, quick = (measurable(str(tmp_path / name)) for name in ("slow.toml", "quick.toml"))
    assert slow.name == "slow" and quick.name == "quick"
    assert slow.model.width == SHAPES[0][0] > quick.model.width == SHAPES[-1][0]
    crossing = {width * sequence * size for width, sequence, size in SHAPES}
    assert max(crossing) <= 1.01 * min(crossing)


def test_a_job_is_timed_for_long_enough(tmp_path: Path) -> None:
    bench = replace(small(tmp_path), warm_up_seconds=12.0, timed_seconds=10.0, least=(2, 4))
    assert bench.steps(20.0) == (2, 6)
    assert bench.steps(1.0) == (12, 22)


def test_only_what_differs_is_measured(tmp_path: Path) -> None:
    bench = replace(small(tmp_path), schedulers={"equal-ops": ("equal-ops", 3), "again": ("equal-ops", 3)})
    found = network.distinct(bench, bench.cases())
    assert {case.scheduler for case in found} == {"equal-ops"}


def test_measured_stages_and_slower_links_move_the_prediction(tmp_path: Path) -> None:
    bench = small(tmp_path)
    case = Case(network="T", scheduler="equal-ops", codec="dense")
    pairs = busiest_pairs(bench, case)
    assert pairs == (("other", "slow"),)
    assert seconds_of(bench.network, pairs, 1e6) == pytest.approx(2.0)  # 4 Mbps up
    both = (("quick", "other"), ("other", "slow"))
    assert seconds_of(bench.network, both, 1e6) == pytest.approx(2.0)
    assert seconds_of(bench.network, (("slow", "quick"), *both), 1e6) == pytest.approx(4.0)
    quick, slow = predicted(bench, case), predicted(bench, case, [0.5, 0.5, 0.5])
    assert slow.bound_seconds >= 0.5 > quick.bound_seconds
    assert quick.slowest_ratio > slow.slowest_ratio
    half = predicted(bench, case, machine=Machine(goodput=0.5))
    assert half.simulated_seconds > quick.simulated_seconds
    assert half.bound_seconds == quick.bound_seconds
    for price in (Machine(message_seconds=1.0), Machine(packet_seconds=1.0)):
        assert predicted(bench, case, machine=price).simulated_seconds > half.simulated_seconds
    assert quick.packets > 0.9 * quick.messages


def test_messages_are_as_dear_as_in_a_job() -> None:
    bare = Machine(message_seconds=1e-4, byte_seconds=1e-8, idle_cores=0.1)
    used = Used(
        cpu_seconds=1.7, step_seconds=2.0, computing_seconds=0.5, messages=1000, bytes=4e7, packets=5e3
    )
    alone = carrying(bare, used)  # 1 s is left, twice what bare messages cost
    assert alone.message_seconds == pytest.approx(2e-4) and alone.byte_seconds == pytest.approx(2e-8)
    slowed = carrying(replace(bare, cores=cores() / 1.2), used)  # the cores slow each other down
    assert bare.message_seconds < slowed.message_seconds < alone.message_seconds
    assert carrying(bare, replace(used, cpu_seconds=0.1)) == bare
    packed = carrying(replace(bare, packet_seconds=1e-4), used)  # 0.5 s of it for the packets
    assert packed.packet_seconds == 1e-4 and packed.byte_seconds == pytest.approx(1e-8)
    assert carrying(Machine(), used) == Machine()


def test_results_of_another_model_are_refused(tmp_path: Path) -> None:
    bench = small(tmp_path)
    results = network_results.Results(tmp_path / "network.json")
    results.open(bench)
    results.save()
    network_results.Results(tmp_path / "network.json").open(bench)
    with pytest.raises(ValueError, match="another model"):
        network_results.Results(tmp_path / "network.json").open(replace(bench, microbatches=5))


def test_the_least_disturbed_measurement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, made = iter([0.3, 0.1, 0.2]), iter("abc")
    monkeypatch.setattr(Stolen, "share", lambda _: next(shares))

    async def measured() -> str:
        return next(made)

    options = argparse.Namespace(pace=argparse.Namespace(quiet_within=lambda seconds: True))
    assert asyncio.run(network.undisturbed("one", measured, options)) == ("b", 0.1)
    shares, made = iter([0.04]), iter("a")
    assert asyncio.run(network.undisturbed("one", measured, options)) == ("a", 0.04)


def test_what_others_had_is_a_share_of_what_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    at = psutil.cpu_times()
    monkeypatch.setattr(psutil, "cpu_times", lambda: at)
    stolen = Stolen()
    assert stolen.share() == 0.0  # nothing was wanted
    later = at._replace(user=at.user + 2.0, system=at.system + 1.0, idle=at.idle + 50.0, steal=at.steal + 1.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: later)
    assert stolen.share() == pytest.approx(0.25)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_two_cases_on_three_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "CURVES", (BASELINE,))
    monkeypatch.setattr(network, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(network, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(network, "REPEATS", 1)
    monkeypatch.setattr(network_machine, "SECONDS", 0.5)
    monkeypatch.setattr(network_machine, "WORK_SECONDS", 0.1)
    monkeypatch.setattr(network_machine, "WORK_TURNS", 1)
    monkeypatch.setattr(network_machine, "SMALL", (1 << 10, 100))
    monkeypatch.setattr(network_machine, "LARGE", (1 << 16, 40))
    bench = small(tmp_path)
    cases = [Case(network="T", scheduler="equal-ops", codec=codec) for codec in ("dense", "int8")]
    results = network_results.Results(tmp_path / "network.json")
    results.open(bench)
    options = argparse.Namespace(rounds=1, curves=True, until=math.inf, pace=Pace())
    network.measure_network(bench, cases, results, options)
    assert not results.data["failed"]

    again = network_results.Results(tmp_path / "network.json")
    rows = network_results.rows(bench, again, cases)
    assert [row.codec for row in rows] == ["dense", "int8"]
    assert [row.peers for row in rows] == [3, 3]
    assert rows[0].speed_up == 1.0 and rows[0].reached_speed_up == 1.0 and rows[1].reached_speed_up is None
    assert rows[1].sent_bytes < 0.5 * rows[0].sent_bytes
    assert all(row.seconds > 0 and row.simulated_seconds > 0 and row.bound_seconds > 0 for row in rows)

    network_results.report(again, [(bench, cases)], tmp_path)
    assert "simulator against box" in capsys.readouterr().out
    lines = [line for line in (tmp_path / "network.md").read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 4 and {line.count("|") for line in lines} == {len(HEAD) + 1}
    assert (tmp_path / "network-t.png").stat().st_size > 0
    # One placement, two codecs: it was run once without limits.
    found = json.loads((tmp_path / "network.json").read_text())
    assert [len(jobs) for jobs in found["alone"].values()] == [1]
    assert placed(bench, cases[0]).placement.cuts == placed(bench, cases[1]).placement.cuts
