"""Limits on clients: large frames that arrive slowly, responses that are not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fusion.runtime.job.protocol import PROTOCOLS
from fusion.swarm.errors import StreamBroken, SwarmError
from fusion.swarm.printable import error_line
from fusion.swarm.shares import Shares
from fusion.swarm.transport import UNASKED_BYTES, Buffer, Frame, PeerId, Stream
from fusion.swarm.turns import Turn

# A large frame that arrives more slowly than this may be preempted.
ARRIVING_BYTES, ARRIVING_SECONDS = 16 << 10, 1.0
UNREAD_SECONDS = 30.0  # for a client to read a token
SLOWEST_BYTES_PER_SECOND = 128 << 10  # on top of that, for a large payload
PAYLOAD_BYTES = {each.name: each.payload_bytes for each in PROTOCOLS if each.payload_bytes is not None}


class Arrivals:
    """Admission of first frames of more than UNASKED_BYTES, at most `places` at once. A stalled one is preempted for another; one of a
    new peer that still arrives is preempted only for a peer whose frames were complete before, and only while new peers hold more
    than half. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], places: int) -> None:
        self._shares: Shares[Stream] = Shares(clock, places, ARRIVING_SECONDS)
        self._arrived: dict[Stream, int] = {}  # bytes of each, when it last made progress

    async def first(self, stream: Stream) -> Frame | None:
        """The first frame; None where it is large and not admitted. Raises as `Stream.receive`."""
        if await stream.announced() <= UNASKED_BYTES:
            return await stream.receive()
        if not self._has_room(stream.remote):
            return None
        self._shares.take(stream, stream.remote)
        self._arrived[stream] = stream.arrived_bytes
        whole = False
        try:
            stream.allow(PAYLOAD_BYTES[stream.protocol])
            frame = await stream.receive()
            whole = True
            return frame
        finally:
            self._shares.release(stream, completed=whole)
            del self._arrived[stream]

    def _has_room(self, peer: PeerId) -> bool:
        if self._shares.room():
            return True
        for stream, before in self._arrived.items():
            if stream.arrived_bytes - before >= ARRIVING_BYTES:
                self._shares.use(stream)
                self._arrived[stream] = stream.arrived_bytes
        other = self._shares.yields(peer, 1, evenly=False)
        if other is None:
            return False
        self._shares.release(other)
        other.abort()
        return True


async def answer_until_disconnect(
    client: Stream, turn: Turn, answer: Coroutine[Any, Any, bool], release: Callable[[bool], None]
) -> None:
    """Run `answer`, which returns whether it was sent to its end. It is cancelled if the client vanishes or sends anything more, or once
    `turn` is preempted. `release` is called at the end with whether it was completed. Raises as `answer`."""
    answering = asyncio.create_task(answer)
    disconnected = asyncio.create_task(client.receive())
    try:
        await asyncio.wait((answering, disconnected, turn), return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnected.cancel()
        answering.cancel()
        _, outcome = await asyncio.gather(disconnected, answering, return_exceptions=True)
        release(outcome is True)
    if isinstance(outcome, Exception):
        raise outcome


async def send(
    client: Stream, kind: str, header: Mapping[str, object], payload: Sequence[Buffer] = ()
) -> None:
    """Send one frame of a response. StreamBroken where the client does not read it."""
    try:
        async with asyncio.timeout(UNREAD_SECONDS + sum(map(len, payload)) / SLOWEST_BYTES_PER_SECOND):
            await client.send(kind, header, payload)
    except TimeoutError:
        client.abort()
        raise StreamBroken(f"{client.remote} does not read its answer") from None


async def send_error(client: Stream, error: str | BaseException, **more: object) -> None:
    """Send an error, in one line."""
    message = error if isinstance(error, str) else error_line(error)
    with suppress(SwarmError):  # the client may have gone as well
        await send(client, "error", {"message": message, **more})
