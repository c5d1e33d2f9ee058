"""A directory within one process: records are signed, checked and stored as by the nodes of the DHT."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from fusion.swarm.directory.api import RECORD_TTL_SECONDS
from fusion.swarm.directory.by_key import DirectoryByKey, R
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import Record
from fusion.swarm.directory.sealing import open_record, seal
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.network import MemoryNetwork

logger = logging.getLogger(__name__)


class MemoryDirectory(DirectoryByKey):
    """Implements `fusion.swarm.directory.api.Directory` for one peer of a `MemoryNetwork`. Records are really signed
    and checked; `clock` gives unix seconds."""

    def __init__(
        self, network: MemoryNetwork, identity: Identity, clock: Callable[[], float] = time.time
    ) -> None:
        self._network = network
        self._identity = identity
        self._clock = clock
        self._replica = network.replica(identity.peer_id)

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        now = self._clock()
        data = seal(record, self._identity, now + ttl_seconds)
        self._network.store(self._identity.peer_id, key_of(record), subkey_of(record), data, now)

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        return seal(record, self._identity, self._clock() + ttl_seconds)

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def now(self) -> float:
        return self._clock()

    async def sealed_under(self, keys: Sequence[str]) -> list[list[bytes]]:
        """As `fusion.swarm.thin.directory_server.SealedDirectory`; the reader checks them."""
        return [[data for _, data in self._replica.get(key, {}).values()] for key in keys]

    async def aclose(self) -> None:
        self._network.replicas.pop(self._identity.peer_id, None)

    async def records(
        self, keys: Sequence[str], kind: type[R], *, max_age_seconds: float = 0.0
    ) -> tuple[R, ...]:
        """In the order of the keys, then of the authors."""
        found: list[R] = []
        for key in keys:
            for subkey, (_, data) in sorted(self._replica.get(key, {}).items()):
                try:
                    record = open_record(data, key, subkey, self._clock())
                except RecordError as error:
                    logger.debug("ignored a record at %s: %s", key, error)
                    continue
                if isinstance(record, kind):
                    found.append(record)
        return tuple(found)
