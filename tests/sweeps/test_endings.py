"""Sweeps clean up and report it when they are terminated, as by a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from box import kernel
from support.processes import marked

REASON = kernel.unavailable()
pytestmark = pytest.mark.e2e
needs_box = pytest.mark.skipif(bool(REASON), reason=REASON)
SECONDS = 120.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "when"),
    [
        pytest.param("partition.py", "fusion-partition-*/plan", marks=needs_box),
        pytest.param("partition.py", "fusion-partition-*/peer-1.log", marks=needs_box),
        ("training.py", "fusion-sweep-plan-*/plan"),
        ("training.py", "fusion-sweep-*/peer-1.log"),
    ],
)
def test_sigterm_leaves_nothing_behind(tmp_path: Path, sweep: str, when: str) -> None:
    """A sweep ends while it prepares the job, in a thread that cannot be stopped, and while peers run."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, str(Path(__file__).parent / sweep)]
    with subprocess.Popen(
        command, env={**environment, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + SECONDS
        while not list(tmp_path.glob(when)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and said.endswith("interrupted\n") and "Traceback" not in said, said
    while (left := (marked(tmp_path), os.listdir(tmp_path))) != ([], []) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == ([], [])
