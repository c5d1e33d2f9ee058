"""Locks between the processes of one test run: side by side, or alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TURNS = "FUSION_PEER_TEST_TURNS"  # in the environment: the folder that the workers of a run share


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Beside all others that use this folder; or `alone`, after those that have begun, and nobody begins meanwhile."""
    with open(folder / "queue", "w") as queue, open(folder / "room", "w") as room:
        # Who waits for the room holds the queue: one that is to be alone is not overtaken for ever.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)
