"""What a volunteer lends who says nothing is half of what a container may have, not of what its machine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusion.runtime.peer import capability, free_memory
from fusion.swarm import machine

GIB = 1 << 30
Group = Callable[..., None]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Makes one of the second version, or with `first` of the first one, as the kernel shows it, of a machine with 64 GiB free."""

    def make(path: str, most: int | str, used: int = 0, cached: int = 0, *, first: bool = False) -> None:
        folder = tmp_path / ("memory" if first else "") / path
        folder.mkdir(parents=True, exist_ok=True)
        limit, usage, name = free_memory.FILES[first]
        (folder / limit).write_text(f"{most}\n")
        (folder / usage).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{name} {cached}\n")

    monkeypatch.setattr(machine, "MOUNTED", tmp_path)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    return make


def test_without_groups_it_is_the_machine_s(group: Group) -> None:
    assert free_memory.free_bytes() == 64 * GIB


def test_a_container_leaves_what_its_limit_leaves_and_what_the_kernel_takes_back(
    group: Group, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    group("", 4 * GIB, 3 * GIB, GIB)
    assert free_memory.free_bytes() == 2 * GIB
    assert capability.lent_bytes("cpu") == GIB
    group("", 4 * GIB, 5 * GIB)
    assert free_memory.free_bytes() == 0


def test_of_nested_groups_the_tightest_counts(group: Group, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/user.slice/peer.service\n")
    group("user.slice", 2 * GIB, GIB // 2)
    group("user.slice/peer.service", "max", GIB // 2)
    assert free_memory.free_bytes() == 3 * GIB // 2


def test_the_first_version_and_a_path_that_only_the_host_has(group: Group, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    group("", 8 * GIB, GIB, first=True)
    assert free_memory.free_bytes() == 7 * GIB
    group("", 9223372036854771712, GIB, first=True)
    assert free_memory.free_bytes() == 64 * GIB
