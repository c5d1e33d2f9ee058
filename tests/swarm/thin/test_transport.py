"""The thin transport against a real p2pd: py-libp2p dials go-libp2p, and frames go both ways as between two peers. The cases have a
process of their own, and each has its own peer."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import thin_cases

from fusion.swarm.identity import Identity
from fusion.swarm.thin.transport import KNOWN_PEERS, ThinConfig, ThinTransport
from fusion.swarm.transport import PeerId

pytestmark = pytest.mark.process
CASES = [
    name
    for name, case in vars(thin_cases).items()
    if inspect.iscoroutinefunction(case) and case.__module__ == thin_cases.__name__
]


@pytest.fixture(scope="module")
def cases() -> Iterator[subprocess.Popen[str]]:
    """The process that runs them."""
    with subprocess.Popen(
        [sys.executable, str(Path(thin_cases.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, cases: subprocess.Popen[str]) -> None:
    assert cases.stdin is not None and cases.stdout is not None
    print(case, file=cases.stdin, flush=True)
    told = json.loads(cases.stdout.readline())
    assert told == {"wrong": "", "stderr": ""}, f"{told['wrong']}\n{told['stderr']}"


def test_there_are_cases() -> None:
    assert len(CASES) >= 7


def test_whoever_was_learned_of_last_is_known_however_many_there_are() -> None:
    def address(peer: PeerId) -> str:
        return f"/ip4/192.0.2.1/tcp/4001/p2p/{peer}"

    def peer() -> PeerId:
        return Identity.generate().peer_id

    named, connected, again = peer(), peer(), peer()
    thin = ThinTransport(ThinConfig(identity=Identity.generate(), ways=(address(named),)))
    thin._trio = SimpleNamespace()  # type: ignore[assignment]
    thin._dialer = SimpleNamespace(is_connected=connected.__eq__)  # type: ignore[assignment]
    first = [named, connected, again, *(peer() for _ in range(KNOWN_PEERS - 3))]
    later = [peer() for _ in range(KNOWN_PEERS // 2)]
    for each in (*first, again, *later):
        thin.learn(each, (address(each),))
    assert thin._known.keys() == {named, connected, again, *first[3 + len(later) :], *later}


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
