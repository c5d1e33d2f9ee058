"""What goes over the wire is what was recorded: peers of another version understand every byte of it, or none."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
SECONDS = 280


def test_every_frame_is_what_was_recorded() -> None:
    done = subprocess.run([sys.executable, str(HERE)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    recorded = (HERE / "frames.txt").read_text()
    changed = list(
        difflib.unified_diff(
            recorded.splitlines(), done.stdout.splitlines(), "recorded", "now", "", "", 0, ""
        )
    )
    assert not changed, "\n".join(
        [
            "What peers send each other has changed. Peers that run now must not meet it under the same name: step the",
            "version of the protocol, then record it anew: python tests/runtime/recorded --write",
            *changed[:40],
        ]
    )
