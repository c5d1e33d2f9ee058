"""`/fusion/directory/1`: the directory for clients that have no part in the DHT, as a peer serves it.

A peer looks up what a client asks it for, and hands the records on as their authors signed them: the client checks them as
every reader does (`fusion.swarm.thin.remote_directory`), so a peer can leave records out and cannot make any up.

    read {keys} -> values {key, now}, its payload a msgpack list of sealed records, for each key in turn; then done {}

`now` is the swarm's clock at the peer, in unix seconds: the client's own may be wrong by more than records live. Of as many keys
as an answer has room for: the first ones, at least one. A client asks again for the rest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgpack

from fusion.swarm.dht.request_budget import BudgetConfig, RequestBudget, spend_all
from fusion.swarm.errors import FrameError
from fusion.swarm.protocol import DIRECTORY
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.transport import Frame, Stream

MAX_KEYS = 64  # in one question
KEY_BYTES = 1 << 20  # of records under one key, in an answer
ANSWER_BYTES = 4 << 20  # in all
# What clients may have looked up, in keys: each, and all of them together.
CLIENT = BudgetConfig(per_second=32.0, burst=1024.0)
EVERYBODY = BudgetConfig(per_second=256.0, burst=8192.0)
SUBNET_CLIENTS = 4  # a network may use as much of us as so many clients
BUSY = "busy: ask less"

_KEY = re.compile(r"(peers|jobs|links)/[0-9]{1,2}|claims/[0-9a-f]{64}/[0-9]{1,5}|providers/[0-9a-f]{64}")


class SealedDirectory(Protocol):
    """What a peer's directory offers beside `fusion.swarm.directory.api.Directory`."""

    def now(self) -> float: ...

    async def sealed_under(self, keys: Sequence[str]) -> Sequence[Sequence[bytes]]:
        """The live records under each of the keys, as their authors signed them."""


class DirectoryServer:
    """`attend` for each stream of the protocol. What is asked for is paid for before it is looked up."""

    def __init__(self, directory: SealedDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that only rise."""
        self._directory = directory
        self._clients = RequestBudget(CLIENT, clock)
        self._subnets = RequestBudget(
            BudgetConfig(per_second=SUBNET_CLIENTS * CLIENT.per_second, burst=SUBNET_CLIENTS * CLIENT.burst),
            clock,
        )
        self._everybody = RequestBudget(EVERYBODY, clock)

    async def attend(self, stream: Stream) -> None:
        frame = await stream.receive()
        if frame.kind != "read":
            raise FrameError(f"{DIRECTORY.name} knows read, not {frame.kind!r:.40}")
        keys = _keys(frame)
        accounts: list[tuple[RequestBudget, str]] = [(self._clients, stream.remote), (self._everybody, "")]
        if isinstance(stream, FrameStream) and stream.subnet is not None:
            accounts.append((self._subnets, stream.subnet))
        if not spend_all(accounts, len(keys)):
            raise ValueError(BUSY)
        found = await self._directory.sealed_under(keys)
        total = 0
        for key, records in zip(keys, found, strict=True):
            told, size = [], 0
            for data in records:
                size += len(data)
                if size > KEY_BYTES:
                    break
                told.append(data)
            total += min(size, KEY_BYTES)
            if total > ANSWER_BYTES and key != keys[0]:
                break
            await stream.send("values", {"key": key, "now": self._directory.now()}, [msgpack.packb(told)])
        await stream.send("done")


def _keys(frame: Frame) -> list[str]:
    found = frame.header.get("keys")
    if not isinstance(found, list) or not 0 < len(found) <= MAX_KEYS:
        raise FrameError(f"keys must be a list of 1 to {MAX_KEYS}")
    if not all(isinstance(key, str) and _KEY.fullmatch(key) for key in found):
        raise FrameError("keys must be those of peers, jobs, links, claims or providers")
    return list(dict.fromkeys(found))
