"""Blobs on disk, under a quota. Blocking: the event loop calls it through threads (`fusion.swarm.blobs.blobs`).

ROOT/<digest>            the bytes
ROOT/<digest>.index      its index, written last: a blob with an index is complete
ROOT/<digest>.jobs       the jobs whose members alone may read it, where it is not for everybody; written before the index
ROOT/partial/<digest>    a blob being fetched, with holes, and its index; survives a restart
ROOT/partial/tmp-*       files being written; swept at start
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from fusion.swarm.blobs import disk
from fusion.swarm.blobs.eviction import KEPT_SECONDS, Held, Needs, outdated, to_announce, victims
from fusion.swarm.blobs.index import CHUNK_BYTES, BlobIndex, chunks_of, decode_index, index_of
from fusion.swarm.blobs.partial_blob import PartialBlob
from fusion.swarm.directory.records import Digest, is_digest
from fusion.swarm.errors import BlobError, QuotaExceeded

STAMP_SECONDS = 300.0  # between two updates of the time of use on disk


class BlobStore:
    """Complete blobs by digest. Thread-safe; one store per folder and process."""

    def __init__(
        self,
        root: Path,
        quota_bytes: int,
        needs: Needs | None = None,
        *,
        now: Callable[[], float] = time.time,
        spare_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        """`needs` None: every blob is needed, nothing is evicted. `now`: unix seconds; `spare_bytes`: the bytes that may still be
        written to the disk of a folder. Raises BlobError (one line) if the folder cannot be used, ValueError for a quota
        below zero."""
        if quota_bytes < 0:
            raise ValueError(f"quota_bytes must be at least 0, not {quota_bytes}")
        self.root = root
        self.quota_bytes = quota_bytes
        self.needs = needs
        self._now = now
        self._spare_bytes = spare_bytes or disk.spare_bytes
        self._partial = root / "partial"
        self._lock = threading.Lock()
        self._moving = threading.Lock()  # held while a blob's files are put in place or deleted
        self._held: dict[Digest, Held] = {}
        self._stamped: dict[Digest, float] = {}  # the time of use on disk
        # A cache of `jobs_of`.
        self._jobs: dict[Digest, frozenset[str] | None] = {}
        self._resumable: dict[Digest, int] = {}  # partial blobs that are not being fetched, oldest first
        self._reserved = 0  # of partial blobs being fetched and files being written
        self._on_disk = 0  # of these, on the disk already
        with disk.errors(f"cannot use {root}"):
            self._partial.mkdir(parents=True, exist_ok=True)
            self._scan()

    @property
    def largest_bytes(self) -> int:
        """The most that the data, or a file, of one job may have, to leave room for others'."""
        return self.quota_bytes // 4

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used()

    def held(self) -> dict[Digest, Held]:
        """Every complete blob."""
        with self._lock:
            return dict(self._held)

    def has(self, digest: Digest) -> bool:
        return digest in self._held

    def size(self, digest: Digest) -> int:
        """Raises BlobError for a blob that is not here."""
        with self._lock:
            if digest not in self._held:
                raise BlobError(f"blob {digest[:8]} is not here")
            return self._held[digest].size_bytes

    def path(self, digest: Digest) -> Path:
        """The file with the blob's bytes, which must not be changed; counts as a use. Raises BlobError for a blob that is not
        here."""
        self.size(digest)
        self._use(digest)
        return self.root / digest

    def index(self, digest: Digest) -> bytes:
        self.size(digest)
        with disk.errors(f"cannot read blob {digest[:8]}"):
            return (self.root / f"{digest}.index").read_bytes()

    def read_chunk(self, digest: Digest, chunk: int) -> bytes:
        """Raises BlobError for a chunk that the blob does not have."""
        size = self.size(digest)
        if not 0 <= chunk * CHUNK_BYTES < size:
            raise BlobError(f"blob {digest[:8]} has no chunk {chunk}")
        with disk.errors(f"cannot read blob {digest[:8]}"), (self.root / digest).open("rb") as file:
            file.seek(chunk * CHUNK_BYTES)
            return file.read(CHUNK_BYTES)

    def jobs_of(self, digest: Digest) -> frozenset[str] | None:
        """The jobs whose members alone may read the blob; None for one that is for everybody."""
        if digest not in self._jobs:
            with disk.errors(f"cannot read blob {digest[:8]}"):
                try:
                    self._jobs[digest] = frozenset((self.root / f"{digest}.jobs").read_text().split())
                except FileNotFoundError:
                    self._jobs[digest] = None
        return self._jobs[digest]

    def usable(self, digest: Digest, job: str | None) -> bool:
        """Whether the blob is here and may be used for that job."""
        if not self.has(digest):
            return False
        jobs = self.jobs_of(digest)
        return jobs is None or job in jobs

    def keep_for(self, job: str, digests: Iterable[Digest]) -> None:
        """Restrict these blobs, which are here, to members of `job` (and of jobs named before). Raises BlobError."""
        with disk.errors("cannot write a blob"):
            for digest in digests:
                self._label(digest, job)

    def put(self, source: bytes | Path, job: str | None = None) -> Digest:
        """Store a copy of the bytes, or of the file, restricted to members of `job` if given. Raises QuotaExceeded,
        BlobError."""
        if not isinstance(source, Path):
            return self.put_pieces(len(source), [source], job)
        with disk.errors(f"cannot read {source}"):
            size = source.stat().st_size
        return self.put_pieces(size, _read_pieces(source), job)

    def put_pieces(self, size: int, pieces: Iterable[bytes | memoryview], job: str | None = None) -> Digest:
        """As `put`, for `size` bytes that `pieces` yields as they are written. Raises BlobError if there are more or fewer."""
        self._reserve(size)
        scratch = self._partial / f"tmp-{secrets.token_hex(8)}"
        on_disk = 0

        def count_written(count: int) -> None:
            nonlocal on_disk
            with self._lock:
                on_disk += count
                self._on_disk += count

        try:
            with disk.errors(f"cannot write {scratch}"):
                with scratch.open("wb") as file:
                    index = index_of(_copied(pieces, file, size, count_written))
                    disk.settle(file.fileno())
                return self._adopt(index, scratch, job)
        finally:
            with self._lock:
                self._reserved -= size
                self._on_disk -= on_disk
            scratch.unlink(missing_ok=True)

    def begin(self, index_bytes: bytes, digest: Digest, job: str | None = None) -> PartialBlob:
        """Start or resume a blob's fetch, restricted to members of `job` if given. The caller must `close` the result. Raises
        QuotaExceeded, BlobError."""
        index = decode_index(index_bytes, digest)
        # Another thread that makes room may be deleting its file; from here on it cannot be chosen for that.
        with self._moving, self._lock:
            self._resumable.pop(digest, None)
        try:
            there = min(disk.held_bytes(self._partial / digest), index.size_bytes)
            self._reserve(index.size_bytes, there)
        except QuotaExceeded:
            self.forget_partial(digest)
            raise
        try:
            with disk.errors(f"cannot write blob {digest[:8]}"):
                (self._partial / f"{digest}.index").write_bytes(index_bytes)
                return PartialBlob(self, index, self._partial / digest, job, there)
        except BaseException:
            with self._lock:
                self._reserved -= index.size_bytes
                self._on_disk -= there
            with contextlib.suppress(BlobError, QuotaExceeded):
                self.forget_partial(digest)  # it is not counted any more
            raise

    # --- called by PartialBlob

    def chunk_written(self, partial: PartialBlob, size: int) -> None:
        """Count a chunk, which may have replaced wrong bytes of an earlier attempt."""
        with self._lock:
            more = min(size, partial.index.size_bytes - partial.on_disk)
            partial.on_disk += more
            self._on_disk += more

    def end_partial(self, partial: PartialBlob, complete: bool) -> None:
        """The fetch has ended: move the blob into the store if it is `complete`, else keep it for a resumption."""
        digest, size = partial.index.digest, partial.index.size_bytes
        adopted = False
        try:
            if complete:
                with disk.errors(f"cannot write blob {digest[:8]}"):
                    self._adopt(partial.index, partial.path, partial.job)
                    adopted = True
                    (self._partial / f"{digest}.index").unlink(missing_ok=True)
        finally:
            with self._lock:
                self._reserved -= size
                self._on_disk -= partial.on_disk
                if not adopted:
                    self._resumable[digest] = size

    def forget_partial(self, digest: Digest) -> None:
        """Delete the files of a partial blob."""
        with self._lock:
            self._resumable.pop(digest, None)
        self._unlink_partial(digest)

    def _forget_resumable(self, digest: Digest) -> None:
        """As `forget_partial`, unless its fetch was resumed since it was chosen."""
        with self._moving:
            with self._lock:
                if self._resumable.pop(digest, None) is None:
                    return
            self._unlink_partial(digest)

    def _unlink_partial(self, digest: Digest) -> None:
        with disk.errors(f"cannot delete blob {digest[:8]}"):
            (self._partial / digest).unlink(missing_ok=True)
            (self._partial / f"{digest}.index").unlink(missing_ok=True)

    # --- deletion

    def delete(self, digest: Digest) -> None:
        """Delete a blob, if it is here."""
        with self._moving:
            self._delete(digest)

    def _delete(self, digest: Digest) -> None:
        with self._lock:
            self._held.pop(digest, None)
            self._stamped.pop(digest, None)
            self._jobs.pop(digest, None)
        with disk.errors(f"cannot delete blob {digest[:8]}"):
            (self.root / f"{digest}.index").unlink(missing_ok=True)
            (self.root / digest).unlink(missing_ok=True)
            (self.root / f"{digest}.jobs").unlink(missing_ok=True)

    def _delete_unused(self, chosen: Iterable[Digest], held: Mapping[Digest, Held], needs: Needs) -> None:
        """Delete the chosen ones of the blobs that were `held` then, except those used since: large files take a while."""
        for digest in chosen:
            with self._moving:
                if self._held.get(digest) == held[digest] and digest not in needs.all():
                    self._delete(digest)

    def to_announce(self, limit: int) -> list[Digest]:
        """The blobs to announce, at most `limit`."""
        held = self.held()
        needed = held if self.needs is None else self.needs.all()
        return to_announce(held, needed, limit, self._now())

    def sweep(self) -> None:
        """Delete blobs that were neither needed nor used for KEPT_SECONDS. Raises BlobError."""
        if self.needs is None:
            return
        self._limit_times_to_now()
        if not self.needs.known:
            return
        needed = self.needs.all()
        for digest in needed:
            self._use(digest)
        held = self.held()
        self._delete_unused(outdated(held, needed, self._now()), held, self.needs)
        self._sweep_partial()
        # Blobs stored under a larger quota.
        if (over := self.used_bytes - self.quota_bytes) > 0:
            held = self.held()
            self._delete_unused(victims(held, needed, over, self._now()), held, self.needs)

    def _sweep_partial(self) -> None:
        """Delete partial blobs that were not resumed for KEPT_SECONDS."""
        with self._lock:
            resumable = list(self._resumable)
        for digest in resumable:
            with contextlib.suppress(FileNotFoundError):
                if self._now() - (self._partial / digest).stat().st_mtime >= KEPT_SECONDS:
                    self._forget_resumable(digest)

    def _limit_times_to_now(self) -> None:
        """Limit times of use to now: if our clock was set back since, such a blob would count as fresh for too long."""
        now = self._now()
        with self._lock:
            for digest, blob in self._held.items():
                if blob.used_at > now:
                    self._held[digest] = Held(blob.size_bytes, now)
                    self._stamped.pop(digest, None)

    def _use(self, digest: Digest) -> None:
        """Note a use of the blob, if it is here; at times on disk, too, so that a restart does not lose it."""
        now = self._now()
        with self._lock:
            if digest not in self._held:
                return
            self._held[digest] = Held(self._held[digest].size_bytes, now)
            if now - self._stamped.get(digest, 0.0) < STAMP_SECONDS:
                return
            self._stamped[digest] = now
        with contextlib.suppress(OSError):
            os.utime(self.root / f"{digest}.index", (now, now))

    def _used(self) -> int:
        whole = sum(blob.size_bytes for blob in self._held.values())
        return whole + sum(self._resumable.values()) + self._reserved

    def _adopt(self, index: BlobIndex, data: Path, job: str | None) -> Digest:
        digest = index.digest
        scratch = self._partial / f"tmp-{secrets.token_hex(8)}"
        try:
            # Before the data is moved: a full disk would leave a blob in place that is not counted.
            with scratch.open("wb") as file:
                file.write(index.encode())
                disk.settle(file.fileno())
            with self._moving:
                self._label(digest, job)
                os.replace(data, self.root / digest)
                os.replace(scratch, self.root / f"{digest}.index")
                with self._lock:
                    self._held[digest] = Held(index.size_bytes, self._now())
                self._use(digest)
        finally:
            scratch.unlink(missing_ok=True)
        return digest

    def _label(self, digest: Digest, job: str | None) -> None:
        path = self.root / f"{digest}.jobs"
        if job is None:
            path.unlink(missing_ok=True)
            self._jobs[digest] = None
        else:
            jobs = {*(self.jobs_of(digest) or ()), job}
            scratch = self._partial / f"tmp-{secrets.token_hex(8)}"
            try:
                with scratch.open("w") as file:  # atomically: a half-written list would lock members out
                    file.write("\n".join(sorted(jobs)))
                    file.flush()
                    disk.settle(file.fileno())
                os.replace(scratch, path)
            finally:
                scratch.unlink(missing_ok=True)
            self._jobs[digest] = frozenset(jobs)

    def _reserve(self, size: int, there: int = 0) -> None:
        """Count `size` bytes as used, of which `there` are on the disk. Evicts partial blobs that are not being fetched first, then
        complete ones that are not needed. Raises QuotaExceeded, BlobError."""
        while True:
            with disk.errors("cannot write a blob"):
                spare = self._spare_bytes(self.root)
            with self._lock:
                used = self._used()
                # Reserved bytes will be written: the disk does not count the rest of them yet.
                coming = self._reserved - self._on_disk + size - there
                missing = max(used + size - self.quota_bytes, coming - spare)
                if missing <= 0:
                    self._reserved += size
                    self._on_disk += there
                    return
                half = next(iter(self._resumable), None)
                held = dict(self._held)
            if half is not None:
                self._forget_resumable(half)
                continue
            needs = self.needs
            chosen = [] if needs is None else victims(held, needs.all(), missing, self._now())
            if needs is None or not chosen:
                # The reason may be sent to other peers: no paths of this machine.
                reason = f"{used} of {self.quota_bytes} bytes for blobs are used"
                if coming > spare:
                    reason = f"the disk is full, blobs may take {max(spare, 0)} bytes more of it"
                raise QuotaExceeded(f"a blob of {size} bytes does not fit: {reason}")
            self._delete_unused(chosen, held, needs)

    def _scan(self) -> None:
        """Read the blobs of an earlier process, complete and partial ones; delete inconsistent files of a crash."""
        for file in self._partial.glob("tmp-*"):
            file.unlink(missing_ok=True)
        for file in self.root.glob("*.index"):
            if is_digest(digest := Digest(file.stem)):
                self._scan_held(digest, file)
        for file in self.root.iterdir():  # of a crash between the data and its index
            if is_digest(file.name.removesuffix(".jobs")) and file.stem not in self._held:
                file.unlink(missing_ok=True)
        for file in self._partial.iterdir():
            if is_digest(digest := Digest(file.name.removesuffix(".index"))):
                self._scan_partial(digest, file)

    def _scan_held(self, digest: Digest, index_file: Path) -> None:
        try:
            size = decode_index(index_file.read_bytes(), digest).size_bytes
            used_at = index_file.stat().st_mtime
            whole = (self.root / digest).stat().st_size == size
        except (BlobError, FileNotFoundError):
            whole = False
        if whole:
            self._held[digest] = Held(size, used_at)
        else:
            self.delete(digest)

    def _scan_partial(self, digest: Digest, file: Path) -> None:
        """`file`: the data, or its index."""
        if not (self._partial / digest).exists():
            file.unlink(missing_ok=True)  # of a crash before its data was written, or after that was moved
        elif file.name == digest:
            if self._now() - file.stat().st_mtime >= KEPT_SECONDS:
                self.forget_partial(digest)
            else:
                self._resumable[digest] = file.stat().st_size


def _copied(
    pieces: Iterable[bytes | memoryview], file: BinaryIO, size: int, wrote: Callable[[int], None]
) -> Iterator[memoryview]:
    """The chunks of the concatenated `pieces`, each written to `file` and reported to `wrote`. Raises BlobError unless they are
    `size` bytes in all."""
    left = size
    for chunk in chunks_of(pieces):
        left -= len(chunk)
        if left < 0:
            break
        file.write(chunk)
        wrote(len(chunk))
        yield chunk
    if left:
        raise BlobError(f"a blob of {size} bytes grew or shrank while it was read")


def _read_pieces(path: Path) -> Iterator[bytes]:
    with disk.errors(f"cannot read {path}"):
        file = path.open("rb")
    with file:
        while piece := file.read(CHUNK_BYTES):
            yield piece
