"""A few thousand simulated worlds, and proof that they would find what they are there to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECONDS = 800


def worlds(*arguments: str) -> dict[str, Any]:
    """The command of its own: it wants the hashes of its process from the beginning."""
    done = subprocess.run(
        [sys.executable, str(HERE), *arguments, "--json"], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Warning" not in done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# In all tiers together the worlds 1 to 2040; in the gate the first of them.
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (1, 40),
        *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in (41, 541, 1041, 1541)),
    ],
)
def test_everything_holds_in_many_worlds(seed: int, count: int) -> None:
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
    ],
)
def test_a_planted_bug_is_found(plant: str, told: str, seed: int) -> None:
    # A bug also leaves worlds standing still: only the one that names what was broken counts.
    found = worlds(
        *("--worlds", "1500", "--seed", str(seed), "--plant", plant, "--until", told, "--stop-after", "200"),
        *("--processes", "1"),
    )
    assert any(text.startswith(told) for text in found["violations"].values()), found["violations"]


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.slow)])
def test_liars_are_not_believed(count: int) -> None:
    found = worlds("--worlds", str(count), "--seed", "1", "--liars", "3", "--processes", "1")
    assert found["violations"] == {}


# From a seed shortly before the first world that shows it: of those before, none did.
@pytest.mark.parametrize(
    ("plant", "told", "seed"),
    [
        ("proof", "deposed", 150),
        pytest.param("words", "deposed", 260, marks=pytest.mark.slow),
        pytest.param("belief", "durable", 1, marks=pytest.mark.slow),
    ],
)
def test_a_check_that_is_left_out_is_found_by_liars(plant: str, told: str, seed: int) -> None:
    found = worlds(
        *("--worlds", "400", "--seed", str(seed), "--liars", "3"),
        *("--plant", plant, "--until", told, "--stop-after", "200"),
        *("--processes", "1"),
    )
    assert any(text.startswith(told) for text in found["violations"].values()), found["violations"]


def test_a_world_repeats() -> None:
    def replayed(seed: int) -> str:
        done = subprocess.run(
            [sys.executable, str(HERE), "--replay", str(seed)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout[-2000:]
        lines = done.stdout.splitlines()
        assert lines[-1].startswith("the log repeats: ")
        return "\n".join(lines[:-3])

    assert replayed(7) == replayed(7)


@pytest.mark.slow
def test_the_digest_of_a_world_is_the_same_in_whatever_process_it_runs(tmp_path: Path) -> None:
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
