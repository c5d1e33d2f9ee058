from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusion.swarm import machine


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups as the kernel shows them, of a machine of 16 cores."""
    monkeypatch.setattr(machine, "MOUNTED", tmp_path)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return tmp_path


def test_without_groups_they_are_those_that_the_process_may_run_on(mounted: Path) -> None:
    assert machine.usable_cores() == 16


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 16),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("9900000 100000", 16),
    ],
)
def test_a_container_has_what_its_time_amounts_to(mounted: Path, quota: str, cores: int) -> None:
    (mounted / "membership").write_text("0::/\n")
    (mounted / "cpu.max").write_text(f"{quota}\n")
    assert machine.usable_cores() == cores


def test_of_nested_groups_the_tightest_counts(mounted: Path) -> None:
    (mounted / "membership").write_text("0::/user.slice/peer.service\n")
    (mounted / "user.slice/peer.service").mkdir(parents=True)
    (mounted / "user.slice/cpu.max").write_text("300000 100000\n")
    (mounted / "user.slice/peer.service/cpu.max").write_text("max 100000\n")
    assert machine.usable_cores() == 3


@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("400000", 4), ("nonsense", 16)])
def test_the_first_version_and_a_path_that_only_the_host_has(mounted: Path, quota: str, cores: int) -> None:
    (mounted / "membership").write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    (mounted / "cpu").mkdir()
    (mounted / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (mounted / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine.usable_cores() == cores
