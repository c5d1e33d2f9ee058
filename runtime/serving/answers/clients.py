"""Clients at the other end of a stream, and what they cost the others: frames that are large and slow, answers that nobody reads."""

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

# Of a large frame: one of which so little comes in so long gives way to another.
ARRIVING_BYTES, ARRIVING_SECONDS = 16 << 10, 1.0
UNREAD_SECONDS = 30.0  # for a client to read a token
SLOWEST_BYTES_PER_SECOND = 128 << 10  # beyond that, where an answer is large
PAYLOAD_BYTES = {each.name: each.payload_bytes for each in PROTOCOLS if each.payload_bytes is not None}


class Arrivals:
    """First frames of more than UNASKED_BYTES on their way here, at most `places` at once. One of which nothing comes any more
    gives way to another; a newcomer's that comes does so for the sake alone of a peer whose frames came whole before, where
    newcomers hold more than half. `clock` gives seconds that only rise."""

    def __init__(self, clock: Callable[[], float], places: int) -> None:
        self._shares: Shares[Stream] = Shares(clock, places, ARRIVING_SECONDS)
        self._arrived: dict[Stream, int] = {}  # bytes of each, when it was last found to come

    async def first(self, stream: Stream) -> Frame | None:
        """The first frame; None where it is large, and as many arrive as may. Raises as `Stream.receive`."""
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

    def _has_room(self, asker: PeerId) -> bool:
        if self._shares.room():
            return True
        for stream, before in self._arrived.items():
            if stream.arrived_bytes - before >= ARRIVING_BYTES:
                self._shares.use(stream)
                self._arrived[stream] = stream.arrived_bytes
        other = self._shares.yields(asker, 1, evenly=False)
        if other is None:
            return False
        self._shares.release(other)
        other.abort()
        return True


async def answer_while_there(
    client: Stream, place: Turn, answer: Coroutine[Any, Any, bool], leave: Callable[[bool], None]
) -> None:
    """Run `answer`, which says whether it was given to its end. The client vanishing, or saying anything more, ends it; so does
    `place`, once somebody else is given it. `leave` is told at the end whether it was completed. Raises as `answer` does."""
    answering = asyncio.create_task(answer)
    gone = asyncio.create_task(client.receive())
    try:
        await asyncio.wait((answering, gone, place), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        answering.cancel()
        _, outcome = await asyncio.gather(gone, answering, return_exceptions=True)
        leave(outcome is True)
    if isinstance(outcome, Exception):
        raise outcome


async def send(
    client: Stream, kind: str, header: Mapping[str, object], payload: Sequence[Buffer] = ()
) -> None:
    """A part of an answer. StreamBroken where the client does not read it."""
    try:
        async with asyncio.timeout(UNREAD_SECONDS + sum(map(len, payload)) / SLOWEST_BYTES_PER_SECOND):
            await client.send(kind, header, payload)
    except TimeoutError:
        client.abort()
        raise StreamBroken(f"{client.remote} does not read its answer") from None


async def send_error(client: Stream, wrong: str | BaseException, **more: object) -> None:
    """What went wrong, in one line."""
    message = wrong if isinstance(wrong, str) else error_line(wrong)
    with suppress(SwarmError):  # the client may have gone as well
        await send(client, "error", {"message": message, **more})
