"""How two reports are compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
SECONDS = 280


def test_differences_are_told_by_place() -> None:
    program = (
        "import exactness as e\n"
        "one = {'torch': '2', 'job': {'losses': ['0x1', '0x2', '0x3'], 'plan': {'cuts': [1]}, 'states': ['a']}}\n"
        "two = {'torch': '2', 'job': {'losses': ['0x1', '0x4', '0x5'], 'plan': {'cuts': [1]}, 'states': []}}\n"
        "assert not list(e.differences(one, one)) and e.digest(one) != e.digest(two)\n"
        "print(*e.differences(one, two), sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout.splitlines() == [
        "job / losses: 2 of 3, first number 1: 0x2 -> 0x4",
        "job / states: ['a'] -> []",
    ], done.stderr


def test_answers_need_what_was_trained() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "exactness.py"), "--only", "answers"],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 2 and "answers need demo" in done.stderr
