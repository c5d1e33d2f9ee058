"""Streams of clients with a large and slow first frame, on a loop whose clock jumps (`support/instant_loop.py`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from fusion.runtime.job.protocol import RUN
from fusion.swarm.errors import StreamBroken
from fusion.swarm.transport import Frame, PeerId

UPLOAD_BYTES = 32 << 20


class Upload:
    """The server's end of a stream. A frame of UPLOAD_BYTES arrives within `seconds`, or stalls after `stops` seconds."""

    protocol, has_received = RUN.name, True

    def __init__(self, peer: str, seconds: float, *, stops: float = math.inf, kind: str = "run") -> None:
        self.remote = PeerId(peer)
        self.said: list[tuple[str, Mapping[str, Any]]] = []
        self.aborted = False
        self.reads = True  # whether the client reads what is sent to it
        self._seconds, self._stops = seconds, stops
        self._frame = Frame(kind, {"model": "m", "arrays": []})
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._whole = False

    @property
    def arrived_bytes(self) -> int:
        passed = min(self._loop.time() - self._began, self._stops, self._seconds)
        return int(UPLOAD_BYTES * passed / self._seconds)

    async def announced(self) -> int:
        return UPLOAD_BYTES

    async def receive(self) -> Frame:
        if self._whole or self._stops < self._seconds:
            await asyncio.wait([self._ended])
        done, _ = await asyncio.wait([self._ended], timeout=self._began + self._seconds - self._loop.time())
        if done:
            raise StreamBroken("it was dropped")
        self._whole = True
        return self._frame

    def allow(self, payload_bytes: int) -> None:
        assert payload_bytes >= UPLOAD_BYTES or self.protocol != RUN.name

    async def send(self, kind: str, header: Mapping[str, Any] | None = None, payload: Any = ()) -> None:
        if not self.reads:
            await asyncio.wait([self._ended])
        if self._ended.done():
            raise StreamBroken("it was dropped")
        self.said.append((kind, header or {}))

    async def aclose(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True
        if not self._ended.done():
            self._ended.set_result(None)


class Silent(Upload):
    """It says nothing at all."""

    async def announced(self) -> int:
        await asyncio.wait([self._ended])
        raise StreamBroken("it was dropped")

    async def receive(self) -> Frame:
        await asyncio.wait([self._ended])
        raise StreamBroken("it was dropped")
