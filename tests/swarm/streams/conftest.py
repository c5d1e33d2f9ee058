from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.p2p_pair import Ends, opened


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path leaves room for UNIX sockets, as pytest's own often does not."""
    with tempfile.TemporaryDirectory(prefix="p2p-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    with opened() as pair:
        yield pair
