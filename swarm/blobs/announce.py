"""Announces a store's blobs in the directory, again before each announcement expires."""

from __future__ import annotations

import asyncio
import logging

from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import Digest, ProviderRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

ANNOUNCED_AT_ONCE = 16  # blobs: a few milliseconds for the nodes that store the records


class BlobAnnouncer:
    """`start` announces the store's blobs, and sweeps the store, every `announce_seconds` until `aclose`; `soon` announces one blob at
    once."""

    def __init__(self, store: BlobStore, directory: Directory, peer_id: PeerId, config: BlobConfig) -> None:
        self._store = store
        self._directory = directory
        self._peer_id = peer_id
        self._config = config
        self._announcing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop = asyncio.create_task(self._for_ever(), name="blob announcements")

    async def aclose(self) -> None:
        """Idempotent."""
        tasks = [*self._announcing, *([] if self._loop is None else [self._loop])]
        self._loop = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def soon(self, digest: Digest) -> None:
        """Announce it in the background: a write to the directory takes long, and a stage may wait for us."""
        if not self._config.offer:
            return
        task = asyncio.create_task(self._announce(digest), name=f"announce {digest[:8]}")
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    async def _announce(self, digest: Digest) -> None:
        try:
            record = ProviderRecord(digest=digest, peer=self._peer_id, size_bytes=self._store.size(digest))
            await self._directory.publish(record, ttl_seconds=3 * self._config.announce_seconds)
        except SwarmError as error:
            logger.warning("blob %.8s not announced: %s", digest, error)

    async def _for_ever(self) -> None:
        while True:
            # Records that are published at the same moment go to a node in one request.
            announced = self._store.to_announce(self._config.announced)
            for at in range(0, len(announced), ANNOUNCED_AT_ONCE):
                await asyncio.gather(*map(self._announce, announced[at : at + ANNOUNCED_AT_ONCE]))
            try:
                await asyncio.to_thread(self._store.sweep)
            except SwarmError as error:
                logger.warning("%s", error)
            await asyncio.sleep(self._config.announce_seconds)
