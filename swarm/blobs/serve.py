"""Serves the store's blobs to those who may read them, a share for each reader.

Memory is bounded: a chunk is read from disk only once there is room for it, and keeps that until its reader has taken it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from cachetools import TTLCache

from fusion.swarm.authority.access import Access, chain_of
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.index import CHUNK_BYTES, HASH_BYTES
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.blobs.unread import Slot, UnreadChunks
from fusion.swarm.blobs.upload_budget import UploadBudget
from fusion.swarm.directory.records import Digest, JobId, is_digest
from fusion.swarm.errors import FrameError, RecordError, StreamClosed, SwarmError
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.transport import PeerId, Stream

MAX_CHUNKS = 64  # in one request
UNREAD_CHUNKS = 8  # chunks in memory, not taken yet, of one reader over all its streams
ALL_UNREAD_CHUNKS = 128  # and of all readers together
SUBNET_READERS = 4  # in a public network's share, and slow ones until it is shunned
SHUNNED_SECONDS = 60.0  # for which a reader that took nothing is refused
WAIT_SECONDS = 5.0  # between two `wait` frames to a reader that waits for the upload budget

T = TypeVar("T")


class BlobServer:
    """The serving side of the blob protocol (`fusion.swarm.blobs.blobs`). `budget`: the rate limit of uploads."""

    def __init__(
        self, store: BlobStore, access: Access, config: BlobConfig, budget: UploadBudget | None = None
    ) -> None:
        self._store = store
        self._access = access
        self._config = config
        self._uploads = asyncio.Semaphore(config.uploads)
        self._unread = UnreadChunks(ALL_UNREAD_CHUNKS, UNREAD_CHUNKS, SUBNET_READERS * UNREAD_CHUNKS)
        self._slow: TTLCache[PeerId, None] = TTLCache(1024, SHUNNED_SECONDS)
        self._slow_networks: TTLCache[str, int] = TTLCache(1024, SHUNNED_SECONDS)  # slow readers of each
        self._budget = budget or UploadBudget(config.upload_bytes_per_second)

    async def aclose(self) -> None:
        await self._budget.aclose()

    async def serve_stream(self, stream: Stream) -> None:
        """Answer one reader until it closes the stream. Raises FrameError for an invalid request."""
        while True:
            try:
                frame = await stream.receive()
            except StreamClosed:
                return
            digest = frame.header.get("digest")
            if not is_digest(digest):
                raise FrameError("a blob request without a digest")
            digest = Digest(str(digest))
            if not self._store.has(digest):  # a valid request: answered, not logged
                await self._send(stream, "error", {"message": f"blob {digest:.8} is not here"})
                continue
            refused = await self._refusal(digest, stream.remote, frame.header)
            if refused is not None:
                refusal = {
                    "message": f"blob {digest:.8}: {refused}",
                    "closed": str(frame.header.get("job", "")),
                }
                await self._send(stream, "error", refusal)
                continue
            kind, chunks = frame.kind, frame.header.get("chunks")
            del frame  # free its memory while the reader takes its chunks
            match kind, chunks:
                case "index", _:
                    await self._send_index(stream, digest)
                case "get", list() as chunks if len(chunks) <= MAX_CHUNKS:
                    await self._send_chunks(stream, digest, chunks)
                case _:
                    raise FrameError("a blob request that is not one")

    async def _refusal(self, digest: Digest, reader: PeerId, header: Mapping[str, object]) -> str | None:
        """Why that reader may not have the blob; None where it may. The request has to name the job: otherwise a reader that fetches
        it for another job would not learn that the blob is not for everybody."""
        jobs = self._store.jobs_of(digest)
        if jobs is None:
            return None
        job = header.get("job")
        if job not in jobs:
            return "it is a part of a job that is not open to all"
        try:
            chain = chain_of(header.get("grants"))
        except RecordError as error:
            return str(error)
        return await self._access.strict_refusal(JobId(str(job)), reader, "read", chain)

    async def _send_chunks(self, stream: Stream, digest: Digest, chunks: list[object]) -> None:
        for chunk in chunks:
            if type(chunk) is not int:
                raise FrameError("a blob request that is not one")
            self._check_not_shunned(stream)
            await self._send_chunk(stream, digest, chunk)

    def _check_not_shunned(self, stream: Stream) -> None:
        network = _network(stream)
        slow = network is not None and self._slow_networks.get(network, 0) >= SUBNET_READERS
        if slow or stream.remote in self._slow:
            raise FrameError("whoever took nothing of a chunk is left alone for a while")

    async def _send_index(self, stream: Stream, digest: Digest) -> None:
        """Sends no `wait` frames meanwhile: readers of an index do not expect them."""
        self._check_not_shunned(stream)
        size = HASH_BYTES * -(-self._store.size(digest) // CHUNK_BYTES)
        slot = Slot(stream.remote, _network(stream), 1 + size // CHUNK_BYTES)
        async with self._slot_in_use(slot):
            await self._unread.acquire(slot)
            data = await asyncio.to_thread(self._store.index, digest)
            await self._budget.spend(stream.remote, len(data), first=True)
            slot.since = asyncio.get_running_loop().time()
            await self._send(stream, "index", {}, [data])

    async def _send_chunk(self, stream: Stream, digest: Digest, chunk: int) -> None:
        """Read the chunk once there is room for it, and keep that until the reader has taken it."""
        reader = stream.remote
        if self._budget.limited:
            size = min(CHUNK_BYTES, self._store.size(digest) - chunk * CHUNK_BYTES)
            await self._while_waiting(stream, self._budget.spend(reader, max(0, size)))
        slot = Slot(reader, _network(stream))
        async with self._slot_in_use(slot):
            await self._while_waiting(stream, self._unread.acquire(slot))
            async with self._uploads:
                data = await asyncio.to_thread(self._store.read_chunk, digest, chunk)
            slot.since = asyncio.get_running_loop().time()
            await self._send(stream, "chunk", {"index": chunk}, [data])

    @asynccontextmanager
    async def _slot_in_use(self, slot: Slot) -> AsyncIterator[None]:
        """Release the slot at the end of the block. Raises FrameError where it is taken away for others meanwhile."""
        try:
            async with asyncio.timeout(None) as slot.until:
                yield
        except TimeoutError:
            raise FrameError("gave way to others: too little of it was taken") from None
        finally:
            self._unread.release(slot)

    async def _send(
        self,
        stream: Stream,
        kind: str,
        header: Mapping[str, Any] | None = None,
        payload: Sequence[bytes] = (),
    ) -> None:
        """Raises FrameError for a reader that does not take the frame in time."""
        try:
            async with asyncio.timeout(self._config.chunk_seconds):
                await stream.send(kind, header, payload)
        except TimeoutError:
            network = _network(stream)
            if network is not None and stream.remote not in self._slow:
                self._slow_networks[network] = self._slow_networks.get(network, 0) + 1
            self._slow[stream.remote] = None
            raise FrameError(f"nothing of a {kind} was taken for {self._config.chunk_seconds:g} s") from None

    async def _while_waiting(self, stream: Stream, turn: Coroutine[Any, Any, T]) -> T:
        """Await `turn`, sending `wait` frames meanwhile: readers drop a silent holder."""
        waits = asyncio.create_task(self._send_waits(stream))
        try:
            return await turn
        finally:
            waits.cancel()
            await asyncio.wait([waits])

    async def _send_waits(self, stream: Stream) -> None:
        with suppress(SwarmError):  # a reader that is gone is noticed at the next send
            while True:
                await asyncio.sleep(WAIT_SECONDS)
                await self._send(stream, "wait")


def _network(stream: Stream) -> str | None:
    return stream.subnet if isinstance(stream, FrameStream) else None
