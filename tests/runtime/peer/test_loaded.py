"""What a peer that was started has loaded, and who launches a job: what they use, and of the rest nothing before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTED = """
import gc, sys
import fusion.cli.start
from fusion.cli.terminal.fast_imports import lean_imports
with lean_imports():
    import fusion.runtime.peer.peer
    assert not gc.isenabled()
assert gc.isenabled()
import fusion.runtime.serving.http.port.server, fusion.runtime.serving.http.config
from hivemind.dht.node import DHTNode
print(*sys.modules)
import fusion.runtime.launch.launch
print(*sys.modules)
"""
USED = {"torch", "hivemind.p2p", "fusion.runtime.peer.peer"}
NOT_YET = {
    "what answers HTTP": {"fastapi", "starlette", "uvicorn", "jinja2", "prometheus_client", "pydantic"},
    "a plane": {"fusion.runtime.planes.torch_plane", "jax", "jaxlib"},
    "what runs a trainer's own file": {"fusion.runtime.capture.python"},
    "what of hivemind is not used": {"hivemind.averaging", "hivemind.moe", "scipy"},
}
CAPTURES = {
    "fusion.runtime.capture.capture",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "transformers",
}


@pytest.mark.heavy
@pytest.mark.program
def test_a_peer_has_loaded_what_it_uses_and_so_has_who_serves_an_export() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True, timeout=300
    )
    loaded, launching = (set(line.split()) for line in done.stdout.splitlines())
    assert loaded >= USED
    assert {what: found for what, names in NOT_YET.items() if (found := names & loaded)} == {}
    assert not launching & CAPTURES
