"""For all tests: torch keeps its caches in a folder of this run, and the folder goes with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_cache() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="torch-cache-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    yield
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    shutil.rmtree(folder, ignore_errors=True)
