"""One blob on its way here: which holder is asked for which chunk, and what came of it."""

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

HEDGE_SECONDS = 0.3  # of silence before further holders are asked for an index, too
CROWD_SECONDS = 3.0  # of silence before a holder is left, where not all can be asked at once
# Without a chunk from anybody: those who were asked keep no other from being asked then.
SILENT_SECONDS = 10.0
MOST_ASKED = 64  # holders at once, silent ones included
ALONE_CHUNKS = 16
WINDOW = 16  # chunks asked of one holder and not yet here
LARGE_INDEX_BYTES = 64 << 10  # decoded in a thread: one of 8 MiB takes a tenth of a second
PATIENCE = 100  # times that a holder may ask us to wait for one chunk


async def ask_index(
    transport: Transport, holders: Sequence[PeerId], request: Mapping[str, Any], timeout_seconds: float
) -> tuple[PeerId, bytes]:
    """The index of the blob that `request` names, from whichever holder answers first, and who that is. Whenever those that were
    asked are silent for a moment or have none, twice as many others are asked: anybody may say that he holds a blob, and a
    thousand of them must not take a thousand moments. Raises BlobError if none has it."""
    trouble, refused = "nobody announces it", False
    waiting: dict[asyncio.Task[bytes], PeerId] = {}
    left, more = deque(holders), 1
    if len(left) > MOST_ASKED:
        timeout_seconds = min(timeout_seconds, CROWD_SECONDS)
    try:
        while left or waiting:
            for _ in range(min(more, len(left), MOST_ASKED - len(waiting))):
                holder = left.popleft()
                asking = asyncio.create_task(_index_from(transport, holder, request, timeout_seconds))
                waiting[asking] = holder
            more = min(2 * more, MOST_ASKED)
            done, _ = await asyncio.wait(
                waiting, timeout=HEDGE_SECONDS if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                holder, error = waiting.pop(task), task.exception()
                if error is None:
                    return holder, task.result()
                if not isinstance(error, BlobError):
                    raise error
                if not refused:  # of all reasons the one that somebody can do something about
                    trouble, refused = str(error), isinstance(error, BlobRefused)
                logger.debug("no index of blob %.8s: %s", request["digest"], trouble)
    finally:
        await cancel_all(waiting)
    raise BlobError(trouble)


async def decoded(data: bytes | memoryview, digest: Digest) -> BlobIndex:
    """As `decode_index`, which does not hold the loop up."""
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
        self,
        transport: Transport,
        partial: PartialBlob,
        chunk_seconds: float,
        request: Mapping[str, Any],
        giver: PeerId,
    ) -> None:
        """`request`: what names the blob, and says why we may read it; `giver` gave us the index: of all that say that they hold
        the blob it has shown something of it, and is asked first."""
        self._request = request
        self._giver = giver
        self.partial = partial
        self.trouble = ""  # of the last holder that failed us
        self._transport = transport
        self._chunk_seconds = chunk_seconds
        self._asked: dict[int, set[PeerId]] = {}  # chunk -> the holders that were asked for it in this round
        self._asked_at: dict[PeerId, float] = {}  # when each of them was first asked
        self._heard_at = float("-inf")  # when a chunk last came
        self._late = 0  # holders that were too slow with a chunk in this round
        # For so many chunks the giver is asked alone: our link may be too slow for several, none of whom is done in time.
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
        """Ask these holders, and `more` of them once they are known, at most `limit` at once that are not silent, until all chunks
        are here or all have failed: anybody may say that he holds a blob. A holder whose bytes do not match is added to `shunned`.
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
        self._asked = {}
        workers: dict[PeerId, asyncio.Task[None]] = {}
        waiting: set[asyncio.Future[Any]] = {more}
        try:
            while waiting and self.partial.missing:
                known = dict.fromkeys([self._giver, *holders, *(more.result() if more.done() else ())])
                unasked = [peer for peer in known if peer not in workers and peer not in shunned]
                running = [peer for peer, task in workers.items() if not task.done()]
                busy = len(running) - sum(map(self._silent, running))
                at_once = 1 if self._alone else limit
                room = at_once - busy if busy else max(at_once, len(running))
                for peer in unasked[: max(0, min(room, MOST_ASKED - len(running)))]:
                    self._asked_at[peer] = asyncio.get_running_loop().time()
                    workers[peer] = asyncio.create_task(self._pull(peer, shunned))
                    waiting.add(workers[peer])
                done, waiting = await asyncio.wait(
                    waiting, timeout=SILENT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {more}:
                    task.result()
                if not done:  # what silent holders were asked for may be asked of others
                    self._changed.set()
        finally:
            await cancel_all(workers.values())

    def _silent(self, holder: PeerId) -> bool:
        """While chunks come it is not: of a slow link each holder has a part alone."""
        if self._alone:
            return False
        since = max(self._asked_at[holder], self._heard_at)
        return asyncio.get_running_loop().time() - since >= SILENT_SECONDS

    async def _pull(self, holder: PeerId, shunned: set[PeerId]) -> None:
        outstanding: deque[int] = deque()
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._chunk_seconds):
                stream = await self._transport.open(holder, BLOB.name)
            while self.partial.missing:
                await self._ask(holder, stream, outstanding)
                if outstanding:
                    try:
                        frame = await self._chunk(stream)
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
                self._asked[chunk].discard(holder)
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
            self._alone = 0  # it is not our link that holds it up
        raise FrameError(f"{stream.remote} keeps us waiting")

    async def _ask(self, holder: PeerId, stream: Stream, outstanding: deque[int]) -> None:
        if len(outstanding) > WINDOW // 2:
            return
        chunks = self._take(WINDOW - len(outstanding), outstanding)
        if chunks:
            outstanding.extend(chunks)
            for chunk in chunks:
                self._asked.setdefault(chunk, set()).add(holder)
            await stream.send("get", {**self._request, "chunks": chunks})

    def _take(self, count: int, outstanding: deque[int]) -> list[int]:
        chunks: list[int] = []
        while self._queue and len(chunks) < count:
            chunk = self._queue.popleft()
            if chunk in self.partial.missing and chunk not in outstanding and chunk not in chunks:
                chunks.append(chunk)
        if not chunks and not outstanding:  # lend a hand with what another holder was asked for
            late = [c for c in sorted(self.partial.missing, reverse=True) if self._awaited(c) < 2]
            chunks = late[: max(1, count // 4)]
        return chunks

    def _awaited(self, chunk: int) -> int:
        """From how many holders that are not silent."""
        return sum(not self._silent(holder) for holder in self._asked.get(chunk, ()))

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
        self._heard_at = asyncio.get_running_loop().time()
        self._alone = max(0, self._alone - 1)
        self._asked[chunk].discard(holder)
        if not self.partial.missing:
            self._changed.set()
