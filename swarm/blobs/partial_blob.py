"""A blob being fetched into a store: a file with holes; each chunk is verified before it is written. Blocking, as the store."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Protocol

from fusion.swarm.blobs import disk
from fusion.swarm.blobs.index import CHUNK_BYTES, BlobIndex
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import BlobError, QuotaExceeded

_BINARY = getattr(os, "O_BINARY", 0)  # or Windows would translate line ends


class BadChunk(BlobError):
    """Bytes that do not match the digest: the fault of their sender."""


class Keeper(Protocol):
    """The store that the blob is fetched into."""

    def chunk_written(self, partial: PartialBlob, size: int) -> None: ...
    def end_partial(self, partial: PartialBlob, complete: bool) -> None: ...
    def forget_partial(self, digest: Digest) -> None: ...


class PartialBlob:
    """A blob of which some chunks are here. Thread-safe."""

    def __init__(
        self, keeper: Keeper, index: BlobIndex, path: Path, job: str | None, on_disk: int = 0
    ) -> None:
        self.index = index
        self.job = job
        self.path = path
        self.on_disk = on_disk  # bytes, the keeper's to count
        self._keeper = keeper
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o644)
        self._closed = False
        self._full = False  # a write failed
        self._lock = threading.Lock()
        try:
            old_size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, index.size_bytes)
            # Chunks of an earlier attempt count only if their hashes match.
            self.missing = {
                chunk
                for chunk in range(len(index.hashes))
                if chunk * CHUNK_BYTES >= old_size or not self._holds(chunk)
            }
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, chunk: int, data: bytes | memoryview) -> None:
        """Raises BadChunk for bytes that are not the chunk's, QuotaExceeded for a full disk, BlobError for another write error or a
        blob closed meanwhile."""
        if not self.index.matches(chunk, data):
            raise BadChunk(
                f"chunk {chunk} of blob {self.index.digest[:8]} has other bytes than its digest says"
            )
        view, at = memoryview(data), chunk * CHUNK_BYTES
        # The lock keeps the descriptor open: the number of a closed one may soon be another file's.
        with self._lock, disk.errors(f"cannot write {self.path}"):
            if self._closed:
                raise BlobError(f"blob {self.index.digest[:8]} is no longer being fetched")
            try:
                while view:
                    written = _write_at(self._descriptor, view, at)
                    view, at = view[written:], at + written
            except OSError:
                self._full = True
                raise
            if chunk in self.missing:
                self.missing.discard(chunk)
                self._keeper.chunk_written(self, len(data))

    def close(self) -> None:
        """Move it into the store if every chunk is here, else keep it for a later attempt; delete it if a write failed, so that
        smaller ones have room. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        complete = not self.missing
        try:
            with disk.errors(f"cannot write {self.path}"):
                try:
                    if complete:
                        disk.settle(self._descriptor)
                finally:
                    os.close(self._descriptor)
        except (BlobError, QuotaExceeded):
            complete = False
            raise
        finally:
            self._keeper.end_partial(self, complete)
            if self._full and not complete:
                self._keeper.forget_partial(self.index.digest)

    def _holds(self, chunk: int) -> bool:
        data = _read_at(self._descriptor, CHUNK_BYTES, chunk * CHUNK_BYTES)
        # A hole reads as zeros, which need no hashing.
        return data.count(0) != len(data) and self.index.matches(chunk, data)


# Windows has neither call; there the lock keeps the descriptor to one thread at a time.


def _write_at(descriptor: int, data: memoryview, at: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, at)
    os.lseek(descriptor, at, os.SEEK_SET)
    return os.write(descriptor, data)


def _read_at(descriptor: int, size: int, at: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, at)
    os.lseek(descriptor, at, os.SEEK_SET)
    return os.read(descriptor, size)
