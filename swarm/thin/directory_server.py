"""`/fusion/directory/1`: a peer serves the directory to clients that have no part in the DHT.

The peer looks up the keys of a request and returns the records as their authors signed them. The client checks them as every
reader does (`fusion.swarm.thin.remote_directory`), so a peer can leave records out but not forge any.

    read {keys} -> values {key, now}, its payload a msgpack list of sealed records, for each key in turn; then done {}

`now` is the swarm's clock at the peer, in unix seconds: the client's own may be wrong by more than records live. An answer has as
many keys as fit, the first ones, at least one. The client requests the rest again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgpack
from cachetools import TTLCache

from fusion.swarm.dht.request_budget import BudgetConfig, RequestBudget, spend_all
from fusion.swarm.errors import FrameError
from fusion.swarm.protocol import DIRECTORY
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.transport import Frame, Stream

MAX_KEYS = 64  # in one request
KEY_BYTES = 1 << 20  # of records under one key, in an answer
ANSWER_BYTES = 4 << 20  # in all
# How many keys each client, and all clients together, may have looked up.
CLIENT = BudgetConfig(per_second=32.0, burst=1024.0)
EVERYBODY = BudgetConfig(per_second=256.0, burst=8192.0)
# Charged after a lookup in addition, for checked signatures and bytes received: per record, and per KiB.
RECORD, KIB = 0.1, 0.04
# Our use of other nodes for clients, in their tokens (`fusion.swarm.dht.service`): half of a peer's budget there, so that our own
# claims keep the other half. The costs of a key, and of a KiB of the answer.
OURS = BudgetConfig(per_second=BudgetConfig.per_second / 2, burst=BudgetConfig.burst / 2)
OUR_KEY, OUR_KIB = 1.25, 0.05
CACHE_SECONDS = 0.5  # for which records that were looked up are served again
CACHE_BYTES = 16 << 20  # of such records
SUBNET_CLIENTS = 4  # the budget of a public network, in clients'
BUSY = "busy: ask less"

_KEY = re.compile(r"(peers|jobs|links)/[0-9]{1,2}|claims/[0-9a-f]{64}/[0-9]{1,5}|providers/[0-9a-f]{64}")


class SealedDirectory(Protocol):
    """The part of a peer's directory beside `fusion.swarm.directory.api.Directory` that the server needs."""

    def now(self) -> float: ...

    async def sealed_under(self, keys: Sequence[str]) -> Sequence[Sequence[bytes]]:
        """The live records under each of the keys, as their authors signed them."""


class DirectoryServer:
    """`serve_stream` for each stream of the protocol. Keys are charged before they are looked up, the records found
    afterwards."""

    def __init__(self, directory: SealedDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._directory = directory
        self._clients = RequestBudget(CLIENT, clock)
        self._subnets = RequestBudget(
            BudgetConfig(per_second=SUBNET_CLIENTS * CLIENT.per_second, burst=SUBNET_CLIENTS * CLIENT.burst),
            clock,
        )
        self._everybody = RequestBudget(EVERYBODY, clock)
        self._ours = RequestBudget(OURS, clock)
        self._cache: TTLCache[str, Sequence[bytes]] = TTLCache(
            CACHE_BYTES, CACHE_SECONDS, clock, lambda records: 1024 + _size(records)
        )

    async def serve_stream(self, stream: Stream) -> None:
        frame = await stream.receive()
        if frame.kind != "read":
            raise FrameError(f"{DIRECTORY.name} knows read, not {frame.kind!r:.40}")
        keys = _keys(frame)
        accounts: list[tuple[RequestBudget, str]] = [(self._clients, stream.remote), (self._everybody, "")]
        if isinstance(stream, FrameStream) and stream.subnet is not None:
            accounts.append((self._subnets, stream.subnet))
        if not spend_all(accounts, len(keys)):
            raise ValueError(BUSY)
        found = await self._look_up(keys, accounts)
        total = 0
        for key in keys:
            records = found[key]
            fitting, size = [], 0
            for data in records:
                size += len(data)
                if size > KEY_BYTES:
                    break
                fitting.append(data)
            total += min(size, KEY_BYTES)
            if total > ANSWER_BYTES and key != keys[0]:
                break
            await stream.send("values", {"key": key, "now": self._directory.now()}, [msgpack.packb(fitting)])
        await stream.send("done")

    async def _look_up(
        self, keys: Sequence[str], accounts: Sequence[tuple[RequestBudget, str]]
    ) -> dict[str, Sequence[bytes]]:
        """Raises ValueError where clients have used up our budget at other nodes."""
        found = {key: cached for key in keys if (cached := self._cache.get(key)) is not None}
        unknown = [key for key in keys if key not in found]
        # The directory caches peers and jobs itself, so reads of them cost no lookup.
        searched = [key for key in unknown if not key.startswith(("peers/", "jobs/"))]
        if not self._ours.spend("", OUR_KEY * len(searched)):
            raise ValueError(BUSY)
        if unknown:
            found |= zip(unknown, await self._directory.sealed_under(unknown), strict=True)
        for key in searched:
            kib = _size(found[key]) / 1024
            self._ours.charge("", OUR_KIB * kib)
            for budget, account in accounts:
                budget.charge(account, RECORD * len(found[key]) + KIB * kib)
            if 1024 + 1024 * kib <= CACHE_BYTES:
                self._cache[key] = found[key]
        return found


def _size(records: Sequence[bytes]) -> int:
    return sum(map(len, records))


def _keys(frame: Frame) -> list[str]:
    found = frame.header.get("keys")
    if not isinstance(found, list) or not 0 < len(found) <= MAX_KEYS:
        raise FrameError(f"keys must be a list of 1 to {MAX_KEYS}")
    if not all(isinstance(key, str) and _KEY.fullmatch(key) for key in found):
        raise FrameError("keys must be those of peers, jobs, links, claims or providers")
    return list(dict.fromkeys(found))
