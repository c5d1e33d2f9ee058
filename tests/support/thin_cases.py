"""Test cases of a thin transport against a real p2pd, one function each. They run in a process of their own, since hivemind and
py-libp2p must not be loaded together (`support.thin_peer`).

    python thin_cases.py

Each line of its input is the name of a function; the answer is a line of JSON with what went wrong, and what was written to stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.warm_start import Zygote, warm_start

from fusion.swarm.errors import FrameError, PeerUnreachable, StreamBroken, StreamClosed, UnknownProtocol
from fusion.swarm.identity import Identity
from fusion.swarm.swarm_key import Authorizer, new_key
from fusion.swarm.thin.transport import ThinConfig, ThinTransport
from fusion.swarm.transport import PeerId, call

PEER = Path(__file__).with_name("thin_peer.py")
ECHO = "/fusion/echo/1"
SECONDS = 120.0
CASE_SECONDS = 300.0


@dataclass
class Far:
    """A peer in a process of its own, and what it prints."""

    address: str
    process: asyncio.subprocess.Process

    @property
    def peer_id(self) -> PeerId:
        return PeerId(self.address.rpartition("/")[2])

    async def tells(self) -> dict[str, str]:
        assert self.process.stdout is not None
        told: dict[str, str] = json.loads(await self.process.stdout.readline())
        return told


@asynccontextmanager
async def peer(*key: str) -> AsyncIterator[Far]:
    with tempfile.TemporaryDirectory(prefix="ft-") as folder:  # short enough for sockets
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PEER), folder, *key),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        far = Far("", process)
        try:
            far.address = (await far.tells())["address"]
            yield far
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


@asynccontextmanager
async def client(
    *ways: str, authorizer: Authorizer | None = None, identity: Identity | None = None
) -> AsyncIterator[ThinTransport]:
    transport = ThinTransport(
        ThinConfig(identity=identity or Identity.generate(), ways=ways, authorizer=authorizer)
    )
    try:
        yield transport
    finally:
        await transport.aclose()


async def frames_of_any_size_and_the_three_ends_of_a_stream() -> None:
    async with peer() as far, client(far.address) as near, asyncio.timeout(SECONDS):
        assert await near.gateway() == far.peer_id
        stream = await near.open(far.peer_id, ECHO)
        assert await far.tells() == {"from": near.peer_id}
        for size in (0, 1, 70_000, 3 << 20):
            payload = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            sending = asyncio.create_task(stream.send("data", {"size": size}, [payload]))
            frame = await stream.receive()
            await sending
            assert (frame.kind, frame.header, bytes(frame.payload)) == ("data", {"size": size}, payload)
        # They end it, we end it, we drop it.
        await stream.send("bye")
        with pytest.raises(StreamClosed):
            await stream.receive()
        other = await near.open(far.peer_id, ECHO)
        assert await far.tells() == {"from": near.peer_id}
        assert (await asyncio.gather(other.send("hi"), other.receive()))[1].kind == "hi"
        await other.aclose()
        assert await far.tells() == {"end": "StreamClosed"}
        third = await near.open(far.peer_id, ECHO)
        assert (await asyncio.gather(third.send("hi"), third.receive()))[1].kind == "hi"
        assert await far.tells() == {"from": near.peer_id}
        third.abort()
        assert await far.tells() == {"end": "StreamBroken"}


async def many_streams_at_once_go_over_one_connection() -> None:
    async with peer() as far, client(far.address) as near, asyncio.timeout(SECONDS):
        await near.gateway()
        payloads = [bytes([n]) * 200_000 for n in range(24)]
        answers = await asyncio.gather(
            *(call(near, far.peer_id, ECHO, "data", {}, [payload]) for payload in payloads)
        )
        assert [bytes(answer.payload) for answer in answers] == payloads
        assert near._dialer._connections.keys() == {far.peer_id}


async def an_end_of_the_client_or_of_the_peer_is_seen_at_the_other_side() -> None:
    async with asyncio.timeout(SECONDS):
        async with peer() as far:
            async with client(far.address) as near:
                stream = await near.open(await near.gateway(), ECHO)
                assert (await asyncio.gather(stream.send("hi"), stream.receive()))[1].kind == "hi"
            assert await far.tells() == {"from": near.peer_id}
            assert await far.tells() == {"end": "StreamBroken"}
            with pytest.raises(StreamClosed):
                await stream.receive()
            async with client(far.address) as near:
                stream = await near.open(await near.gateway(), ECHO)
                await stream.send("hi")
                await stream.receive()
                for process in (
                    psutil.Process(far.process.pid),
                    *psutil.Process(far.process.pid).children(True),
                ):
                    process.send_signal(signal.SIGKILL)
                with pytest.raises(StreamBroken):
                    await stream.receive()
                with pytest.raises(PeerUnreachable):
                    await near.open(far.peer_id, ECHO)


async def what_cannot_be_reached_is_said_in_one_line() -> None:
    async with peer() as far, asyncio.timeout(SECONDS):
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{far.peer_id}"
        where = far.address.rpartition("/p2p/")[0]
        async with client(dead) as near:
            with pytest.raises(PeerUnreachable, match=r"no peer answers at .*refused"):
                await near.gateway()
        async with client(f"{where}/p2p/{Identity.generate().peer_id}") as near:
            with pytest.raises(PeerUnreachable, match="no peer answers at"):
                await near.gateway()
        # Of several the first that answers is taken, and what it does not speak is told from what is not there.
        async with client(dead, far.address) as near:
            assert await near.gateway() == far.peer_id
            with pytest.raises(UnknownProtocol):
                await near.open(far.peer_id, "/fusion/unheard-of/1")
            with pytest.raises(PeerUnreachable, match="nobody says"):
                await near.open(Identity.generate().peer_id, ECHO)
            with pytest.raises(FrameError):
                await call(near, far.peer_id, ECHO, "data", {}, [bytes((64 << 20) + 1)])


async def a_listener_that_is_no_libp2p_host_is_given_up_on() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 1000)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    nobody = f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}"
    async with server, asyncio.timeout(SECONDS), client(nobody) as near:
        with pytest.raises(PeerUnreachable, match="no peer answers at"):
            await near.gateway()


async def a_peer_is_dialled_at_all_of_its_addresses() -> None:
    """A peer's addresses in its own network come first; dialled from elsewhere, nobody answers there."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    async with peer() as far, silent, client(gone) as near, asyncio.timeout(30):
        await near._started()
        from fusion.swarm.thin import connection

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(connection, "DIAL_SECONDS", 3600.0)
            private = f"/ip4/127.0.0.1/tcp/{silent.sockets[0].getsockname()[1]}/p2p/{far.peer_id}"
            near.learn(far.peer_id, (private, far.address))
            assert await near.gateway() == far.peer_id
            assert (await call(near, far.peer_id, ECHO, "hi")).kind == "hi"


async def a_connection_on_which_nothing_comes_any_more_is_replaced() -> None:
    """The network vanishes, as when a laptop wakes up elsewhere. TCP would retransmit for a quarter of an hour."""
    deaf, ways = asyncio.Event(), list[asyncio.Task[None]]()
    async with peer() as far, asyncio.timeout(SECONDS):
        port = int(far.address.split("/")[4])

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bool) -> None:
            while data := await reader.read(1 << 16):
                if not (first and deaf.is_set()):
                    writer.write(data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            first, (inward, outward) = not ways, await asyncio.open_connection("127.0.0.1", port)
            ways.append(asyncio.create_task(pass_on(reader, outward, first)))
            ways.append(asyncio.create_task(pass_on(inward, writer, first)))

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        way = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}/p2p/{far.peer_id}"
        async with server, client(way) as near:
            stream = await near.open(await near.gateway(), ECHO)
            assert (await asyncio.gather(stream.send("hi"), stream.receive()))[1].kind == "hi"
            from fusion.swarm.thin import connection

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(connection, "OPEN_SECONDS", 1.0)
                deaf.set()
                with pytest.raises(PeerUnreachable, match="no answer"):
                    await near.open(far.peer_id, ECHO)
            assert (await call(near, far.peer_id, ECHO, "hi")).kind == "hi"
            assert len(ways) == 4 and not stream.broke, "what is under way is not ended for it"
        await asyncio.gather(*ways, return_exceptions=True)


async def members_of_a_closed_swarm_are_answered_and_nobody_else() -> None:
    with tempfile.TemporaryDirectory() as folder:
        key, ours = new_key(Path(folder) / "swarm.key"), Identity.generate()
        async with peer(str(Path(folder) / "swarm.key")) as far, asyncio.timeout(SECONDS):
            member = Authorizer(key, ours.peer_id)
            async with client(far.address, authorizer=member, identity=ours) as near:
                await near.gateway()
                assert (await call(near, far.peer_id, ECHO, "hi")).kind == "hi"
                assert near.has_received_from(far.peer_id)
            async with client(far.address) as near:
                await near.gateway()
                with pytest.raises(StreamBroken):
                    await call(near, far.peer_id, ECHO, "hi")
                assert not near.has_received_from(far.peer_id)


async def uvloop_is_as_good_as_the_standard_loop() -> None:
    import uvloop

    def other() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(frames_of_any_size_and_the_three_ends_of_a_stream())

    await asyncio.to_thread(other)


def run(case: str) -> dict[str, str]:
    """What went wrong, "" where nothing did, and what was written to stderr meanwhile."""
    wrong = ""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            asyncio.run(globals()[case]())
        except BaseException:
            wrong = traceback.format_exc()
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return {"wrong": wrong, "stderr": file.read().decode()}


def main() -> None:
    zygote = Zygote(PEER.stem)
    try:
        with warm_start(zygote):
            for line in sys.stdin:
                faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
                told = run(line.strip())
                faulthandler.cancel_dump_traceback_later()
                print(json.dumps(told), flush=True)
    finally:
        zygote.close()


if __name__ == "__main__":
    main()
