"""For all tests: torch keeps its caches in a folder of this run, and the folder goes with it.

Tests of real processes and daemons run on a real clock, and a machine that others use too can stall any of them: such a
test has a second try, at most two tests of a run have one, and what the first try said is shown at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ON_THE_CLOCK = ("cli", "e2e", "swarm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in ON_THE_CLOCK:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session", autouse=True)
def torch_cache() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="torch-cache-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    yield
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    shutil.rmtree(folder, ignore_errors=True)
