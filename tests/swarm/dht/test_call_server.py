"""Calls of others: answered over real daemons, and bounded where they do not end."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError, read_pbmsg_safe
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from support.p2p_pair import Ends, opened

from fusion.swarm.dht.call_server import Caller, CallLimits, CallServer, Method
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2pd_control import framed
from fusion.swarm.streams.peer_ids import to_bytes, to_hivemind
from fusion.swarm.transport import PeerId

MOST = 1 << 20  # bytes of a request
names = (f"Test.rpc_{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    with opened() as pair:
        yield pair


class Ground:
    """A method that the second of two peers serves, and who called it."""

    def __init__(self, ends: Ends, server: CallServer, name: str, callers: list[Caller]) -> None:
        self.ends, self.server, self.name, self.callers = ends, server, name, callers

    async def from_p2pd(
        self, peer: PeerId, address: str = "/ip4/127.0.0.1/tcp/1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A call as p2pd hands it over, of which nothing but that has come."""
        reader, writer = await asyncio.open_unix_connection(str(self.server._path))
        info = p2pd_pb2.StreamInfo(peer=to_bytes(peer), addr=Multiaddr(address).to_bytes(), proto=self.name)
        writer.write(framed(info))
        return reader, writer

    def request(self, data: bytes) -> bytes:
        call = p2pd_pb2.CallUnaryRequest(peer=b"whoever", proto=self.name, data=data)
        return framed(p2pd_pb2.PersistentConnectionRequest(callId=uuid.uuid4().bytes, callUnary=call))


async def answer_of(reader: asyncio.StreamReader) -> bytes | None:
    """None where the call was dropped."""
    reply = p2pd_pb2.PersistentConnectionRequest()
    try:
        async with asyncio.timeout(20):
            await read_pbmsg_safe(reader, reply)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    response: bytes = reply.unaryResponse.response or reply.unaryResponse.error
    return response


def served(ends: Ends, work: Callable[[Ground], Awaitable[None]], **limits: float) -> None:
    @asynccontextmanager
    async def ground() -> AsyncIterator[Ground]:
        callers: list[Caller] = []

        def answer(caller: Caller, data: bytes) -> bytes:
            callers.append(caller)
            if data == b"refused":
                raise ValueError("not that")
            return data[::-1] if len(data) > 1 else b"much" * (1 << 18)

        name = next(names)
        server = await CallServer.start(
            ends.other.p2p.daemon,
            {name: Method(answer, MOST)},
            CallLimits(**limits),  # type: ignore[arg-type]
        )
        try:
            yield Ground(ends, server, name, callers)
        finally:
            await server.aclose()

    async def main() -> None:
        async with asyncio.timeout(60), ground() as made:
            await work(made)

    ends.runner.run(main())


def test_a_call_is_answered_and_its_error_told(ends: Ends) -> None:
    async def work(ground: Ground) -> None:
        async def call(node_id: bytes) -> bytes:
            info = await ends.one.p2p.call_protobuf_handler(
                to_hivemind(ends.other.peer_id), ground.name, dht_pb2.NodeInfo(node_id=node_id), _Plain
            )
            answer: bytes = info
            return answer

        packed = dht_pb2.NodeInfo(node_id=b"some").SerializeToString()
        assert await call(b"some") == packed[::-1]
        large = await call(bytes(range(256)) * 3000)
        assert len(large) > 256 * 3000
        assert {caller.peer for caller in ground.callers} == {ends.one.peer_id}
        while ground.server._calls:
            await asyncio.sleep(0.01)
        assert not ground.server._counts and not ground.server._bytes

    served(ends, work)


class _Plain:
    @staticmethod
    def FromString(data: bytes) -> bytes:
        return data


def test_an_error_goes_to_the_caller_as_hivemind_sends_it(ends: Ends) -> None:
    async def work(ground: Ground) -> None:
        control = ends.one.p2p._client.control
        with pytest.raises(P2PHandlerError, match=r"^ValueError\('not that'\)$"):
            await control.call_unary_handler(to_hivemind(ends.other.peer_id), ground.name, b"refused")

    served(ends, work)


def test_what_follows_a_request_is_passed_over(ends: Ends) -> None:
    async def work(ground: Ground) -> None:
        reader, writer = await ground.from_p2pd(Identity.generate().peer_id)
        writer.write(ground.request(b"abc") + b"and more")
        assert await answer_of(reader) == b"cba"

    served(ends, work)


@pytest.mark.parametrize(
    "sent", [b"\xff" * 9, b"\x00", framed(p2pd_pb2.PersistentConnectionRequest(callId=b"1"))]
)
def test_what_is_no_call_is_dropped(ends: Ends, sent: bytes) -> None:
    async def work(ground: Ground) -> None:
        reader, writer = await ground.from_p2pd(Identity.generate().peer_id)
        writer.write(sent)
        assert await answer_of(reader) is None
        assert not ground.callers

    served(ends, work)


def test_a_request_over_the_cap_is_dropped_before_it_has_come(ends: Ends) -> None:
    async def work(ground: Ground) -> None:
        reader, writer = await ground.from_p2pd(Identity.generate().peer_id)
        writer.write(ground.request(bytes(MOST + 1000))[:100])
        assert await answer_of(reader) is None

    served(ends, work)


def test_a_call_that_does_not_end_is_dropped_in_time(ends: Ends) -> None:
    async def work(ground: Ground) -> None:
        half = await ground.from_p2pd(Identity.generate().peer_id)
        half[1].write(ground.request(b"abc" * 1000)[:500])
        silent = await asyncio.open_unix_connection(str(ground.server._path))
        for reader, _ in (half, silent):
            assert await answer_of(reader) is None
        assert not ground.server._calls and not ground.server._counts and not ground.server._bytes

    served(ends, work, seconds=0.3)


def test_the_oldest_call_gives_way_and_whoever_speaks_at_once_is_answered(ends: Ends) -> None:
    async def work(ground: Ground) -> None:
        held = [await ground.from_p2pd(Identity.generate().peer_id) for _ in range(20)]
        reader, writer = await ground.from_p2pd(Identity.generate().peer_id)
        writer.write(ground.request(b"abc"))
        assert await answer_of(reader) == b"cba"
        for reader, _ in held[:4]:
            assert await answer_of(reader) is None
        assert len(ground.server._calls) <= 16

    served(ends, work, in_all=16)


def test_a_peer_and_a_public_network_have_shares(ends: Ends) -> None:
    async def work(ground: Ground) -> None:
        async def refused(peer: PeerId, address: str) -> bool:
            reader, writer = await ground.from_p2pd(peer, address)
            writer.write(ground.request(b"abc"))
            return await answer_of(reader) is None

        greedy, crowd = Identity.generate().peer_id, [Identity.generate().peer_id for _ in range(7)]
        held = [await ground.from_p2pd(greedy) for _ in range(3)]
        held += [await ground.from_p2pd(peer, "/ip4/9.9.9.9/tcp/1") for peer in crowd[:6]]
        while ground.server._counts[greedy] < 3 or ground.server._counts["9.9.9.0/24"] < 6:
            await asyncio.sleep(0.01)
        assert await refused(greedy, "/ip4/127.0.0.1/tcp/1")
        assert await refused(crowd[6], "/ip4/9.9.9.8/tcp/2")
        assert not await refused(crowd[6], "/ip4/9.9.8.9/tcp/2")
        held[0][1].close()
        while ground.server._counts[greedy] >= 3:
            await asyncio.sleep(0.01)
        assert not await refused(greedy, "/ip4/127.0.0.1/tcp/1")

    served(ends, work, per_peer=3, per_subnet=6)


def test_bytes_of_requests_have_a_share_each_and_a_limit(ends: Ends) -> None:
    async def work(ground: Ground) -> None:
        async def begin(peer: PeerId) -> asyncio.StreamReader:
            reader, writer = await ground.from_p2pd(peer)
            writer.write(ground.request(bytes(1000))[:100])
            return reader

        greedy = Identity.generate().peer_id
        first, second = await begin(greedy), await begin(greedy)
        assert await answer_of(await begin(greedy)) is None
        others = [await begin(Identity.generate().peer_id) for _ in range(4)]
        for given_way in (first, second):
            assert await answer_of(given_way) is None
        reader, writer = await ground.from_p2pd(greedy)
        writer.write(ground.request(b"abc"))
        assert await answer_of(reader) == b"cba"
        assert ground.server._bytes.total() <= 4500 and len(others) == 4

    served(ends, work, peer_bytes=2500, bytes_in_all=4500)


async def unread_call(ground: Ground) -> asyncio.StreamWriter:
    """A call of the first peer's for a megabyte of which it reads nothing; to be aborted."""
    control_path = str(ground.ends.one._daemon.control_path)
    reader, writer = await asyncio.open_unix_connection(control_path, limit=1024)
    peer = to_bytes(ground.ends.other.peer_id)
    opening = p2pd_pb2.StreamOpenRequest(peer=peer, proto=[ground.name], timeout=5)
    writer.write(framed(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)))
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    assert response.type == p2pd_pb2.Response.OK
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(ground.request(b""))
    return writer


def test_a_peer_that_does_not_read_its_answers_is_hung_up_on(ends: Ends) -> None:
    """p2pd would keep its part of each for as long as the connection lasts."""

    async def work(ground: Ground) -> None:
        writer = await unread_call(ground)
        while not any(call.unread for call in ground.server._calls):
            await asyncio.sleep(0.01)
        while ends.one.peer_id in await ends.other._list_connected():
            await asyncio.sleep(0.05)
        assert not ground.server._calls
        writer.transport.abort()

    served(ends, work, seconds=0.5)
    ends.runner.run(ends.one.connect(ends.other.addresses[0]))


def test_a_peer_whose_answers_give_way_unread_is_hung_up_on(ends: Ends) -> None:
    """Long before any of them is late."""

    async def work(ground: Ground) -> None:
        writers = []
        for call in range(1, 7):
            writers.append(await unread_call(ground))
            while len(ground.callers) < call:
                await asyncio.sleep(0.01)
            if call < 6:  # three of them have given way
                assert ends.one.peer_id in await ends.other._list_connected()
        while ends.one.peer_id in await ends.other._list_connected():
            await asyncio.sleep(0.05)
        for writer in writers:
            writer.transport.abort()

    served(ends, work, seconds=300.0, bytes_in_all=5 << 19)
    ends.runner.run(ends.one.connect(ends.other.addresses[0]))
