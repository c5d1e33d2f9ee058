"""For all tests: torch keeps its caches in a folder of this run, with pytest's others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("torch-cache"))
    yield
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
