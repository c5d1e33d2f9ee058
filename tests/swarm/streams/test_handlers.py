"""Streams that others opened: how many of a public network, and for how long they may be idle."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import uvloop
from support.p2p_pair import two

from fusion.runtime.job.protocol import IDLE_SECONDS, PROTOCOLS
from fusion.swarm.errors import StreamBroken
from fusion.swarm.streams import handlers as module
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.frames import DEFAULT_LIMITS
from fusion.swarm.streams.handlers import Handlers
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.subnets import subnet_of
from fusion.swarm.transport import PeerId, Stream

ECHO = "/test/echo/1"


async def echo(stream: Stream) -> None:
    while True:
        await stream.send((await stream.receive()).kind)


def stream(peer: str, subnet: str | None) -> FrameStream:
    made = FrameStream(DEFAULT_LIMITS, TrafficCounter(), lambda *_: None, PeerId(peer), ECHO)
    made.subnet = subnet
    return made


def test_every_protocol_has_a_deadline() -> None:
    assert all(0 < protocol.idle_seconds <= 24 * 3600 for protocol in PROTOCOLS)
    assert set(IDLE_SECONDS) == {protocol.name for protocol in PROTOCOLS}
    assert 0 < module.FIRST_FRAME_SECONDS < min(IDLE_SECONDS.values())


def test_a_public_network_has_its_share_however_many_ids_it_makes_up() -> None:
    async def main() -> None:
        handlers = Handlers(per_peer=2, per_subnet=3)
        handlers.add(ECHO, echo)
        subnet = subnet_of("/ip4/9.9.9.9/tcp/1")
        assert subnet == "9.9.9.0/24"
        crowd = [stream(f"id-{n}", subnet) for n in range(5)]
        near = [stream(f"near-{n}", None) for n in range(5)]
        for each in (*crowd, *near, other := stream("other", "8.8.8.0/24")):
            handlers.accept(each)
        assert [each._closed for each in crowd] == [False] * 3 + [True] * 2
        assert not any(each._closed for each in (*near, other)), "nor those whose network nobody knows"
        await handlers.aclose()
        assert not handlers._running and not handlers._open

    asyncio.run(main())


def test_one_behind_a_relay_is_not_counted_as_its_neighbour() -> None:
    assert subnet_of("/ip4/9.9.9.9/tcp/1/p2p/Qm1/p2p-circuit") is None


@pytest.mark.parametrize("taken", [True, False])
def test_a_large_first_frame_has_time_where_its_handler_takes_it(
    monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    monkeypatch.setattr(module, "FIRST_FRAME_SECONDS", 0.1)

    async def main() -> None:
        loop, ends = asyncio.get_running_loop(), list[FrameStream]()
        found: asyncio.Future[int] = loop.create_future()

        async def take(stream: Stream) -> None:
            size = await stream.announced()
            if taken:
                stream.allow(size)
            else:
                await ends[1].lost
            found.set_result(len((await stream.receive()).payload))

        for end in socket.socketpair():
            end.setblocking(False)
            _, made = await loop.create_connection(lambda: stream("a", None), sock=end)
            made.allow(1000)
            await made.write_message(b"\x00")
            ends.append(made)
        one, two = ends
        handlers = Handlers()
        handlers.add(ECHO, take)
        head, (payload,), size = one.encode("large", {}, [bytes(1_000_000)])
        await one.write_message(head + bytes(payload[:1000]))
        handlers.accept(two)
        async with asyncio.timeout(20):
            while handlers._silent:
                await asyncio.sleep(0.01)
            if taken:
                await one.write_message(bytes(payload[1000:]))
                assert await found == size
            else:
                with pytest.raises(StreamBroken):
                    await one.receive()
        one.abort()
        await handlers.aclose()

    asyncio.run(main())


@pytest.mark.process
def test_a_stream_that_lies_idle_is_dropped_and_one_in_use_is_not(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_CHECK_SECONDS", 0.02)

    async def main() -> None:
        async with two(place, ECHO, echo, idle_seconds={ECHO: 0.5}) as (one, other):
            idle, used = [await one.open(other.peer_id, ECHO) for _ in range(2)]
            for each in (idle, used):
                await each.send("x")
                await each.receive()

            async def use() -> None:
                while True:
                    await used.send("y")
                    await used.receive()

            using = asyncio.create_task(use())
            with pytest.raises(StreamBroken):
                await idle.receive()
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)
            assert not used.lost.done()  # type: ignore[attr-defined]
            async with asyncio.timeout(60):
                await used.lost  # type: ignore[attr-defined]

    uvloop.run(main())
