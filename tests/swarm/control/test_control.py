"""Commands that use the swarm through the running peer's control socket: a real socket, peers in memory behind it."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop
from support.directory_records import claim_record, job_record, link_record, peer_record, provider_record

from fusion.runtime.job.protocol import PROTOCOLS
from fusion.swarm.claims.leases import Leases
from fusion.swarm.control.client import ControlTransport, Elsewhere
from fusion.swarm.control.directory import ControlDirectory
from fusion.swarm.control.server import LIMITS, ControlConfig, ControlServer, splice
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import PeerUnreachable, StreamBroken, StreamClosed
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.protocol import CONTROL, WireProtocol
from fusion.swarm.streams import frames
from fusion.swarm.streams.frame_parser import delimited
from fusion.swarm.streams.memory_stream import BUFFERED_BYTES, stream_pair
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.thin.transport import ThinConfig
from fusion.swarm.transport import PeerId, Stream, Transport, call

ECHO = "/fusion/echo/1"
HELLO = delimited(CONTROL.name.encode())


@dataclass
class World:
    """Two peers of a network in memory; commands attach to `here`."""

    network: MemoryNetwork
    here: MemoryTransport
    there: MemoryTransport
    identities: tuple[Identity, Identity]
    directory: MemoryDirectory
    server: ControlServer

    async def attach(self, elsewhere: Elsewhere | None = None) -> ControlTransport:
        return await ControlTransport.attach(self.server.path, elsewhere)


@asynccontextmanager
async def world(
    config: ControlConfig | None = None, clock: Callable[[], float] = time.time
) -> AsyncIterator[World]:
    network, one, two = MemoryNetwork(), Identity.generate(), Identity.generate()
    # Not pytest's folder, whose name may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="fc-") as folder:
        async with (
            MemoryTransport(network, one.peer_id) as here,
            MemoryTransport(network, two.peer_id) as there,
        ):
            directory = MemoryDirectory(network, one, clock)
            async with ControlServer(here, directory, Path(folder) / "c.sock", config) as server:
                for transport in (here, there):
                    await transport.serve(ECHO, echo)
                yield World(network, here, there, (one, two), directory, server)
            assert not server.path.exists()


async def echo(stream: Stream) -> None:
    stream.allow(1 << 30)
    while True:
        frame = await stream.receive()
        if frame.kind == "bye":
            await stream.send("last")
            return
        await stream.send(frame.kind, frame.header, [frame.payload])


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_streams_go_through_the_peer_to_others_and_to_itself(run: object) -> None:
    async def main() -> None:
        async with world() as w:
            command = await w.attach()
            assert command.through == w.here.peer_id and command.addresses == w.here.addresses
            for peer in (w.here.peer_id, w.there.peer_id):
                large = os.urandom(24 << 20)
                reply = await call(command, peer, ECHO, "hi", {"n": [1, 2]}, [large])
                assert (reply.kind, reply.header, bytes(reply.payload)) == ("hi", {"n": [1, 2]}, large)
                stream = await command.open(peer, ECHO)
                await stream.send("bye")
                assert (await stream.receive()).kind == "last"
                with pytest.raises(StreamClosed):
                    await stream.receive()
            await command.aclose()

    run(main())  # type: ignore[operator]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_whatever_a_peer_may_be_told_and_answer_goes_to_a_command_too(protocol: WireProtocol) -> None:
    largest = max(protocol.payload_bytes or 0, protocol.answer_bytes)
    assert largest <= min(
        LIMITS.payload_bytes, ThinConfig(identity=Identity.generate(), ways=("",)).limits.payload_bytes
    )


def test_a_command_goes_by_the_clock_of_its_peer_and_sees_who_holds_a_stage() -> None:
    """A claim that ends at no time would be nobody's, and whoever judges by owners would go by strangers."""

    async def main() -> None:
        async with world(clock=lambda: time.time() + 1000.0) as w:
            me = w.identities[0]
            claim = claim_record(me, role="owner")
            await w.directory.publish(claim)
            directory = ControlDirectory(await w.attach())
            leases = Leases(PeerId(""), directory)
            assert await leases.owner(claim.job, claim.stage) == claim
            assert abs(directory.now() - time.time() - 1000.0) < 5.0

    asyncio.run(main())


def test_only_this_user_may_use_the_socket() -> None:
    async def main() -> None:
        async with world() as w:
            assert stat.S_IMODE(w.server.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(w.server.path.parent.stat().st_mode) == 0o700

    asyncio.run(main())


def test_the_directory_is_the_peers_own() -> None:
    async def main() -> None:
        async with world() as w:
            me = w.identities[0]
            peer, job, claim = peer_record(me), job_record(me), claim_record(me)
            link, provider = link_record(me), provider_record(me)
            directory = ControlDirectory(await w.attach())
            assert await directory.job(job.job) is None and await directory.peers() == ()
            for record in (peer, job, claim, link, provider):
                await w.directory.publish(record)
            assert await directory.peers() == (peer,)
            assert await directory.jobs() == (job,) and await directory.job(job.job) == job
            assert await directory.job_records() == (job,) == await directory.job_records(job.job)
            assert await directory.job_records(JobId("0" * 64)) == ()
            (found,) = await directory.claims(claim.job, claim.stage)
            (there,) = await w.directory.claims(claim.job, claim.stage)
            assert found == claim and found.expires_at == there.expires_at > directory.now()
            assert await directory.links() == (link,)
            assert await directory.providers(provider.digest) == (provider,)
            with pytest.raises(PeerUnreachable):
                await directory.publish(peer)

    asyncio.run(main())


def test_a_peer_that_cannot_be_reached_is_named() -> None:
    async def main() -> None:
        async with world() as w:
            command = await w.attach()
            assert await command.connect(w.there.addresses[0]) == w.there.peer_id
            with pytest.raises(PeerUnreachable, match="does not speak"):
                await command.open(w.there.peer_id, "/fusion/nothing/1")
            w.network.kill(w.there.peer_id)
            with pytest.raises(PeerUnreachable, match="cannot reach"):
                await command.open(w.there.peer_id, ECHO)
            with pytest.raises(PeerUnreachable, match="cannot reach"):
                await command.connect(w.there.addresses[0])

    asyncio.run(main())


def test_a_stream_breaks_where_the_peer_behind_it_vanishes_and_where_the_command_does() -> None:
    async def main() -> None:
        async with world() as w:
            ended = asyncio.get_running_loop().create_future()

            async def watch(stream: Stream) -> None:
                try:
                    await stream.receive()
                except (StreamBroken, StreamClosed) as error:
                    ended.set_result(type(error))

            await w.there.serve("/fusion/watch/1", watch)
            command = await w.attach()
            stream = await command.open(w.there.peer_id, "/fusion/watch/1")
            stream.abort()  # as a killed process looks
            assert await ended is StreamBroken
            stream = await command.open(w.there.peer_id, ECHO)
            w.network.kill(w.there.peer_id)
            with pytest.raises(StreamBroken):
                await stream.receive()

    asyncio.run(main())


def test_a_reader_that_does_not_read_holds_up_the_sender() -> None:
    async def main() -> None:
        a, b, counters = PeerId("a"), PeerId("b"), (TrafficCounter(), TrafficCounter())
        sender, one = stream_pair(a, b, ECHO, LIMITS, counters)
        two, reader = stream_pair(a, b, ECHO, LIMITS, counters)
        for end in (one, two, reader):
            end.allow(LIMITS.payload_bytes)
        between = asyncio.create_task(splice(one, two))
        sent = 0

        async def send() -> None:
            nonlocal sent
            for _ in range(100):
                await sender.send("x", {}, [bytes(1 << 20)])
                sent += 1

        sending = asyncio.create_task(send())
        for _ in range(2000):
            await asyncio.sleep(0)
        assert sent <= 2 * (BUFFERED_BYTES >> 20) + 2
        for _ in range(100):
            assert (await reader.receive()).kind == "x"
        await sending
        await sender.aclose()
        await between
        with pytest.raises(StreamClosed):
            await reader.receive()

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff\xff",  # a greeting that is too long
        delimited(b"/fusion/control/99"),
        HELLO + b"\xff" * 64,  # lengths beyond every cap
        HELLO + frames.encode("nonsense", {}, ())[0],
        HELLO + frames.encode("open", {"peer": 3}, ())[0],
        HELLO + frames.encode("open", {"peer": "x" * 5000, "protocol": ECHO}, ())[0],
        HELLO + frames.encode("claims", {"job": "zz", "stage": -1}, ())[0],
        HELLO
        + frames.encode("hello", {}, [bytes(1 << 20)])[0]
        + bytes(1 << 20),  # a payload nobody asked for
        HELLO[:4],  # half a greeting
        HELLO + frames.encode("hello", {}, ())[0][:-1],  # half a frame
    ],
)
def test_whatever_a_client_says_the_peer_goes_on(sent: bytes) -> None:
    async def main() -> None:
        async with world(ControlConfig(first_seconds=0.2)) as w:
            reader, writer = await asyncio.open_unix_connection(str(w.server.path))
            writer.write(sent)
            received = b""
            with suppress(ConnectionError):
                while b"error" not in received and (more := await reader.read(1 << 16)):
                    received += more  # it greets, says what is wrong or hangs up
            writer.close()
            assert (await w.attach()).through == w.here.peer_id

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_no_more_connections_than_allowed(run: object) -> None:
    async def main() -> None:
        async with world(ControlConfig(connections=3)) as w:
            idle = [await asyncio.open_unix_connection(str(w.server.path)) for _ in range(3)]
            one_more, _ = await asyncio.open_unix_connection(str(w.server.path))
            assert await one_more.read() == b""  # hung up on
            with pytest.raises(PeerUnreachable):
                await w.attach()
            for _, writer in idle:
                writer.close()
            while True:  # the peer learns of it a moment later
                try:
                    await w.attach()
                    return
                except PeerUnreachable:
                    await asyncio.sleep(0)

    run(main())  # type: ignore[operator]


def test_connections_that_have_ended_count_no_more() -> None:
    async def main() -> None:
        async with world(ControlConfig(connections=3)) as w:
            for _ in range(10):  # each with two connections of its own
                command = await w.attach()
                assert (await call(command, w.there.peer_id, ECHO, "hi")).kind == "hi"
                await command.aclose()

    asyncio.run(main())


def test_no_peer_answers_where_none_runs() -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="fc-") as folder:
            left = Path(folder) / "c.sock"
            with pytest.raises(PeerUnreachable, match="no peer answers"):
                await ControlTransport.attach(left)
            server = await asyncio.start_unix_server(lambda r, w: None, str(left))
            server.close()  # a socket that nobody listens at, as a killed process leaves it
            left.touch()
            with pytest.raises(PeerUnreachable, match="no peer answers"):
                await ControlTransport.attach(left)

    asyncio.run(main())


def test_a_command_whose_peer_ends_goes_on_elsewhere() -> None:
    async def main() -> None:
        async with world() as w:
            moves = 0

            async def elsewhere() -> tuple[Transport, Directory]:
                nonlocal moves
                moves += 1
                return w.there, MemoryDirectory(w.network, w.identities[1])

            command, lost = await w.attach(elsewhere), await w.attach()
            record = peer_record(w.identities[0])
            await w.directory.publish(record)
            stream = await command.open(w.there.peer_id, ECHO)
            await w.server.aclose()
            with pytest.raises(StreamBroken):
                await stream.receive()
            assert (await call(command, w.there.peer_id, ECHO, "hi")).kind == "hi"
            assert await ControlDirectory(command).peers() == (record,)
            assert moves == 1
            with pytest.raises(PeerUnreachable, match="has stopped"):
                await ControlDirectory(lost).peers()
            with pytest.raises(PeerUnreachable, match="has stopped"):
                await lost.open(w.there.peer_id, ECHO)
            await command.aclose()

    asyncio.run(main())


def test_a_way_that_could_not_be_opened_is_tried_again() -> None:
    async def main() -> None:
        async with world() as w:
            ways: list[Transport] = []

            async def elsewhere() -> tuple[Transport, Directory]:
                if not ways:
                    raise PeerUnreachable("nobody is there yet")
                return ways[0], MemoryDirectory(w.network, w.identities[1])

            command = await w.attach(elsewhere)
            await w.server.aclose()
            for _ in range(2):
                with pytest.raises(PeerUnreachable, match="nobody is there yet"):
                    await command.open(w.there.peer_id, ECHO)
            ways.append(w.there)
            assert (await call(command, w.there.peer_id, ECHO, "hi")).kind == "hi"
            await command.aclose()

    asyncio.run(main())
