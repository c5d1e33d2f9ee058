"""One blob on its way here: which holder is asked for which chunk, and what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.swarm.blobs.index import decode_index
from fusion.swarm.blobs.store import BadChunk, PartialBlob
from fusion.swarm.errors import BlobError, FrameError, NotAdmitted, QuotaExceeded, SwarmError
from fusion.swarm.protocol import BLOB
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, call, checked

logger = logging.getLogger(__name__)

HEDGE_SECONDS = 0.3  # of silence before the next holder is asked for an index, too
WINDOW = 16  # chunks asked of one holder and not yet here
PATIENCE = 100  # times that a holder may ask us to wait for one chunk


async def ask_index(
    transport: Transport, holders: Sequence[PeerId], request: Mapping[str, Any], timeout_seconds: float
) -> bytes:
    """The index of the blob that `request` names, from whichever holder answers first; another one is asked whenever those before it are silent
    for a moment. Raises BlobError if none has it."""
    trouble, refused = "nobody announces it", False
    waiting: set[asyncio.Task[bytes]] = set()
    left = deque(holders)
    try:
        while left or waiting:
            if left:
                waiting.add(
                    asyncio.create_task(_index_from(transport, left.popleft(), request, timeout_seconds))
                )
            done, waiting = await asyncio.wait(
                waiting, timeout=HEDGE_SECONDS if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, BlobError):
                    raise error
                if not refused:  # of all reasons the one that somebody can do something about
                    trouble, refused = str(error), isinstance(error, BlobRefused)
                logger.debug("no index of blob %.8s: %s", request["digest"], trouble)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    raise BlobError(trouble)


async def _index_from(
    transport: Transport, holder: PeerId, request: Mapping[str, Any], timeout_seconds: float
) -> bytes:
    try:
        async with asyncio.timeout(timeout_seconds):
            frame = await call(transport, holder, BLOB.name, "index", request)
        decode_index(frame.payload, request["digest"])
        return bytes(frame.payload)
    except TimeoutError:
        raise BlobError(f"{holder} did not answer") from None
    except NotAdmitted as error:
        raise BlobRefused(str(error)) from None
    except SwarmError as error:
        raise BlobError(str(error)) from None


@dataclass(frozen=True)
class Fetched:
    """Of a blob on its way; 0 of 0 bytes where not even its index is here. `trouble`: of the last holder that failed us."""

    bytes: int
    of_bytes: int
    trouble: str = ""


class BlobRefused(BlobError):
    """A holder does not give us the blob."""


class Fetch:
    """Pulls the missing chunks of one blob from several holders at once.

    A chunk is asked of one holder; when nothing else is left to ask for, of a second one as well, so that the slowest
    holder does not decide when the blob is whole.
    """

    def __init__(
        self, transport: Transport, partial: PartialBlob, chunk_seconds: float, request: Mapping[str, Any]
    ) -> None:
        """`request`: what names the blob, and says why we may read it."""
        self._request = request
        self.partial = partial
        self.trouble = ""  # of the last holder that failed us
        self._transport = transport
        self._chunk_seconds = chunk_seconds
        self._asked: dict[int, int] = {}  # chunk -> how many holders were asked for it in this round
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
        """Ask these holders, and `more` of them once they are known, at most `limit` at once, until all chunks are
        here or all have failed. A holder whose bytes do not match is added to `shunned`. Raises QuotaExceeded."""
        self._queue = deque(sorted(self.partial.missing))
        self._asked = {}
        workers = {peer: asyncio.create_task(self._pull(peer, shunned)) for peer in list(holders)[:limit]}
        waiting: set[asyncio.Future[Any]] = {more, *workers.values()}
        try:
            while waiting and self.partial.missing:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {more}:
                    task.result()
                known = more.result() if more.done() else []
                fresh = [peer for peer in known if peer not in workers and peer not in shunned]
                for peer in fresh[: limit - len(waiting - {more})]:
                    workers[peer] = asyncio.create_task(self._pull(peer, shunned))
                    waiting.add(workers[peer])
        finally:
            for task in workers.values():
                task.cancel()
            await asyncio.gather(*workers.values(), return_exceptions=True)

    async def _pull(self, holder: PeerId, shunned: set[PeerId]) -> None:
        outstanding: deque[int] = deque()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._chunk_seconds):
                stream = await self._transport.open(holder, BLOB.name)
            while self.partial.missing:
                await self._ask(stream, outstanding)
                if outstanding:
                    await self._accept(await self._chunk(stream), outstanding, holder, shunned)
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
                self._asked[chunk] -= 1
            self._changed.set()
            if stream is not None:
                stream.abort()

    async def _chunk(self, stream: Stream) -> Frame:
        """The next frame that is a chunk. A holder that keeps within an upload budget says that we must wait."""
        for _ in range(PATIENCE):
            async with asyncio.timeout(self._chunk_seconds):
                frame = checked(await stream.receive())
            if frame.kind != "wait":
                return frame
        raise FrameError(f"{stream.remote} keeps us waiting")

    async def _ask(self, stream: Stream, outstanding: deque[int]) -> None:
        if len(outstanding) > WINDOW // 2:
            return
        chunks = self._take(WINDOW - len(outstanding), outstanding)
        if chunks:
            outstanding.extend(chunks)
            for chunk in chunks:
                self._asked[chunk] = self._asked.get(chunk, 0) + 1
            await stream.send("get", {**self._request, "chunks": chunks})

    def _take(self, count: int, outstanding: deque[int]) -> list[int]:
        chunks: list[int] = []
        while self._queue and len(chunks) < count:
            chunk = self._queue.popleft()
            if chunk in self.partial.missing and chunk not in outstanding and chunk not in chunks:
                chunks.append(chunk)
        if not chunks and not outstanding:  # lend a hand with what another holder was asked for
            late = [c for c in sorted(self.partial.missing, reverse=True) if self._asked.get(c, 0) < 2]
            chunks = late[: max(1, count // 4)]
        return chunks

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
        self._asked[chunk] -= 1
        if not self.partial.missing:
            self._changed.set()
