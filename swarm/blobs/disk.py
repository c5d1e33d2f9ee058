"""The disk under a store: free space, and its errors as ours."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fusion.swarm.errors import BlobError, QuotaExceeded

SPARED_BYTES = 1 << 30  # of the disk left free, or a twentieth of it where that is less


def held_bytes(path: Path) -> int:
    """The bytes that a file takes on disk, without its holes; 0 where there is none."""
    with errors(f"cannot use {path}"):
        if not path.exists():
            return 0
        status = path.stat()
        blocks = getattr(status, "st_blocks", None)  # not on Windows
        return status.st_size if blocks is None else 512 * int(blocks)


def spare_bytes(folder: Path) -> int:
    """The bytes that may still be written to the disk of a folder."""
    usage = shutil.disk_usage(folder)
    return usage.free - min(SPARED_BYTES, usage.total // 20)


def settle(descriptor: int) -> None:
    """Wait until written bytes are on the disk."""
    os.fsync(descriptor)


@contextlib.contextmanager
def errors(what: str) -> Iterator[None]:
    """Raise an OSError as our error in one line: QuotaExceeded where the disk is full, BlobError otherwise."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuotaExceeded(f"{what}: the disk is full") from error
        raise BlobError(f"{what}: {error.strerror or error}") from error
