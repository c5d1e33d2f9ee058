"""Which plane computes is chosen by name, and only then loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fusion.runtime.peer.plane_choice import TORCH, choose
from fusion.runtime.planes.torch_plane import TorchPlane


def test_a_plane_is_chosen_by_name() -> None:
    assert isinstance(choose(TORCH, "cpu", 1), TorchPlane)


def test_a_plane_that_there_is_not_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^plane: torch or jax, not 'abacus'$"):
        choose("abacus", "cpu", 1)


@pytest.mark.program
def test_nobody_but_the_choice_loads_a_plane() -> None:
    code = "import sys, fusion.runtime.peer.peer; print('fusion.runtime.planes.torch_plane' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
