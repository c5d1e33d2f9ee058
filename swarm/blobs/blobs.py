"""Blobs between peers: put here, announced in the directory, fetched from several holders at once.

Every chunk is checked against the digest by itself, so a holder can waste a little of our time and nothing else.

    protocol /fusion/blob/1, asked by the fetching side on a stream of its own per holder
        index {digest}          -> index {}, payload: the canonical index
                                   (of a job that is not open, here and below also {job, grants}: why we may read it)
        get {digest, chunks}    -> chunk {index}, payload, for each chunk in the order asked; between them `wait` {},
                                   every few seconds, while the upload budget lets nothing through
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from fusion.swarm.authority.access import Access
from fusion.swarm.blobs.announce import BlobAnnouncer
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.fetch import Fetch, Fetched, ask_index, decoded
from fusion.swarm.blobs.partial_blob import PartialBlob
from fusion.swarm.blobs.serve import BlobServer
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.blobs.upload_budget import UploadBudget
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import Digest, JobId, is_digest
from fusion.swarm.errors import BlobError, SwarmError
from fusion.swarm.protocol import BLOB
from fusion.swarm.transport import PeerId, Transport

logger = logging.getLogger(__name__)

HINT_SECONDS = 1.0  # for those who probably have a blob, before the directory is asked for others


class Blobs:
    """Content-addressed bytes of the swarm. `async with Blobs(...)` serves what the store holds and keeps announcing
    it; without it `put` and `fetch` work all the same."""

    def __init__(
        self,
        store: BlobStore,
        transport: Transport,
        directory: Directory,
        config: BlobConfig | None = None,
        budget: UploadBudget | None = None,
        access: Access | None = None,
    ) -> None:
        """`budget`: for tests that drive its clock; by default it is made from the config. `access`: who may read what, as
        far as a job says."""
        self._access = access or Access()
        self.store = store
        self._transport = transport
        self._directory = directory
        self._config = config or BlobConfig()
        self._fetches: dict[Digest, asyncio.Task[Path]] = {}
        self._fetched_for: dict[Digest, JobId | None] = {}
        self._waiting: dict[Digest, int] = {}
        self._under_way: dict[Digest, Fetch] = {}
        self._server = BlobServer(store, self._access, self._config, budget)
        self._announcer = BlobAnnouncer(store, directory, transport.peer_id, self._config)

    async def __aenter__(self) -> Self:
        await self._transport.serve(BLOB.name, self._server.attend)
        self._announcer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop announcing and every fetch; what came of them stays for the next time. Idempotent."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        if fetches:
            await asyncio.wait(fetches)
        await self._announcer.aclose()
        await self._server.aclose()

    def has(self, digest: Digest) -> bool:
        return self.store.has(digest)

    def hold(self, holder: object, digests: Iterable[Digest]) -> None:
        """`holder` needs these blobs for as long as it exists, or says otherwise: they are not deleted to make room."""
        if self.store.needs is not None:
            self.store.needs.hold(holder, digests)

    async def put(self, data: bytes | Path, job: JobId | None = None) -> Digest:
        """Keep the bytes, or a copy of the file, as a part of `job`, if of one; the swarm is told in the background that we
        hold them. Raises QuotaExceeded, BlobError."""
        digest = await asyncio.to_thread(self.store.put, data, self._closed(job))
        self._announcer.soon(digest)
        return digest

    async def put_pieces(
        self, size: int, pieces: Iterable[bytes | memoryview], job: JobId | None = None
    ) -> Digest:
        """As `put`, of `size` bytes that are made, on a thread, while they are written: room is asked for before the first.
        Raises BlobError, too, if there are more or fewer."""
        digest = await asyncio.to_thread(self.store.put_pieces, size, pieces, self._closed(job))
        self._announcer.soon(digest)
        return digest

    async def drop(self, digest: Digest) -> bool:
        """Delete our copy, unless somebody here needs it: a stranger can name any blob as part of a job. Whether it is gone; the
        announcement runs out by itself."""
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
        """The file with the blob's bytes (read-only), fetched from its holders unless it is here already. `hints` are
        peers likely to hold it; `job` is that whose part it is. Afterwards we are a holder too.

        Raises BlobError if nobody (any longer) has it or it is larger than `max_bytes`, QuotaExceeded if it does
        not fit.
        """
        if not is_digest(digest):
            raise BlobError(f"not the digest of a blob: {str(digest)[:80]!r}")
        fetched = self.store.usable(digest, self._closed(job))
        while not fetched:
            try:
                await self._joined(digest, hints, max_bytes, self._closed(job))
                fetched = True
            except TooLarge as error:
                # Else it is so by the limit of another, who asked for it first.
                if max_bytes is not None and error.size_bytes > max_bytes:
                    raise TooLarge(digest, error.size_bytes, max_bytes) from None
        size = self.store.size(digest)
        if max_bytes is not None and size > max_bytes:
            raise TooLarge(digest, size, max_bytes)
        return self.store.path(digest)

    def progress(self, digest: Digest) -> Fetched:
        """How far the blob is on its way here, what an earlier attempt left included."""
        fetch = self._under_way.get(digest)
        if fetch is not None:
            return fetch.progress
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
        """The job, if not everybody may read what is part of it."""
        law = None if job is None else self._access.law(job)
        return None if law is None or law.admission.kind == "open" else job

    def _leave(self, job: JobId | None) -> dict[str, object]:
        """What a request says of why we may read a blob of the job."""
        return {} if job is None else {"job": job, "grants": list(self._access.chain(job))}

    async def _joined(
        self, digest: Digest, hints: Sequence[PeerId], max_bytes: int | None, job: JobId | None
    ) -> None:
        """Wait for the one fetch of the blob for that job, started if there is none, stopped when nobody waits any longer."""
        while True:
            task = self._fetches.get(digest)
            if task is None or (self._fetched_for.get(digest) == job and not task.cancelling()):
                break
            # Who may read it is the other job's to say; and one that those who waited for it have left comes to nothing.
            await asyncio.wait([task])
            if self.store.usable(digest, job):
                return
        if task is None:
            task = asyncio.create_task(self._fetch(digest, hints, max_bytes, job), name=f"fetch {digest[:8]}")
            self._fetches[digest], self._fetched_for[digest] = task, job
            task.add_done_callback(lambda _: (self._fetches.pop(digest), self._fetched_for.pop(digest)))
        self._waiting[digest] = self._waiting.get(digest, 0) + 1
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # we are being closed
                raise BlobError(f"fetching blob {digest[:8]} was stopped") from None
            raise
        finally:
            self._waiting[digest] -= 1
            if not self._waiting[digest]:
                del self._waiting[digest]
                task.cancel()

    async def _fetch(
        self, digest: Digest, hints: Sequence[PeerId], max_bytes: int | None, job: JobId | None
    ) -> Path:
        fetch: Fetch | None = None
        shunned: set[PeerId] = set()  # sent bytes that do not match the digest
        fruitless = 0
        reason = "nobody announces it"
        likely = [peer for peer in hints if peer != self._transport.peer_id]
        lookup = self._look_up(digest, hints)
        try:
            while True:
                left = len(fetch.partial.missing) if fetch is not None else None
                # A dial is quicker than the directory: at first only those are asked who probably have the blob.
                first, likely = likely[: self._config.holders], []
                holders = first or [peer for peer in await lookup if peer not in shunned]
                try:
                    if fetch is None and holders:
                        patience = min(HINT_SECONDS, self._config.chunk_seconds)
                        fetch = await self._begin(
                            digest, holders, patience if first else self._config.chunk_seconds, max_bytes, job
                        )
                    if fetch is not None:
                        self._under_way[digest] = fetch
                        await fetch.round(holders, shunned, lookup, self._config.holders)
                        reason = fetch.trouble or reason
                except TooLarge:
                    raise
                except (BlobError, TimeoutError) as error:
                    reason = str(error)
                if fetch is not None and not fetch.partial.missing:
                    break
                if first and fetch is None:
                    continue  # with those whom the directory knows
                fruitless = 0 if fetch is not None and len(fetch.partial.missing) != left else fruitless + 1
                if fruitless >= self._config.attempts:
                    raise BlobError(f"cannot fetch blob {digest[:8]}: {reason}")
                await asyncio.sleep(self._config.retry_seconds)
                lookup = self._look_up(digest, hints)
        finally:
            lookup.cancel()
            self._under_way.pop(digest, None)
            if fetch is not None:
                await asyncio.shield(asyncio.to_thread(fetch.partial.close))
        self._announcer.soon(digest)
        return self.store.path(digest)

    async def _begin(
        self,
        digest: Digest,
        holders: Sequence[PeerId],
        patience_seconds: float,
        max_bytes: int | None,
        job: JobId | None,
    ) -> Fetch:
        """Raises BlobError where none of the holders has the blob, TooLarge, QuotaExceeded."""
        request = {"digest": digest, **self._leave(job)}
        giver, data = await ask_index(self._transport, holders, request, patience_seconds)
        size = (await decoded(data, digest)).size_bytes
        if max_bytes is not None and size > max_bytes:
            raise TooLarge(digest, size, max_bytes)
        partial = await self._begun(data, digest, job)
        return Fetch(self._transport, partial, self._config.chunk_seconds, request, giver)

    async def _begun(self, index: bytes, digest: Digest, job: JobId | None) -> PartialBlob:
        beginning = asyncio.create_task(asyncio.to_thread(self.store.begin, index, digest, job))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # Its thread goes on, and has a file and a part of the quota in the end: nobody else would give these back.
            await asyncio.wait([beginning])
            if not beginning.cancelled() and beginning.exception() is None:
                await asyncio.shield(asyncio.to_thread(beginning.result().close))
            raise

    def _look_up(self, digest: Digest, hints: Sequence[PeerId]) -> asyncio.Task[list[PeerId]]:
        return asyncio.create_task(self._holders(digest, hints), name=f"holders of {digest[:8]}")

    async def _holders(self, digest: Digest, hints: Sequence[PeerId]) -> list[PeerId]:
        try:
            records = await self._directory.providers(digest)
        except SwarmError as error:
            logger.debug("providers of blob %.8s not read: %s", digest, error)
            records = ()
        peers = dict.fromkeys([*hints, *(record.peer for record in records)])
        return [peer for peer in peers if peer != self._transport.peer_id]


class JobBlobs:
    """Blobs as a part of one job: who takes part in it may read them."""

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


class TooLarge(BlobError):
    """The blob is larger than the caller allows: trying again cannot help."""

    def __init__(self, digest: Digest, size_bytes: int, limit: int) -> None:
        super().__init__(f"blob {digest[:8]} has {size_bytes} bytes; at most {limit} allowed")
        self.size_bytes = size_bytes
