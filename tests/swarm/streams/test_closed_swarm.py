"""Streams and calls of the DHT in a closed swarm, over real p2pd daemons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from support.directory_records import peer_record
from support.p2p_pair import LOOPBACK

from fusion.swarm.dht.directory import HivemindDirectory
from fusion.swarm.errors import ClosedSwarm, StreamBroken, StreamClosed
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.swarm_key import Authorizer
from fusion.swarm.transport import Stream, call

pytestmark = pytest.mark.process
ECHO = "/test/echo/1"
KEY = Identity.generate()


@asynccontextmanager
async def peers(
    place: Path, *keys: Identity | None
) -> AsyncIterator[list[tuple[P2PTransport, HivemindDirectory]]]:
    """A peer for each key; all are connected with the first."""

    async def echo(stream: Stream) -> None:
        stream.allow(1 << 24)
        while True:
            frame = await stream.receive()
            await stream.send(frame.kind, frame.header, [frame.payload])

    async with AsyncExitStack() as stack:
        found = []
        for key in keys:
            identity = Identity.generate()
            gate = None if key is None else Authorizer(key, identity.peer_id)
            config = P2PConfig(identity=identity, listen=LOOPBACK, runtime_dir=place, authorizer=gate)
            transport = await stack.enter_async_context(P2PTransport.start(config))
            directory = await HivemindDirectory.start(transport.p2p, identity)
            found.append((transport, await stack.enter_async_context(directory)))
            await transport.serve(ECHO, echo)
            if len(found) > 1:
                await transport.connect(found[0][0].addresses[0])
        yield found


def test_members_speak_as_in_an_open_swarm(place: Path) -> None:
    async def main() -> None:
        async with peers(place, KEY, KEY) as [(one, _), (other, _)]:
            for _ in range(3):
                assert (await call(other, one.peer_id, ECHO, "x", {"n": 1})).header == {"n": 1}
            large = bytes(range(256)) * 4096 * 4
            for stripes in (1, 3):
                stream = await other.open(one.peer_id, ECHO, stripes=stripes)
                await asyncio.gather(stream.send("a", {}, [large]), stream.send("b", {"m": 2}))
                got = {frame.kind: frame for frame in [await stream.receive(), await stream.receive()]}
                assert bytes(got["a"].payload) == large and got["b"].header == {"m": 2}
                await stream.aclose()
            here = await other.open(other.peer_id, ECHO)
            await here.send("to ourselves")
            assert (await here.receive()).kind == "to ourselves"

    uvloop.run(main())


@pytest.mark.parametrize("stranger", [None, Identity.generate()])
@pytest.mark.parametrize("member_first", [True, False])
def test_nobody_speaks_across_swarms(place: Path, stranger: Identity | None, member_first: bool) -> None:
    """Whoever opens the stream: a stranger gets nothing of a member's, a member believes nothing of a stranger."""
    keys = (KEY, stranger) if member_first else (stranger, KEY)

    async def main() -> None:
        async with peers(place, *keys) as [(one, _), (other, theirs)]:
            for stripes in (1, 2):
                with pytest.raises((StreamBroken, StreamClosed)):
                    stream = await other.open(one.peer_id, ECHO, stripes=stripes)
                    try:
                        await stream.send("x", {}, [b"y" * 100_000])
                        raise AssertionError(await stream.receive())
                    finally:
                        stream.abort()
            silent = await other.open(one.peer_id, ECHO)
            await silent.aclose()  # an end mark, and no frame
            with pytest.raises(ClosedSwarm):
                await theirs.join(one.peer_id)

    uvloop.run(main())


def test_a_directory_of_members_knows_members_only(place: Path) -> None:
    async def main() -> None:
        async with peers(place, KEY, KEY, None) as [(one, ours), (two, others), (stranger, theirs)]:
            assert await others.join(one.peer_id)
            record = peer_record(two_identity := others._identity)  # type: ignore[arg-type]
            await others.publish(record)
            assert await ours.peers() == (record,) and two_identity.peer_id == two.peer_id
            with pytest.raises(ClosedSwarm):
                await theirs.join(one.peer_id)
            await theirs.publish(peer_record(theirs._identity))  # type: ignore[arg-type]
            assert await ours.peers() == (record,) and await theirs.peers() != (record,)
            assert set(ours.neighbours()) == {two.peer_id} and set(others.neighbours()) == {one.peer_id}
            assert stranger.peer_id not in (*ours.neighbours(), *others.neighbours())

    uvloop.run(main())
