"""One blob on its way here: which holder is asked for which chunk, and what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from fusion.swarm.blob_index import decode_index
from fusion.swarm.blob_store import BadChunk, PartialBlob
from fusion.swarm.errors import BlobError, FrameError, QuotaExceeded, SwarmError
from fusion.swarm.records import Digest
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, call, checked

logger = logging.getLogger(__name__)

PROTOCOL = "/fusion/blob/1"
WINDOW = 16  # chunks asked of one holder and not yet here


async def ask_index(
    transport: Transport, holders: Sequence[PeerId], digest: Digest, timeout_seconds: float
) -> bytes:
    """The blob's index from the first holder that has it. Raises BlobError if none has."""
    trouble = "nobody announces it"
    for holder in holders:
        try:
            async with asyncio.timeout(timeout_seconds):
                frame = await call(transport, holder, PROTOCOL, "index", {"digest": digest})
            decode_index(frame.payload, digest)
            return bytes(frame.payload)
        except TimeoutError:
            trouble = f"{holder} did not answer"
        except SwarmError as error:
            trouble = str(error)
        logger.debug("no index of blob %.8s from %s: %s", digest, holder, trouble)
    raise BlobError(trouble)


class Fetch:
    """Pulls the missing chunks of one blob from several holders at once.

    A chunk is asked of one holder; when nothing else is left to ask for, of a second one as well, so that the slowest
    holder does not decide when the blob is whole.
    """

    def __init__(self, transport: Transport, partial: PartialBlob, chunk_seconds: float) -> None:
        self.partial = partial
        self.trouble = ""  # of the last holder that failed us
        self._transport = transport
        self._chunk_seconds = chunk_seconds
        self._asked: dict[int, int] = {}  # chunk -> how many holders were asked for it in this round
        self._queue: deque[int] = deque()
        self._changed = asyncio.Event()

    async def round(self, holders: Sequence[PeerId], shunned: set[PeerId]) -> None:
        """Ask these holders until all chunks are here or all holders have failed. A holder whose bytes do not match
        is added to `shunned`. Raises QuotaExceeded."""
        self._queue = deque(sorted(self.partial.missing))
        self._asked = {}
        workers = [asyncio.create_task(self._pull(holder, shunned)) for holder in holders]
        waiting: set[asyncio.Task[None]] = set(workers)
        try:
            while waiting and self.partial.missing:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _pull(self, holder: PeerId, shunned: set[PeerId]) -> None:
        outstanding: deque[int] = deque()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._chunk_seconds):
                stream = await self._transport.open(holder, PROTOCOL)
            while self.partial.missing:
                await self._ask(stream, outstanding)
                if outstanding:
                    async with asyncio.timeout(self._chunk_seconds):
                        frame = checked(await stream.receive())
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
                self._asked[chunk] -= 1
            self._changed.set()
            if stream is not None:
                stream.abort()

    async def _ask(self, stream: Stream, outstanding: deque[int]) -> None:
        if len(outstanding) > WINDOW // 2:
            return
        chunks = self._take(WINDOW - len(outstanding), outstanding)
        if chunks:
            outstanding.extend(chunks)
            for chunk in chunks:
                self._asked[chunk] = self._asked.get(chunk, 0) + 1
            await stream.send("get", {"digest": self.partial.index.digest, "chunks": chunks})

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
