"""The gate in front of a storing node: what others may store with us.

A record that no reader would believe is not stored either: forged, expired, oversized, of an unknown version, in a
place or for a time that its author did not sign. And no key may grow beyond what one answer can carry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from fusion.swarm.dht.values import MAX_SUBKEYS, key_id, parse_subkey
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import JobRecord
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS, unseal_anywhere
from fusion.swarm.errors import RecordError

logger = logging.getLogger(__name__)

MAX_JOBS_PER_AUTHOR = 64  # in one shard


class Offered(Protocol):
    """hivemind's DHTRecord: what another node asks us to keep."""

    @property
    def key(self) -> bytes: ...
    @property
    def subkey(self) -> bytes: ...
    @property
    def value(self) -> bytes: ...
    @property
    def expiration_time(self) -> float: ...


class StoreGuard:
    """What our node lets others store with it: hivemind's record validator, by duck typing. It sees every record
    before it is kept, with the hash of the key only."""

    def __init__(self, subkeys: Callable[[int], set[str]], now: Callable[[], float]) -> None:
        """`subkeys`: those kept under a key now; `now`: unix seconds."""
        self._subkeys = subkeys
        self._now = now

    def validate(self, record: Offered) -> bool:
        try:
            self._check(record)
        except RecordError as error:
            logger.debug("refused to store a record: %s", error)
            return False
        return True

    def _check(self, record: Offered) -> None:
        subkey = parse_subkey(record.subkey)
        # Later than our own clock allows is refused by the store itself; ours may be the one that is ahead.
        sealed = unseal_anywhere(record.value, self._now(), grace_seconds=CLOCK_TOLERANCE_SECONDS)
        key = key_id(key_of(sealed.record))
        if record.key != key.to_bytes(20, "big") or subkey != subkey_of(sealed.record):
            raise RecordError("not the place of this record")
        if abs(record.expiration_time - sealed.expires_at - CLOCK_TOLERANCE_SECONDS) > 1e-3:
            raise RecordError("stored for another time than its author signed")
        beside = self._subkeys(key)
        if subkey in beside:
            return
        if len(beside) >= MAX_SUBKEYS:
            raise RecordError("too many records under one key")
        if isinstance(sealed.record, JobRecord):
            author = sealed.record.author + "/"
            if sum(other.startswith(author) for other in beside) >= MAX_JOBS_PER_AUTHOR:
                raise RecordError("too many jobs of one author")
