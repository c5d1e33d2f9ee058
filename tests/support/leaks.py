"""Checks that a test leaves no process or file. Only processes with the test's mark count, so other programs do not matter."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from support.processes import alive

MARK = "FUSION_PEER_TEST"  # in the environment of everything that a test starts, and so of what that starts
LEFT_SECONDS = 10.0


@dataclass(frozen=True)
class Traces:
    """The mark and the folder in the environment of all processes that a test starts."""

    mark: str
    folder: Path  # for temporary files and sockets

    @property
    def environment(self) -> dict[str, str]:
        return {MARK: self.mark, "TMPDIR": str(self.folder)}

    def processes(self) -> list[psutil.Process]:
        """The living processes that were started with the mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and alive(process):
                    found.append(process)
        return found

    def left(self) -> list[str]:
        """The marked processes, and the contents of the folder."""
        found = os.listdir(self.folder)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        return found


@contextmanager
def nothing_left(seconds: float = LEFT_SECONDS) -> Iterator[Traces]:
    """Raises AssertionError if processes or files of these traces are left so long after the block, and ends and removes them."""
    # Short, and not pytest's: the path of a UNIX socket has room for about a hundred bytes.
    traces = Traces(uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="fe2e-", dir="/tmp")))
    try:
        yield traces
        deadline = time.monotonic() + seconds
        while (left := traces.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"left behind: {left}"
    finally:
        left_behind = traces.processes()
        for process in left_behind:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left_behind, timeout=seconds + 1.0)
        shutil.rmtree(traces.folder, ignore_errors=True)


def surround(stack: AsyncExitStack, environment: dict[str, str]) -> None:
    """Put `environment` into this process's own environment until the stack is left."""
    before = {name: os.environ.get(name) for name in environment}
    folder = tempfile.tempdir

    def restore() -> None:
        tempfile.tempdir = folder
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    stack.callback(restore)
    os.environ.update(environment)
    tempfile.tempdir = environment["TMPDIR"]
