"""The partition sweep clears up when it is asked to end, as by a time limit."""

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
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(REASON), reason=REASON)]
SECONDS = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["fusion-partition-*/plan", "fusion-partition-*/peer-1.log"])
def test_sigterm_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    """While the job is prepared, in a thread that nobody can stop, and while peers run."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, str(Path(__file__).parent / "partition.py")]
    with subprocess.Popen(
        command, env={**environment, "TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + SECONDS
        while not list(tmp_path.glob(when)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(SECONDS) != 0
    while (left := (marked(tmp_path), os.listdir(tmp_path))) != ([], []) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == ([], [])
