"""Two transports over real p2pd daemons on loopback."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest
import uvloop
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import p2pd_pb2
from hypothesis import given
from hypothesis import strategies as st
from support.p2p_pair import LOOPBACK, Ends, two

from fusion.runtime.job.protocol import ANSWER_BYTES
from fusion.runtime.peer.announcement import CONTROL_SOCKET
from fusion.swarm.errors import (
    FrameError,
    PeerUnreachable,
    RemoteError,
    StreamBroken,
    StreamClosed,
    TransportError,
    UnknownProtocol,
)
from fusion.swarm.identity import Identity
from fusion.swarm.protocol import PROBE
from fusion.swarm.streams import p2pd
from fusion.swarm.streams.frames import FrameLimits
from fusion.swarm.streams.p2p import P2PTransport, split_address
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.streams.p2pd import CONTENTS, PREFIX, check_ports, make_private_directory, sweep
from fusion.swarm.streams.p2pd_control import framed
from fusion.swarm.transport import UNASKED_BYTES, PeerId, Stream, call

pytestmark = pytest.mark.process

ECHO = "/fusion/echo/1"
NOBODY = Identity.generate().peer_id


async def echo(stream: Stream) -> None:
    stream.allow(1 << 30)
    while True:
        frame = await stream.receive()
        if frame.kind == "fail":
            raise ValueError("no good\nat all")
        if frame.kind == "count":
            await stream.send("count", {"bytes": len(frame.payload)})
        else:
            await stream.send(frame.kind, frame.header, (frame.payload,))


# What crosses the wire.


def test_frames_between_two_peers(place: Path) -> None:
    async def main() -> None:
        async with two(place, ECHO, echo) as (one, other):
            big = os.urandom(5_000_000)
            stream = await one.open(other.peer_id, ECHO)
            assert (stream.remote, stream.protocol) == (other.peer_id, ECHO)
            for body in (b"", b"small", big):
                await stream.send("echo", {"list": (1, 2), "none": None}, (body, b"!"))
                frame = await stream.receive()
                assert (frame.kind, frame.header) == ("echo", {"list": [1, 2], "none": None})
                assert frame.payload == body + b"!"
            await stream.aclose()
            with pytest.raises(RemoteError, match=r"^no good at all$"):
                await call(one, other.peer_id, ECHO, "fail")
            counted = await call(one, other.peer_id, ECHO, "count", {}, (big,))
            assert counted.header == {"bytes": len(big)}
            sent, back = one.traffic()[other.peer_id], other.traffic()[one.peer_id]
            assert sent.sent_bytes == back.received_bytes > 2 * len(big)
            assert sent.received_bytes == back.sent_bytes > len(big)
        assert os.listdir(place) == []

    uvloop.run(main())


@given(size=st.sampled_from([0, 1, 120, 127, 128, 16_383, 16_384, 3_000_000]))
def test_messages_to_p2pd_are_written_as_hivemind_reads_them(size: int) -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        sent = p2pd_pb2.Request(
            type=p2pd_pb2.Request.IDENTIFY, connect=p2pd_pb2.ConnectRequest(peer=bytes(size))
        )
        reader.feed_data(2 * framed(sent))
        for _ in range(2):
            received = p2pd_pb2.Request()
            await read_pbmsg_safe(reader, received)
            assert received == sent

    asyncio.run(main())


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_peer_that_was_dialled_sends_no_more_than_its_protocol_has(place: Path, stripes: int) -> None:
    async def main() -> None:
        async with two(place, PROBE.name, echo, answer_bytes=ANSWER_BYTES) as (one, other):
            stream = await one.open(other.peer_id, PROBE.name, stripes=stripes)
            for size in (UNASKED_BYTES, UNASKED_BYTES + 1):
                await stream.send("echo", {}, (bytes(size),))
            assert len((await stream.receive()).payload) == UNASKED_BYTES
            with pytest.raises(FrameError, match="at most 65536 are allowed now"):
                await stream.receive()

    uvloop.run(main())


def test_it_runs_on_plain_asyncio_too(place: Path) -> None:
    async def main() -> None:
        async with two(place, ECHO, echo) as (one, other):
            reply = await call(one, other.peer_id, ECHO, "echo", {}, (bytes(2_000_000),))
            assert len(reply.payload) == 2_000_000

    asyncio.run(main())
    assert os.listdir(place) == []


def test_what_cannot_be_reached(ends: Ends) -> None:
    async def main(protocol: str) -> None:
        one, other = ends.one, ends.other
        for peer in (one.peer_id, other.peer_id):  # somebody is there, which is not the same
            with pytest.raises(UnknownProtocol) as unknown:
                await one.open(peer, "/fusion/nothing/1")
            assert "\n" not in str(unknown.value) and not isinstance(unknown.value, PeerUnreachable)
        for attempt in (
            one.open(NOBODY, protocol),
            one.open(PeerId("nonsense"), protocol),
            one.connect(f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"),
            one.connect(other.addresses[0].replace(other.peer_id, NOBODY)),  # somebody else lives there
        ):
            with pytest.raises(PeerUnreachable) as caught:
                await attempt
            assert "\n" not in str(caught.value)
        for bad in (
            "",
            "127.0.0.1:4001",
            f"/p2p/{NOBODY}",
            "/ip4/127.0.0.1/tcp/1",
            "/ip4/1.2.3/tcp/1/p2p/x",
        ):
            with pytest.raises(ValueError, match="multiaddr"):
                await one.connect(bad)

    ends.with_handler(echo, main)


def test_an_address_that_is_none_is_a_peer_that_cannot_be_reached(ends: Ends) -> None:
    async def main(protocol: str) -> None:
        one, address, bad = ends.one, ends.other.addresses[0], "/p2p/nobody"
        where = address.rpartition("/p2p/")[0]
        one.learn(NOBODY, [where + bad])  # somebody listens there
        with pytest.raises(PeerUnreachable, match="address"):
            await one.open(NOBODY, protocol)
        await one._dial(ends.other.peer_id, [where + bad, address])  # beside a good one it does no harm

    ends.with_handler(echo, main)


def test_a_dial_that_finds_no_file_left_is_a_peer_that_cannot_be_reached(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(peer: PeerId, addresses: object) -> None:
        raise PeerUnreachable("dial backoff")

    def no_file(host: str, port: int) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main(protocol: str) -> None:
        monkeypatch.setattr(ends.one, "_connect_to", refuses)
        monkeypatch.setattr("fusion.swarm.streams.p2p.forwarded_address", no_file)
        with pytest.raises(PeerUnreachable, match="Too many open files"):
            await ends.one._dial(ends.other.peer_id, ends.other.addresses)

    ends.with_handler(echo, main)


def test_a_stream_to_ourselves_stays_here(ends: Ends) -> None:
    async def main(protocol: str) -> None:
        other = ends.other
        assert await other.connect(other.addresses[0]) == other.peer_id
        reply = await call(other, other.peer_id, protocol, "echo", {"a": 1}, (b"xyz",))
        assert (reply.header, bytes(reply.payload)) == ({"a": 1}, b"xyz")

    ends.with_handler(echo, main)


def test_a_clean_end_and_a_broken_one_differ(ends: Ends) -> None:
    async def main(protocol: str) -> None:
        one, other = ends.one, ends.other
        outcomes: asyncio.Queue[tuple[type, int]] = asyncio.Queue()

        async def drain(stream: Stream) -> None:
            size = 0
            stream.allow(1_000_000)
            try:
                await stream.send("ready")
                while True:
                    size += len((await stream.receive()).payload)
            except TransportError as error:
                outcomes.put_nowait((type(error), size))

        async def gift(stream: Stream) -> None:
            for _ in range(5):
                await stream.send("gift", {}, (bytes(1_000_000),))

        await other.serve("/fusion/drain/1", drain)
        await other.serve("/fusion/gift/1", gift)
        stream = await one.open(other.peer_id, "/fusion/drain/1")
        for _ in range(5):
            await stream.send("k", {}, (bytes(1_000_000),))
        await stream.aclose()
        assert await outcomes.get() == (StreamClosed, 5_000_000)
        stream = await one.open(other.peer_id, "/fusion/drain/1")
        assert (
            await stream.receive()
        ).kind == "ready"  # or the stream might be dropped before it is accepted
        await stream.send("k")
        stream.abort()
        assert await outcomes.get() == (StreamBroken, 0)
        stream = await one.open(other.peer_id, "/fusion/gift/1")  # the handler returns: a clean end
        assert sum([len((await stream.receive()).payload) for _ in range(5)]) == 5_000_000
        with pytest.raises(StreamClosed):
            await stream.receive()

    ends.with_handler(echo, main)


def test_what_was_sent_before_a_close_arrives(ends: Ends) -> None:
    async def main(protocol: str) -> None:
        one, other = ends.one, ends.other
        got: list[int] = []

        async def note(stream: Stream) -> None:
            got.append((await stream.receive()).header["number"])

        await other.serve("/fusion/note/1", note)
        for number in range(50):
            stream = await one.open(other.peer_id, "/fusion/note/1")
            await stream.send("note", {"number": number})
            await stream.aclose()
            assert got[-1:] == [number]

    ends.with_handler(echo, main)


def test_a_frame_over_the_caps_ends_the_stream(place: Path) -> None:
    async def main() -> None:
        async with two(place, ECHO, echo, limits=FrameLimits(payload_bytes=1_000_000)) as (one, other):
            stream = await one.open(other.peer_id, ECHO)
            with pytest.raises(FrameError):
                await stream.send("k", {}, (bytes(1_000_001),))
            await stream.send("k", {}, (bytes(1_000_000),))
            assert len((await stream.receive()).payload) == 1_000_000
            await stream.write_message((5).to_bytes(4, "big") + (1 << 40).to_bytes(8, "big"))  # type: ignore[attr-defined]
            with pytest.raises((StreamBroken, StreamClosed)):
                await stream.receive()
            assert (await call(one, other.peer_id, ECHO, "still here")).kind == "still here"

    uvloop.run(main())


def test_a_strangers_large_payload_is_not_even_read(ends: Ends) -> None:
    async def main(protocol: str) -> None:
        one, other = ends.one, ends.other
        outcomes: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

        async def careful(stream: Stream) -> None:
            hello = await stream.receive()
            if hello.kind == "friend":
                stream.allow(3_000_000)
            try:
                outcomes.put_nowait(("", len((await stream.receive()).payload)))
            except FrameError as error:
                outcomes.put_nowait((str(error), 0))

        await other.serve("/fusion/careful/1", careful)
        for kind in ("friend", "stranger"):
            stream = await one.open(other.peer_id, "/fusion/careful/1")
            await stream.send(kind)
            sending = asyncio.create_task(stream.send("gift", {}, (bytes(3_000_000),)))
            text, size = await outcomes.get()
            if kind == "friend":
                assert size == 3_000_000
            else:
                assert "a payload of 3000000 bytes; at most 65536 are allowed now" in text
                with pytest.raises((StreamBroken, StreamClosed)):
                    await stream.receive()
            await asyncio.wait([sending])
            stream.abort()

    ends.with_handler(echo, main)


def test_a_sender_waits_for_a_reader_that_does_not_read(ends: Ends) -> None:
    async def main(protocol: str) -> None:
        one, other = ends.one, ends.other
        release = asyncio.Event()
        taken = 0

        async def idle(stream: Stream) -> None:
            nonlocal taken
            await release.wait()
            stream.allow(1_000_000)
            while True:
                taken += len((await stream.receive()).payload)

        await other.serve("/fusion/idle/1", idle)
        stream = await one.open(other.peer_id, "/fusion/idle/1")
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while sent < 200_000_000:
                await stream.send("k", {}, (bytes(1_000_000),))
                sent += 1_000_000

        flooding = asyncio.create_task(flood())
        last = -1
        while sent != last:
            last = sent
            await asyncio.sleep(0.2)
        assert sent < 100_000_000  # windows and kernel buffers, not our memory
        release.set()
        while taken < sent or sent == last:
            await asyncio.sleep(0.01)
        flooding.cancel()
        stream.abort()

    ends.with_handler(echo, main)


# Starting.


def test_a_taken_port_is_named(place: Path) -> None:
    async def main(port: int) -> None:
        address = f"/ip4/127.0.0.1/tcp/{port}"
        config = P2PConfig(identity=Identity.generate(), listen=(*LOOPBACK, address), runtime_dir=place)
        with pytest.raises(TransportError, match=f"port {port} of {address} is taken") as caught:
            await P2PTransport.launch(config)
        assert "\n" not in str(caught.value)

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another p2pd holds it
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        uvloop.run(main(taken.getsockname()[1]))
    assert os.listdir(place) == []


def test_what_p2pd_says_when_it_cannot_start_is_passed_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        config = P2PConfig(identity=Identity.generate(), listen=("/ip4/10.255.1.2/tcp/0",), runtime_dir=place)
        with pytest.raises(TransportError, match=r"cannot listen on /ip4/10.255.1.2/tcp/0"):
            await P2PTransport.launch(config)
        monkeypatch.setattr("fusion.swarm.streams.p2pd.check_ports", lambda listen: None)
        with pytest.raises(TransportError, match=r"^p2pd did not start: .*failed to listen on any addresses"):
            await P2PTransport.launch(config)

    uvloop.run(main())
    assert os.listdir(place) == []


def test_an_unusable_runtime_directory(place: Path) -> None:
    (place / "file").write_text("")

    async def main() -> None:
        config = P2PConfig(identity=Identity.generate(), listen=LOOPBACK, runtime_dir=place / "file" / "run")
        with pytest.raises(TransportError, match=r"cannot make a runtime directory in .*/file/run"):
            await P2PTransport.launch(config)

    uvloop.run(main())


def test_two_peers_cannot_share_an_identity(place: Path) -> None:
    async def main() -> None:
        identity = Identity.load_or_create(place / "identity.key")
        config = P2PConfig(identity=identity, listen=LOOPBACK, runtime_dir=place / "run")
        async with P2PTransport.start(config) as one:
            assert one.peer_id == identity.peer_id
            with pytest.raises(TransportError, match="is running already"):
                await P2PTransport.launch(config)
        async with P2PTransport.start(config) as again:
            assert again.addresses[0].endswith(f"/p2p/{identity.peer_id}")

    uvloop.run(main())


def test_a_peer_that_was_not_there_is_reached_as_soon_as_it_is(place: Path) -> None:
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        late = Identity.generate()
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{late.peer_id}"
        config = P2PConfig(identity=Identity.generate(), listen=LOOPBACK, runtime_dir=place)
        async with P2PTransport.start(config) as one:
            with pytest.raises(PeerUnreachable, match=str(port)):
                await one.connect(address)
            seed = P2PConfig(identity=late, listen=(f"/ip4/127.0.0.1/tcp/{port}",), runtime_dir=place)
            async with P2PTransport.start(seed):
                assert await one.connect(address) == late.peer_id

    uvloop.run(main())


def test_settings_are_checked() -> None:
    identity = Identity.generate()
    for settings, named in (
        ({"listen": ()}, "listen"),
        ({"dial_seconds": 0}, "dial_seconds"),
    ):
        with pytest.raises(ValueError, match=named):
            P2PConfig(identity=identity, **settings)  # type: ignore[arg-type]
    for bad in (
        "",
        "4001",
        "/ip4/127.0.0.1",
        "/ip4/127.0.0.1/tcp/x",
        "/ip4/127.0.0.1/tcp/70000",
        "/dns/x/tcp/1",
    ):
        with pytest.raises(ValueError, match="listen address"):
            check_ports((bad,))
    assert split_address(f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}")[1] == NOBODY


def test_a_long_path_falls_back_and_stale_directories_are_swept(place: Path) -> None:
    short = make_private_directory(place / ("long" * 30))
    try:
        assert not short.is_relative_to(place)
        assert short.stat().st_mode & 0o077 == 0
    finally:
        short.rmdir()
    stale, fresh, other = place / f"{PREFIX}stale", place / f"{PREFIX}fresh", place / "other"
    for path in (stale, fresh, other):
        path.mkdir()
        (path / "d.sock").touch()
    for path in (stale, other):
        os.utime(path, (0, 0))
    sweep(place)
    assert (stale.exists(), fresh.exists(), other.exists()) == (False, True, True)


def test_a_folder_of_somebody_s_own_is_not_swept_whatever_it_is_called(place: Path) -> None:
    """A home in /tmp, say, or the sources that a tar file was unpacked to there."""
    home, empty, left, alive = (place / f"{PREFIX}{name}" for name in ("home", "empty", "left", "alive"))
    for path in (home, empty, left, alive):
        path.mkdir()
    (home / "lock").touch()
    (home / "identity").touch()
    for name in CONTENTS:
        (left / name).touch()
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(alive / "d.sock"))  # whose lock was removed by what tidies up temporary folders
        daemon.listen()
        for path in (home, empty, left, alive):
            os.utime(path, (0, 0))
        sweep(place)
    assert [path.exists() for path in (home, empty, left, alive)] == [True, True, False, True]
    assert (home / "identity").exists() and CONTROL_SOCKET in CONTENTS


def test_a_temporary_folder_with_too_long_a_path_is_not_used(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = place / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(p2pd.tempfile, "gettempdir", lambda: str(long))
    monkeypatch.setattr(p2pd, "_SHORTEST_FOLDER", place)
    for parent in (None, long / "longer"):
        made = make_private_directory(parent)
        assert made.parent == place and len(str(made / CONTROL_SOCKET)) < 104
    assert list(long.iterdir()) == []


def test_an_identity_on_a_network_s_disk_can_be_locked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks a file only for whoever may write to it; elsewhere there may be no locks at all, and then no peer runs there."""
    identity = Identity.load_or_create(place / "identity")

    def as_nfs_does(descriptor: int, how: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY) != os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def without_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(p2pd.fcntl, "flock", as_nfs_does)
    p2pd.check_not_running(identity)
    monkeypatch.setattr(p2pd.fcntl, "flock", without_locks)
    with pytest.raises(TransportError, match=r"cannot lock identity file .*: No locks available"):
        p2pd.check_not_running(identity)
