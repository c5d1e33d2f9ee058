"""The directory for a client without the DHT: read from peers over `/fusion/directory/1` (`fusion.swarm.thin.directory_server`), and
checked as by every reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgpack

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.directory import sealing
from fusion.swarm.directory.api import RECORD_TTL_SECONDS
from fusion.swarm.directory.by_key import DirectoryByKey, R
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import PeerRecord, Record
from fusion.swarm.directory.sealing import MAX_RECORD_BYTES, Sealed
from fusion.swarm.errors import (
    FrameError,
    PeerUnreachable,
    RecordError,
    RemoteError,
    StreamBroken,
    StreamClosed,
    UnknownProtocol,
)
from fusion.swarm.protocol import DIRECTORY
from fusion.swarm.thin.directory_server import MAX_KEYS
from fusion.swarm.transport import Frame, PeerId, Transport, checked

ANSWER_SECONDS = 20.0
SKEW_SECONDS = 1.0  # by which our clock may differ from the swarm's before the swarm's is used


class RemoteDirectory(DirectoryByKey):
    """Implements `fusion.swarm.directory.api.Directory`, read only, through peers. `gateway` gives the peer to query, `doubt` is
    called with one that did not answer, `learn` with the addresses of peers."""

    def __init__(
        self,
        transport: Transport,
        gateway: Callable[[], Awaitable[PeerId]],
        doubt: Callable[[PeerId], None],
        learn: Callable[[PeerId, Sequence[str]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives unix seconds."""
        self._transport = transport
        self._gateway = gateway
        self._doubt = doubt
        self._learn = learn
        self._clock = clock
        self._ahead = 0.0  # seconds by which the swarm's clock is ahead of ours
        self._reads: dict[str, asyncio.Future[list[Record]]] = {}  # waiting for the next request
        self._readers: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        await cancel_all(self._readers)

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        raise PeerUnreachable("a client publishes nothing")

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        raise PeerUnreachable("a client publishes nothing")

    def sign(self, data: bytes) -> bytes:
        raise PeerUnreachable("a client signs nothing")

    def now(self) -> float:
        return self._clock() + self._ahead

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        found = await super().peers(max_age_seconds=max_age_seconds)
        for record in found:
            self._learn(record.peer, record.addresses)
        return found

    # Reading.

    async def records(
        self, keys: Sequence[str], kind: type[R], *, max_age_seconds: float = 0.0
    ) -> tuple[R, ...]:
        """As in `DirectoryByKey`. Reads at the same moment share one request."""
        loop = asyncio.get_running_loop()
        if not self._reads:
            reader = loop.create_task(self._read())
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        futures = [self._reads.setdefault(key, loop.create_future()) for key in keys]
        found = await asyncio.gather(*(asyncio.shield(future) for future in futures))
        return tuple(record for records in found for record in records if isinstance(record, kind))

    async def _read(self) -> None:
        await asyncio.sleep(0)  # let all callers that are ready now join
        reads, self._reads = self._reads, {}
        keys = list(reads)
        requests = [self._read_some(keys[at : at + MAX_KEYS], reads) for at in range(0, len(keys), MAX_KEYS)]
        await asyncio.gather(*requests)

    async def _read_some(self, keys: Sequence[str], reads: dict[str, asyncio.Future[list[Record]]]) -> None:
        try:
            left = list(keys)
            while left:
                for key in await self._query(left, reads):
                    left.remove(key)
        except Exception as error:  # raised in the callers
            for key in keys:
                if not reads[key].done():
                    reads[key].set_exception(error)
                    reads[key].exception()  # marks it retrieved: the caller may be gone
        finally:
            for key in keys:
                reads[key].cancel()  # no-op on those that are done

    async def _query(self, keys: Sequence[str], reads: dict[str, asyncio.Future[list[Record]]]) -> list[str]:
        """Query these keys from a peer that answers; returns the keys in its answer. Raises SwarmError."""
        failure: Exception | None = None
        while True:
            try:
                peer = await self._gateway()
            except PeerUnreachable as error:
                raise failure or error from None
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await self._query_peer(peer, keys, reads)
            except UnknownProtocol:
                raise UnknownProtocol(
                    f"{peer} is of an older release, which tells clients nothing of the swarm; ask another with --peer"
                ) from None
            except (PeerUnreachable, StreamBroken, StreamClosed, TimeoutError) as error:
                silent = isinstance(error, TimeoutError)
                latest = PeerUnreachable(f"{peer} does not answer") if silent else error
                if failure is not None and str(failure) == str(latest):
                    raise failure from None
                failure = latest
                self._doubt(peer)

    async def _query_peer(
        self, peer: PeerId, keys: Sequence[str], reads: dict[str, asyncio.Future[list[Record]]]
    ) -> list[str]:
        stream = await self._transport.open(peer, DIRECTORY.name)
        answered: list[str] = []
        try:
            await stream.send("read", {"keys": list(keys)})
            while (frame := checked(await stream.receive())).kind == "values":
                key, records = self._opened(frame, keys[len(answered)] if len(answered) < len(keys) else "")
                answered.append(key)
                if not reads[key].done():
                    reads[key].set_result(records)
        finally:
            stream.abort()
        if frame.kind != "done" or not answered:
            raise RemoteError(f"{peer} answers {frame.kind!r:.40} where values are due")
        return answered

    def _opened(self, frame: Frame, key: str) -> tuple[str, list[Record]]:
        """The key and those records of an answer that pass every check. Raises FrameError for an answer that is not about `key`."""
        now = frame.header.get("now")
        if frame.header.get("key") != key or not isinstance(now, float):
            raise FrameError(f"values of {frame.header.get('key')!r:.100} where those of {key} were due")
        ahead = now - self._clock()
        self._ahead = ahead if abs(ahead) > SKEW_SECONDS else 0.0
        caps = {"max_bin_len": MAX_RECORD_BYTES, "max_str_len": 0, "max_map_len": 0, "max_ext_len": 0}
        try:
            listed = msgpack.unpackb(frame.payload, max_array_len=len(frame.payload), **caps)
        except (ValueError, msgpack.UnpackException) as error:
            raise FrameError(f"values that are not msgpack: {type(error).__name__}") from error
        newest: dict[str, Sealed] = {}
        for data in listed if isinstance(listed, list) else ():
            try:
                found = sealing.unseal_anywhere(data, self.now())
            except RecordError:
                continue
            subkey = subkey_of(found.record)
            if key_of(found.record) == key and (
                subkey not in newest or found.expires_at > newest[subkey].expires_at
            ):
                newest[subkey] = found
        return key, [newest[subkey].record for subkey in sorted(newest)]
