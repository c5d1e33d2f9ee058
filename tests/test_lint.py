"""Lint, format and types, as tests: they run beside the others and are reported with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = ("mypy", "ruff check .", "ruff format --check .")


@pytest.mark.program
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_complained_of(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
