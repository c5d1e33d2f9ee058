from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path leaves room for UNIX sockets, as pytest's own often does not."""
    with tempfile.TemporaryDirectory(prefix="p2p-") as path:
        yield Path(path)
