"""Pulls the chunks of one blob from its holders: which chunk is requested from which holder."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.swarm.blobs.index import BlobIndex, decode_index
from fusion.swarm.blobs.partial_blob import BadChunk, PartialBlob
from fusion.swarm.cancelling import cancel_all
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import BlobError, FrameError, NotAdmitted, QuotaExceeded, SwarmError
from fusion.swarm.protocol import BLOB
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, call, checked

logger = logging.getLogger(__name__)

HEDGE_SECONDS = 0.3  # of silence before the index is requested from further holders, too
CROWD_SECONDS = 3.0  # of silence before a holder is dropped, where there are more than MOST_AT_ONCE
# Without a chunk from any holder, after which those in use no longer count against the limit.
SILENT_SECONDS = 10.0
MOST_AT_ONCE = 64  # holders in use, silent ones included
ALONE_CHUNKS = 16
WINDOW = 16  # chunks requested from one holder and not yet received
LARGE_INDEX_BYTES = 64 << 10  # decoded in a thread: one of 8 MiB takes a tenth of a second
PATIENCE = 100  # `wait` frames that a holder may send for one chunk


async def request_index(
    transport: Transport, holders: Sequence[PeerId], request: Mapping[str, Any], timeout_seconds: float
) -> tuple[PeerId, bytes]:
    """The holder that answers first, and the index of the blob that `request` names. Hedged: whenever the requested ones are silent for
    HEDGE_SECONDS or have none, twice as many others are tried, since anybody may announce any blob and a thousand liars must
    not cost a timeout each. Raises BlobError if none has it."""
    trouble, refused = "nobody announces it", False
    waiting: dict[asyncio.Task[bytes], PeerId] = {}
    left, more = deque(holders), 1
    if len(left) > MOST_AT_ONCE:
        timeout_seconds = min(timeout_seconds, CROWD_SECONDS)
    try:
        while left or waiting:
            for _ in range(min(more, len(left), MOST_AT_ONCE - len(waiting))):
                holder = left.popleft()
                task = asyncio.create_task(_index_from(transport, holder, request, timeout_seconds))
                waiting[task] = holder
            more = min(2 * more, MOST_AT_ONCE)
            done, _ = await asyncio.wait(
                waiting, timeout=HEDGE_SECONDS if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                holder, error = waiting.pop(task), task.exception()
                if error is None:
                    return holder, task.result()
                if not isinstance(error, BlobError):
                    raise error
                if not refused:  # a refusal is the most useful reason
                    trouble, refused = str(error), isinstance(error, BlobRefused)
                logger.debug("no index of blob %.8s: %s", request["digest"], trouble)
    finally:
        await cancel_all(waiting)
    raise BlobError(trouble)


async def decoded(data: bytes | memoryview, digest: Digest) -> BlobIndex:
    """As `decode_index`; a large one is decoded in a thread, so as not to block the event loop."""
    if len(data) <= LARGE_INDEX_BYTES:
        return decode_index(data, digest)
    return await asyncio.to_thread(decode_index, data, digest)


async def _index_from(
    transport: Transport, holder: PeerId, request: Mapping[str, Any], timeout_seconds: float
) -> bytes:
    try:
        async with asyncio.timeout(timeout_seconds):
            frame = await call(transport, holder, BLOB.name, "index", request)
        await decoded(frame.payload, request["digest"])
        return bytes(frame.payload)
    except TimeoutError:
        raise BlobError(f"{holder} did not answer") from None
    except NotAdmitted as error:
        raise BlobRefused(str(error)) from None
    except SwarmError as error:
        raise BlobError(str(error)) from None


@dataclass(frozen=True)
class Fetched:
    """The progress of a fetch; 0 of 0 bytes before its index is here. `trouble`: the last holder's error."""

    bytes: int
    of_bytes: int
    trouble: str = ""


class BlobRefused(BlobError):
    """A holder refuses us the blob."""


class Fetch:
    """Pulls the missing chunks of one blob from several holders at once.

    A chunk is requested from one holder; when no other chunks are left, from a second one as well, so that the slowest holder
    does not decide when the blob is complete.
    """

    def __init__(
        self,
        transport: Transport,
        partial: PartialBlob,
        chunk_seconds: float,
        request: Mapping[str, Any],
        giver: PeerId,
    ) -> None:
        """`request`: names the blob, with the grants that admit us; `giver`: the holder of the index. The only one that has proven to
        have a part of the blob, it is tried first."""
        self._request = request
        self._giver = giver
        self.partial = partial
        self.trouble = ""  # the last holder's error
        self._transport = transport
        self._chunk_seconds = chunk_seconds
        self._requested: dict[
            int, set[PeerId]
        ] = {}  # chunk -> the holders it is requested from in this round
        self._started_at: dict[PeerId, float] = {}  # when each holder was first used
        self._received_at = float("-inf")  # when the last chunk was received
        self._late = 0  # holders that were too slow with a chunk in this round
        # For so many chunks only the giver is used: our link may be too slow for several holders, so that all time out.
        self._alone = 0
        self._queue: deque[int] = deque()
        self._changed = asyncio.Event()

    @property
    def progress(self) -> Fetched:
        index = self.partial.index
        missing = sum(map(index.chunk_size, list(self.partial.missing)))
        return Fetched(index.size_bytes - missing, index.size_bytes, self.trouble)

    async def round(
        self, holders: Sequence[PeerId], shunned: set[PeerId], more: asyncio.Future[list[PeerId]], limit: int
    ) -> None:
        """Pull from these holders, and from `more` once they are known, at most `limit` at once that are not silent (anybody may announce
        a blob), until all chunks are here or all holders have failed. A holder whose bytes do not match is added to `shunned`.
        Raises QuotaExceeded."""
        left, alone = len(self.partial.missing), self._alone
        await self._round(holders, shunned, more, limit)
        if len(self.partial.missing) == left:
            self._alone = ALONE_CHUNKS if self._late > 1 and not alone else 0

    async def _round(
        self, holders: Sequence[PeerId], shunned: set[PeerId], more: asyncio.Future[list[PeerId]], limit: int
    ) -> None:
        self._late = 0
        self._queue = deque(sorted(self.partial.missing))
        self._requested = {}
        workers: dict[PeerId, asyncio.Task[None]] = {}
        waiting: set[asyncio.Future[Any]] = {more}
        try:
            while waiting and self.partial.missing:
                known = dict.fromkeys([self._giver, *holders, *(more.result() if more.done() else ())])
                unused = [peer for peer in known if peer not in workers and peer not in shunned]
                running = [peer for peer, task in workers.items() if not task.done()]
                busy = len(running) - sum(map(self._silent, running))
                at_once = 1 if self._alone else limit
                room = at_once - busy if busy else max(at_once, len(running))
                for peer in unused[: max(0, min(room, MOST_AT_ONCE - len(running)))]:
                    self._started_at[peer] = asyncio.get_running_loop().time()
                    workers[peer] = asyncio.create_task(self._pull(peer, shunned))
                    waiting.add(workers[peer])
                done, waiting = await asyncio.wait(
                    waiting, timeout=SILENT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {more}:
                    task.result()
                if not done:  # chunks of silent holders may now be requested from others
                    self._changed.set()
        finally:
            await cancel_all(workers.values())

    def _silent(self, holder: PeerId) -> bool:
        """Whether no holder has sent a chunk for SILENT_SECONDS: while chunks arrive, a holder without any may share a slow link."""
        if self._alone:
            return False
        since = max(self._started_at[holder], self._received_at)
        return asyncio.get_running_loop().time() - since >= SILENT_SECONDS

    async def _pull(self, holder: PeerId, shunned: set[PeerId]) -> None:
        outstanding: deque[int] = deque()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._chunk_seconds):
                stream = await self._transport.open(holder, BLOB.name)
            while self.partial.missing:
                await self._request_chunks(holder, stream, outstanding)
                if outstanding:
                    try:
                        frame = await self._receive_chunk(stream)
                    except TimeoutError:
                        self._late, self._alone = self._late + 1, 0
                        raise
                    await self._accept(frame, outstanding, holder, shunned)
                else:
                    self._changed.clear()
                    await self._changed.wait()
        except QuotaExceeded:
            raise
        except (SwarmError, TimeoutError) as error:
            self.trouble = str(error) or f"{holder} sent nothing for {self._chunk_seconds:g} s"
            logger.debug("blob %.8s: %s left: %s", self.partial.index.digest, holder, self.trouble)
        finally:
            self._queue.extendleft(
                reversed([chunk for chunk in outstanding if chunk in self.partial.missing])
            )
            for chunk in outstanding:
                self._requested[chunk].discard(holder)
            self._changed.set()
            if stream is not None:
                stream.abort()

    async def _receive_chunk(self, stream: Stream) -> Frame:
        """The next frame after any `wait` frames, which a holder sends while its upload budget is used up."""
        for _ in range(PATIENCE):
            async with asyncio.timeout(self._chunk_seconds):
                frame = checked(await stream.receive())
            if frame.kind != "wait":
                return frame
            self._alone = 0  # our link is not the bottleneck
        raise FrameError(f"{stream.remote} keeps us waiting")

    async def _request_chunks(self, holder: PeerId, stream: Stream, outstanding: deque[int]) -> None:
        if len(outstanding) > WINDOW // 2:
            return
        chunks = self._take(WINDOW - len(outstanding), outstanding)
        if chunks:
            outstanding.extend(chunks)
            for chunk in chunks:
                self._requested.setdefault(chunk, set()).add(holder)
            await stream.send("get", {**self._request, "chunks": chunks})

    def _take(self, count: int, outstanding: deque[int]) -> list[int]:
        chunks: list[int] = []
        while self._queue and len(chunks) < count:
            chunk = self._queue.popleft()
            if chunk in self.partial.missing and chunk not in outstanding and chunk not in chunks:
                chunks.append(chunk)
        if not chunks and not outstanding:  # help with chunks requested from another holder
            late = [c for c in sorted(self.partial.missing, reverse=True) if self._active_requests(c) < 2]
            chunks = late[: max(1, count // 4)]
        return chunks

    def _active_requests(self, chunk: int) -> int:
        """How many holders that are not silent it is requested from."""
        return sum(not self._silent(holder) for holder in self._requested.get(chunk, ()))

    async def _accept(
        self, frame: Frame, outstanding: deque[int], holder: PeerId, shunned: set[PeerId]
    ) -> None:
        chunk = outstanding[0]
        if frame.kind != "chunk" or frame.header.get("index") != chunk:
            raise FrameError(f"{holder} sent something else than the chunk that it was asked for")
        try:
            await asyncio.to_thread(self.partial.write, chunk, frame.payload)
        except BadChunk:
            shunned.add(holder)
            raise
        outstanding.popleft()
        self._received_at = asyncio.get_running_loop().time()
        self._alone = max(0, self._alone - 1)
        self._requested[chunk].discard(holder)
        if not self.partial.missing:
            self._changed.set()
