"""What the disk under a store has, takes and refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fusion.swarm.errors import BlobError, QuotaExceeded

SPARED_BYTES = 1 << 30  # of the disk that are left to others, or a twentieth of it where that is less


def held_bytes(path: Path) -> int:
    """What a file takes of the disk, without its holes; 0 where there is none."""
    with errors(f"cannot use {path}"):
        if not path.exists():
            return 0
        status = path.stat()
        blocks = getattr(status, "st_blocks", None)  # Windows does not tell
        return status.st_size if blocks is None else 512 * int(blocks)


def spare_bytes(folder: Path) -> int:
    """That may still be written to the disk of a folder."""
    usage = shutil.disk_usage(folder)
    return usage.free - min(SPARED_BYTES, usage.total // 20)


def settle(descriptor: int) -> None:
    """Until the disk has what was written."""
    os.fsync(descriptor)


@contextlib.contextmanager
def errors(what: str) -> Iterator[None]:
    """OSError as one line of ours: QuotaExceeded where the disk is full, BlobError otherwise."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuotaExceeded(f"{what}: the disk is full") from error
        raise BlobError(f"{what}: {error.strerror or error}") from error
