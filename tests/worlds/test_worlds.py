"""A few thousand simulated worlds, and planted bugs that they must find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import Run, starter

HERE = Path(__file__).parent
SECONDS = 800

Worlds = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """The command, in a process of its own for each run; its code, output and errors. Half of a short run would be imports."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with starter([sys.executable, str(HERE / "starter.py")], environment) as run:
        yield run


@pytest.fixture
def worlds(run: Run) -> Worlds:
    def summary(*arguments: str) -> dict[str, Any]:
        code, output, errors = run(*arguments, "--json")
        assert code in (0, 1), errors
        assert "Warning" not in errors, errors
        found: dict[str, Any] = json.loads(output)
        return found

    return summary


# All tiers together run the worlds 1 to 2040, the gate the first 40.
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (1, 20),
        *(pytest.param(seed, 505, marks=pytest.mark.slow) for seed in (21, 526, 1031, 1536)),
    ],
)
def test_everything_holds_in_many_worlds(worlds: Worlds, seed: int, count: int) -> None:
    found = worlds("--worlds", str(count), "--seed", str(seed), "--processes", "1")
    assert found["worlds"] == count
    assert found["violations"] == {}
    assert found["faulted_worlds"] > 0.6 * count
    assert all(
        found["faults"].get(kind)
        for kind in ("kill", "freeze", "vanish", "cut", "partition", "leave", "join")
    )


@pytest.mark.parametrize(
    ("plant", "told", "seed"),
    [
        pytest.param("term", "fence", 201, marks=pytest.mark.slow),
        pytest.param("ready", "commit", 1, marks=pytest.mark.slow),
        ("promote", "history", 1),
        ("mistake", "sound", 1),
    ],
)
def test_a_planted_bug_is_found(worlds: Worlds, plant: str, told: str, seed: int) -> None:
    # A bug also stalls some worlds; only a violation of the broken property counts.
    found = worlds(
        *("--worlds", "1500", "--seed", str(seed), "--plant", plant, "--until", told, "--stop-after", "200"),
        *("--processes", "1"),
    )
    assert any(text.startswith(told) for text in found["violations"].values()), found["violations"]


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_liars_are_not_believed(worlds: Worlds, count: int) -> None:
    found = worlds("--worlds", str(count), "--seed", "1", "--liars", "3", "--processes", "1")
    assert found["violations"] == {}


# Each seed is shortly before the first world that finds the bug.
@pytest.mark.parametrize(
    ("plant", "told", "seed"),
    [
        ("proof", "deposed", 157),
        pytest.param("votes", "deposed", 260, marks=pytest.mark.slow),
        pytest.param("belief", "durable", 1, marks=pytest.mark.slow),
        ("snapshot", "history", 2202176),
        ("witness", "alive", 2151927),
    ],
)
def test_a_check_that_is_left_out_is_found_by_liars(worlds: Worlds, plant: str, told: str, seed: int) -> None:
    found = worlds(
        *("--worlds", "400", "--seed", str(seed), "--liars", "3"),
        *("--plant", plant, "--until", told, "--stop-after", "200"),
        *("--processes", "1"),
    )
    assert any(text.startswith(told) for text in found["violations"].values()), found["violations"]


@pytest.mark.parametrize("seed", [1084, 1980458, 2082580, 2143507, 2144563, 2151927, 2202176, 2203800])
def test_worlds_that_failed_once_hold(worlds: Worlds, seed: int) -> None:
    found = worlds("--worlds", "1", "--seed", str(seed), "--liars", "3", "--processes", "1")
    assert found["violations"] == {}


def test_a_world_repeats(run: Run) -> None:
    """A world repeats in one process, and in another that is started as a user starts it."""

    def course(code: int, output: str) -> str:
        assert code == 0, output[-2000:]
        lines = output.splitlines()
        assert lines[-1].startswith("the log repeats: ")
        return "\n".join(lines[:-3])

    code, output, _ = run("--replay", "7")
    done = subprocess.run(
        [sys.executable, str(HERE), "--replay", "7"], capture_output=True, text=True, timeout=SECONDS
    )
    assert course(code, output) == course(done.returncode, done.stdout)


@pytest.mark.slow
def test_the_digest_of_a_world_is_the_same_in_whatever_process_it_runs(
    worlds: Worlds, tmp_path: Path
) -> None:
    made, count = [], 26  # more than a process takes at once
    for processes in ("1", "2"):
        path = tmp_path / processes
        total = worlds("--worlds", str(count), "--seed", "7", "--processes", processes, "--digest", str(path))
        lines = path.read_text().splitlines()
        assert total["worlds"] == count and [line.split()[0] for line in lines] == [
            str(7 + i) for i in range(count)
        ]
        assert len({digest for line in lines for digest in line.split()[1:]}) == 2 * count
        made.append((total, lines))
    assert made[0] == made[1]
