"""Blobs between peers: put here, announced in the directory, fetched from several holders at once.

Every chunk is verified against the digest by itself, so a bad holder can only waste a little of our time.

    protocol /fusion/blob/1, requests of the fetching side, on one stream per holder
        index {digest}          -> index {}, payload: the canonical index
                                   (of a job that is not open, here and below also {job, grants}, which admit us)
        get {digest, chunks}    -> chunk {index}, payload, for each chunk in the order requested; between them `wait` {},
                                   every few seconds, while the upload budget is used up
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fusion.swarm.authority.access import Access
from fusion.swarm.blobs.announce import BlobAnnouncer
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.download import Download, TooLarge
from fusion.swarm.blobs.fetch import Fetched
from fusion.swarm.blobs.serve import BlobServer
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.blobs.upload_budget import UploadBudget
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import Digest, JobId, is_digest
from fusion.swarm.errors import BlobError
from fusion.swarm.protocol import BLOB
from fusion.swarm.transport import PeerId, Transport


@dataclass(eq=False)
class _Running:
    download: Download
    task: asyncio.Task[None]
    waiting: int = 0  # callers


class Blobs:
    """The swarm's blobs. `async with Blobs(...)` serves the store's blobs and announces them; without it only `put` and `fetch`
    work."""

    def __init__(
        self,
        store: BlobStore,
        transport: Transport,
        directory: Directory,
        config: BlobConfig | None = None,
        budget: UploadBudget | None = None,
        access: Access | None = None,
    ) -> None:
        """`budget`: for tests that drive its clock; by default made from the config. `access`: who may read the blobs of a job."""
        self._access = access or Access()
        self.store = store
        self._transport = transport
        self._directory = directory
        self._config = config or BlobConfig()
        self._running: dict[Digest, _Running] = {}
        self._server = BlobServer(store, self._access, self._config, budget)
        self._announcer = BlobAnnouncer(store, directory, transport.peer_id, self._config)

    async def __aenter__(self) -> Self:
        await self._transport.serve(BLOB.name, self._server.serve_stream)
        self._announcer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop announcing and every fetch; fetched chunks are kept for the next attempt. Idempotent."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._announcer.aclose()
        await self._server.aclose()

    def has(self, digest: Digest) -> bool:
        return self.store.has(digest)

    def hold(self, holder: object, digests: Iterable[Digest]) -> None:
        """`holder` needs these blobs until it is deleted or calls this again: they are not evicted meanwhile."""
        if self.store.needs is not None:
            self.store.needs.hold(holder, digests)

    async def put(self, data: bytes | Path, job: JobId | None = None) -> Digest:
        """Store the bytes, or a copy of the file, as a part of `job` if given, and announce them in the background. Raises
        QuotaExceeded, BlobError."""
        digest = await asyncio.to_thread(self.store.put, data, self._closed(job))
        self._announcer.soon(digest)
        return digest

    async def put_pieces(
        self, size: int, pieces: Iterable[bytes | memoryview], job: JobId | None = None
    ) -> Digest:
        """As `put`, for `size` bytes that `pieces` yields, on a thread, as they are written; their room is reserved before. Raises
        BlobError, too, if there are more or fewer."""
        digest = await asyncio.to_thread(self.store.put_pieces, size, pieces, self._closed(job))
        self._announcer.soon(digest)
        return digest

    async def drop(self, digest: Digest) -> bool:
        """Delete our copy, unless it is held here (`hold`): a stranger can name any blob as part of a job. Whether it was deleted;
        its announcement expires by itself."""
        if self.store.needs is not None and digest in self.store.needs.all():
            return False
        await asyncio.to_thread(self.store.delete, digest)
        return True

    async def fetch(
        self,
        digest: Digest,
        hints: Sequence[PeerId] = (),
        *,
        max_bytes: int | None = None,
        job: JobId | None = None,
    ) -> Path:
        """The file with the blob's bytes (read-only), fetched from its holders unless it is here already. `hints`: peers likely
        to hold it; `job`: the job that it is a part of. Afterwards we are a holder, too.

        Raises BlobError if no holder gives it or it is larger than `max_bytes`, QuotaExceeded if it does not fit.
        """
        if not is_digest(digest):
            raise BlobError(f"not the digest of a blob: {str(digest)[:80]!r}")
        fetched = self.store.usable(digest, self._closed(job))
        while not fetched:
            try:
                await self._join_fetch(digest, hints, max_bytes, self._closed(job))
                fetched = True
            except TooLarge as error:
                # Otherwise the limit was another caller's, which started the fetch.
                if max_bytes is not None and error.size_bytes > max_bytes:
                    raise TooLarge(digest, error.size_bytes, max_bytes) from None
        size = self.store.size(digest)
        if max_bytes is not None and size > max_bytes:
            raise TooLarge(digest, size, max_bytes)
        return self.store.path(digest)

    def progress(self, digest: Digest) -> Fetched:
        """How much of the blob is here, with the chunks of earlier attempts."""
        running = self._running.get(digest)
        if running is not None and running.download.fetch is not None:
            return running.download.fetch.progress
        size = self.store.size(digest) if self.store.has(digest) else 0
        return Fetched(size, size)

    async def read(
        self, digest: Digest, max_bytes: int, hints: Sequence[PeerId] = (), job: JobId | None = None
    ) -> bytes:
        """The blob's bytes, fetched if need be. Raises as `fetch`."""
        path = await self.fetch(digest, hints, max_bytes=max_bytes, job=job)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise BlobError(f"cannot read blob {digest[:8]}: {error.strerror or error}") from error

    def of(self, job: JobId) -> JobBlobs:
        """The blobs of one job."""
        return JobBlobs(self, job)

    def _closed(self, job: JobId | None) -> JobId | None:
        """The job, if not everybody may read its blobs."""
        law = None if job is None else self._access.law(job)
        return None if law is None or law.admission.kind == "open" else job

    async def _join_fetch(
        self, digest: Digest, hints: Sequence[PeerId], max_bytes: int | None, job: JobId | None
    ) -> None:
        """Wait for the one fetch of the blob for that job: started if there is none, cancelled once no caller waits for it."""
        while True:
            running = self._running.get(digest)
            if running is None or (running.download.job == job and not running.task.cancelling()):
                break
            # A fetch for another job has other readers; and a cancelled one will not complete.
            await asyncio.wait([running.task])
            if self.store.usable(digest, job):
                return
        if running is None:
            running = self._start(digest, hints, max_bytes, job)
        running.waiting += 1
        try:
            await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.task.cancelled():  # we are being closed
                raise BlobError(f"fetching blob {digest[:8]} was stopped") from None
            raise
        finally:
            running.waiting -= 1
            if not running.waiting:
                running.task.cancel()

    def _start(
        self, digest: Digest, hints: Sequence[PeerId], max_bytes: int | None, job: JobId | None
    ) -> _Running:
        download = Download(
            digest=digest,
            hints=hints,
            max_bytes=max_bytes,
            job=job,
            store=self.store,
            transport=self._transport,
            directory=self._directory,
            config=self._config,
            access=self._access,
        )
        task = asyncio.create_task(self._run(download), name=f"fetch {digest[:8]}")
        task.add_done_callback(lambda _: self._running.pop(digest))
        self._running[digest] = running = _Running(download, task)
        return running

    async def _run(self, download: Download) -> None:
        await download.run()
        self._announcer.soon(download.digest)


class JobBlobs:
    """Blobs as a part of one job: peers that it admits may read them."""

    def __init__(self, blobs: Blobs, job: JobId) -> None:
        self._blobs = blobs
        self._job = job

    async def put(self, data: bytes | Path) -> Digest:
        """As `Blobs.put`."""
        return await self._blobs.put(data, self._job)

    async def put_pieces(self, size: int, pieces: Iterable[bytes | memoryview]) -> Digest:
        """As `Blobs.put_pieces`."""
        return await self._blobs.put_pieces(size, pieces, self._job)

    async def fetch(
        self, digest: Digest, hints: Sequence[PeerId] = (), *, max_bytes: int | None = None
    ) -> Path:
        """As `Blobs.fetch`."""
        return await self._blobs.fetch(digest, hints, max_bytes=max_bytes, job=self._job)

    async def read(self, digest: Digest, max_bytes: int, hints: Sequence[PeerId] = ()) -> bytes:
        """As `Blobs.read`."""
        return await self._blobs.read(digest, max_bytes, hints, self._job)
