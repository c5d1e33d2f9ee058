"""The tests' share of the chaos: a short seeded run of the command, and a kill of the sweep of each kind."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusion.cli.local import chaos_job

pytestmark = pytest.mark.e2e
CHAOS = (sys.executable, "-m", "fusion.cli.main", "chaos", "--json")
SWEEPS = Path(__file__).parents[1] / "sweeps"


@pytest.mark.slow
@pytest.mark.usefixtures("traces")
def test_a_swarm_under_kills_ends_as_one_that_is_left_alone() -> None:
    done = subprocess.run(
        [*CHAOS, "--peers", "4", "--standbys", "2", "--kill-every", "14s", "--minutes", "1", "--seed", "11"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    [line] = done.stdout.splitlines()
    report = json.loads(line)
    assert report["exact"] and report["differences"] == []
    assert report["kills"] >= 1, "nobody was killed: the test shows nothing"
    assert report["unrecovered"] == 0 and report["seed"] == 11
    assert report["goodput"] > 0.0
    assert [fault["at_seconds"] for fault in report["faults"]] == [
        fault["at_seconds"] for fault in report["plan"][: len(report["faults"])]
    ]
    assert "exact      yes" in done.stderr


@pytest.mark.usefixtures("traces")
def test_kills_at_exact_instants_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tests/sweeps/training.py`, in this process: so its peers start as those of other tests do."""
    monkeypatch.syspath_prepend(SWEEPS)
    import training

    for name, value in {"BLOCKS": 2, "WIDTH": 32, "HEADS": 2, "SEQUENCE": 16}.items():
        monkeypatch.setattr(chaos_job, name, value)
    options = training.parser().parse_args(
        ["--kills", "3", "--stages", "2", "--standbys", "1", "--seed", "4", "--run-seconds", "12",
         "--read-seconds", "0.05", "--roles", "lead,last,standby", "--phases", "commit"]
    )  # fmt: skip
    report = asyncio.run(training.sweep(options))
    assert report["ok"] and report["problems"] == []
    assert {(kill["role"], kill["phase"]) for kill in report["done"]} == {
        ("lead", "commit"),
        ("last", "commit"),
        ("standby", "commit"),
    }
    assert all(kill["fired"] and kill["recovery_seconds"] is not None for kill in report["done"])
    assert report["snapshots_compared"] >= 2
