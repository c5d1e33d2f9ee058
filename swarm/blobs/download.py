"""The fetch of one blob: find holders, get the index, then rounds over the holders until all chunks are here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.swarm.authority.access import Access
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.fetch import Fetch, decoded, request_index
from fusion.swarm.blobs.partial_blob import PartialBlob
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import BlobError, SwarmError
from fusion.swarm.transport import PeerId, Transport

logger = logging.getLogger(__name__)

HINT_SECONDS = 1.0  # for the hints to answer, before the directory's holders are tried


class TooLarge(BlobError):
    """The blob is larger than the caller allows: a retry cannot help."""

    def __init__(self, digest: Digest, size_bytes: int, limit: int) -> None:
        super().__init__(f"blob {digest[:8]} has {size_bytes} bytes; at most {limit} allowed")
        self.size_bytes = size_bytes


@dataclass(eq=False, kw_only=True)
class Download:
    digest: Digest
    hints: Sequence[PeerId]  # peers likely to hold it
    max_bytes: int | None  # that it may have
    job: JobId | None  # that it is a part of, where not everybody may read that
    store: BlobStore
    transport: Transport
    directory: Directory
    config: BlobConfig
    access: Access
    fetch: Fetch | None = None  # while it is under way and its index is here

    async def run(self) -> None:
        """Fetch it into the store. Raises BlobError where no holder gives it, TooLarge, QuotaExceeded."""
        shunned: set[PeerId] = set()  # holders that sent bytes which do not match the digest
        fruitless = 0
        reason = "nobody announces it"
        likely = [peer for peer in self.hints if peer != self.transport.peer_id]
        lookup = self._look_up()
        fetch: Fetch | None = None
        try:
            while True:
                left = len(fetch.partial.missing) if fetch is not None else None
                # A dial is quicker than the directory: at first try only the hints.
                first, likely = likely[: self.config.holders], []
                holders = first or [peer for peer in await lookup if peer not in shunned]
                try:
                    if fetch is None and holders:
                        patience = min(HINT_SECONDS, self.config.chunk_seconds)
                        fetch = await self._begin(holders, patience if first else self.config.chunk_seconds)
                    if fetch is not None:
                        self.fetch = fetch
                        await fetch.round(holders, shunned, lookup, self.config.holders)
                        reason = fetch.trouble or reason
                except TooLarge:
                    raise
                except (BlobError, TimeoutError) as error:
                    reason = str(error)
                if fetch is not None and not fetch.partial.missing:
                    return
                if first and fetch is None:
                    continue  # with the directory's holders
                fruitless = 0 if fetch is not None and len(fetch.partial.missing) != left else fruitless + 1
                if fruitless >= self.config.attempts:
                    raise BlobError(f"cannot fetch blob {self.digest[:8]}: {reason}")
                await asyncio.sleep(self.config.retry_seconds)
                lookup = self._look_up()
        finally:
            lookup.cancel()
            self.fetch = None
            if fetch is not None:
                await asyncio.shield(asyncio.to_thread(fetch.partial.close))

    async def _begin(self, holders: Sequence[PeerId], patience_seconds: float) -> Fetch:
        """Raises BlobError where none of the holders has the blob, TooLarge, QuotaExceeded."""
        request: dict[str, object] = {"digest": self.digest}
        if self.job is not None:  # shows that we may read it
            request |= {"job": self.job, "grants": list(self.access.chain(self.job))}
        giver, data = await request_index(self.transport, holders, request, patience_seconds)
        size = (await decoded(data, self.digest)).size_bytes
        if self.max_bytes is not None and size > self.max_bytes:
            raise TooLarge(self.digest, size, self.max_bytes)
        partial = await self._begin_partial(data)
        return Fetch(self.transport, partial, self.config.chunk_seconds, request, giver)

    async def _begin_partial(self, index: bytes) -> PartialBlob:
        beginning = asyncio.create_task(asyncio.to_thread(self.store.begin, index, self.digest, self.job))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            # Its thread goes on, and ends with an open file and a part of the quota: only we can give these back.
            await asyncio.wait([beginning])
            if not beginning.cancelled() and beginning.exception() is None:
                await asyncio.shield(asyncio.to_thread(beginning.result().close))
            raise

    def _look_up(self) -> asyncio.Task[list[PeerId]]:
        return asyncio.create_task(self._holders(), name=f"holders of {self.digest[:8]}")

    async def _holders(self) -> list[PeerId]:
        try:
            records = await self.directory.providers(self.digest)
        except SwarmError as error:
            logger.debug("providers of blob %.8s not read: %s", self.digest, error)
            records = ()
        peers = dict.fromkeys([*self.hints, *(record.peer for record in records)])
        return [peer for peer in peers if peer != self.transport.peer_id]
