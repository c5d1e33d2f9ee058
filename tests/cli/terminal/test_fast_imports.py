from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def test_a_command_that_joins_needs_no_torch() -> None:
    code = (
        "import sys, fusion.cli.status\nfrom fusion.cli.terminal.fast_imports import lean_imports\n"
        "with lean_imports(): import fusion.swarm.dht.directory, fusion.runtime.peer.client\n"
        "print(*sorted({'torch', 'hivemind.dht.node', 'fusion.runtime.peer.client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fusion.runtime.peer.client"]


def test_a_whole_hivemind_that_is_there_already_stays() -> None:
    code = (
        "import hivemind\nfrom fusion.cli.terminal.fast_imports import lean_imports\n"
        "with lean_imports(): from hivemind import DHT\nprint(hivemind.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
