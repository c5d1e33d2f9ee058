"""What tests/conftest.py promises: fast tests start nothing, and some tests have the machine for themselves."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.turns import turn

WAIT_SECONDS = 60.0


def test_a_test_without_a_mark_starts_no_process() -> None:
    with pytest.raises(RuntimeError, match="needs the mark `process`"):
        subprocess.Popen([sys.executable, "-c", ""])
    with pytest.raises(RuntimeError, match="needs the mark `process`"):
        os.fork()
    with pytest.raises(RuntimeError, match="needs the mark `process`"):
        asyncio.run(asyncio.create_subprocess_exec(sys.executable, "-c", ""))


@pytest.mark.process
def test_one_with_the_mark_does() -> None:
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0


def test_a_file_that_cannot_be_imported_fails_the_run_though_it_was_imported_early(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = tmp_path / "test_broken.py"
    path.write_text("import no_module_of_this_name\n\n\ndef test_nothing() -> None: ...\n")
    [ours] = [each for each in request.config.pluginmanager.get_plugins() if hasattr(each, "import_early")]
    ours.import_early(request.session, path)
    with pytest.raises(pytest.Collector.CollectError, match="no_module_of_this_name"):
        pytest.Module.from_parent(request.session, path=path).obj  # noqa: B018


def test_one_that_is_alone_waits_for_the_others_and_is_not_overtaken(tmp_path: Path) -> None:
    order: list[str] = []
    inside, waits = threading.Event(), threading.Event()

    def alone() -> None:
        waits.set()
        with turn(tmp_path, alone=True):
            order.append("alone")

    def late() -> None:
        with turn(tmp_path, alone=False):
            order.append("late")

    with turn(tmp_path, alone=False):
        beside = threading.Thread(target=lambda: _enter(tmp_path, inside))
        beside.start()
        assert inside.wait(WAIT_SECONDS), "two are side by side"
        beside.join(WAIT_SECONDS)
        threads = [threading.Thread(target=alone)]
        threads[0].start()
        waits.wait(WAIT_SECONDS)
        while not _queued(tmp_path):
            time.sleep(0.001)
        threads.append(threading.Thread(target=late))
        threads[1].start()
        order.append("first")
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert order == ["first", "alone", "late"]


def _enter(folder: Path, inside: threading.Event) -> None:
    with turn(folder, alone=False):
        inside.set()


def _queued(folder: Path) -> bool:
    """Whether somebody waits for the room."""
    with open(folder / "queue") as queue:
        try:
            fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
