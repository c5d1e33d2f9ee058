"""The thin transport against a real p2pd: py-libp2p dials go-libp2p, and frames go both ways as between two peers. Each case has a
process of its own."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from support import thin_cases

pytestmark = pytest.mark.process
CASES = [
    name
    for name, case in vars(thin_cases).items()
    if inspect.iscoroutinefunction(case) and case.__module__ == thin_cases.__name__
]


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(thin_cases.__file__)), case],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_there_are_cases() -> None:
    assert len(CASES) >= 7


LEAN = """
import sys
from fusion.swarm.thin.transport import _machinery
_machinery()
print(*sorted({"aioquic", "Crypto", "coincurve", "anyio", "torch", "hivemind", "numpy", "uvloop"} & set(sys.modules)))
print(*sorted({"trio", "nacl", "noise"} & set(sys.modules)))
"""


def test_of_py_libp2p_is_loaded_what_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "nacl noise trio"]


WHOLE = """
import sys
from fusion.swarm.thin import libp2p
libp2p._UNUSED["libp2p.custom_types"] = ()  # as if a name had moved
from fusion.swarm.thin.transport import _machinery
thread, dialer = _machinery()
print(dialer.__name__, hasattr(sys.modules["libp2p"], "new_host"))
"""


def test_a_release_with_its_parts_elsewhere_is_loaded_as_a_whole() -> None:
    done = subprocess.run([sys.executable, "-c", WHOLE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Dialer", "True"]
