"""One stream to a partner: frames go out in order while it is up; what the other end says there can only be why not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.errors import StreamBroken, SwarmError
from fusion.swarm.transport import Buffer, Stream


@dataclass(frozen=True)
class Ended:
    """How a link came to its end."""

    reason: str
    vanished: bool = False  # the other end is gone without a word


class PartnerLink:
    """Frames for the owner of `claim`, sent by `run` in the order of `post`."""

    def __init__(self, stream: Stream, claim: ClaimRecord) -> None:
        self.stream = stream
        self.claim = claim
        self.sent_bytes = 0  # of payload
        self.idle = asyncio.Event()  # set while nothing waits to be sent
        self.idle.set()
        self._frames: deque[tuple[str, Mapping[str, Any], Sequence[Buffer]]] = deque()
        self._wake = asyncio.Event()

    def post(self, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Queue a frame and return at once."""
        self._frames.append((kind, header, payload))
        self.idle.clear()
        self._wake.set()

    async def run(self) -> Ended:
        """Send until the stream ends."""
        watch = asyncio.ensure_future(self._watch())
        send = asyncio.ensure_future(self._send())
        try:
            done, _ = await asyncio.wait((watch, send), return_when=asyncio.FIRST_COMPLETED)
            # Where both have ended, what the other end said says more than that we could not send.
            return (watch if watch in done else send).result()
        finally:
            for task in (watch, send):
                task.cancel()
            await asyncio.wait((watch, send))

    async def _watch(self) -> Ended:
        try:
            frame = await self.stream.receive()
        except SwarmError as error:
            return _ended(error)
        return Ended(str(frame.header.get("message", "refused"))[:200])

    async def _send(self) -> Ended:
        try:
            while True:
                while self._frames:
                    kind, header, payload = self._frames.popleft()
                    await self.stream.send(kind, header, payload)
                    self.sent_bytes += sum(memoryview(buffer).nbytes for buffer in payload)
                self.idle.set()
                self._wake.clear()
                await self._wake.wait()
        except SwarmError as error:
            return _ended(error)


def _ended(error: SwarmError) -> Ended:
    return Ended(str(error) or "ended", vanished=isinstance(error, StreamBroken))
