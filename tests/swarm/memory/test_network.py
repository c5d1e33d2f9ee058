from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from fusion.swarm.directory.keys import claims_key, key_of, subkey_of
from fusion.swarm.directory.records import ClaimRecord, JobId, JobRecord, PeerRecord
from fusion.swarm.directory.sealing import seal
from fusion.swarm.errors import (
    PeerUnreachable,
    RecordError,
    RemoteError,
    StreamBroken,
    StreamClosed,
    UnknownProtocol,
)
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.streams.handlers import Handlers
from fusion.swarm.streams.memory_stream import BUFFERED_BYTES, stream_pair
from fusion.swarm.transport import PeerId, Stream, Traffic, call

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
ECHO = "/fusion/echo/1"


async def echo(stream: Stream) -> None:
    stream.allow(1 << 30)
    while True:
        frame = await stream.receive()
        if frame.kind == "fail":
            raise ValueError("no good\nat all")
        if frame.kind == "bug":
            raise KeyError("surprise")
        await stream.send(frame.kind, frame.header, [frame.payload])


def test_a_call_between_two_peers() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with MemoryTransport(network, A) as one, MemoryTransport(network, B) as two:
            await two.serve(ECHO, echo)
            reply = await call(one, B, ECHO, "hi", {"list": (1, 2)}, [b"ab", b"c"])
            assert (reply.kind, reply.header, bytes(reply.payload)) == ("hi", {"list": [1, 2]}, b"abc")
            there, back = one.traffic()[B], two.traffic()[A]
            assert there == Traffic(back.received_bytes, back.sent_bytes) and there.sent_bytes > 3

    asyncio.run(main())


def test_a_peer_reaches_itself() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with MemoryTransport(network, A) as one:
            await one.serve(ECHO, echo)
            assert (await call(one, A, ECHO, "hi")).kind == "hi"

    asyncio.run(main())


def test_a_handlers_error_reaches_the_caller_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with MemoryTransport(network, A) as one, MemoryTransport(network, B) as two:
            await two.serve(ECHO, echo)
            with pytest.raises(RemoteError, match=r"^no good at all$"):
                await call(one, B, ECHO, "fail")
            with pytest.raises(RemoteError, match="KeyError: 'surprise'"):
                await call(one, B, ECHO, "bug")
            assert (await call(one, B, ECHO, "hi")).kind == "hi"  # the peer goes on

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_addresses_and_unknown_peers() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        async with MemoryTransport(network, A) as one, MemoryTransport(network, B) as two:
            assert await one.connect(two.addresses[0]) == B
            for bad in ("", "b", "/p2p/b", "/memory/b/p2p/", "/memory/b/p2p/b/x"):
                with pytest.raises(ValueError, match="multiaddr"):
                    await one.connect(bad)
            with pytest.raises(PeerUnreachable):
                await one.connect("/memory/c/p2p/c")
            with pytest.raises(PeerUnreachable):
                await one.open(C, ECHO)
            with pytest.raises(UnknownProtocol, match="does not speak"):
                await one.open(B, ECHO)
            with pytest.raises(ValueError, match="already"):
                MemoryTransport(network, A)
        with pytest.raises(PeerUnreachable):
            await one.open(B, ECHO)

    asyncio.run(main())


def test_the_three_ends_of_a_stream() -> None:
    async def main() -> None:
        one, two = stream_pair(A, B, ECHO)
        await one.send("last")
        await one.aclose()
        assert (await two.receive()).kind == "last"
        with pytest.raises(StreamClosed, match="a closed"):
            await two.receive()
        with pytest.raises(StreamClosed, match="we closed"):
            await one.receive()
        with pytest.raises(StreamClosed):
            await two.send("too late")

        one, two = stream_pair(A, B, ECHO)
        waiting = asyncio.create_task(two.receive())
        await asyncio.sleep(0)
        one.abort()
        with pytest.raises(StreamBroken):
            await waiting

    asyncio.run(main())


def test_a_sender_waits_for_a_reader_that_does_not_read() -> None:
    async def main() -> None:
        one, two = stream_pair(A, B, ECHO)
        two.allow(100_000)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await one.send("k", {}, [bytes(100_000)])
                sent += 1

        flooding = asyncio.create_task(flood())
        for _ in range(50):
            await asyncio.sleep(0)
        assert sent == BUFFERED_BYTES // 100_000
        await two.receive()
        for _ in range(5):
            await asyncio.sleep(0)
        assert sent == BUFFERED_BYTES // 100_000 + 1
        two.abort()
        with pytest.raises(StreamBroken):
            await flooding
        big = asyncio.create_task(one.send("k"))
        with pytest.raises(StreamBroken):
            await big
        one, two = stream_pair(A, B, ECHO)
        await one.send("k", {}, [bytes(2 * BUFFERED_BYTES)])  # one frame always fits

    asyncio.run(main())


def test_a_payload_is_a_copy() -> None:
    async def main() -> None:
        one, two = stream_pair(A, B, ECHO)
        payload = bytearray(b"aaa")
        await one.send("k", {}, [payload])
        payload[:] = b"bbb"
        assert bytes((await two.receive()).payload) == b"aaa"

    asyncio.run(main())


def test_a_partition_breaks_what_crosses_it_and_heals() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        one, two, three = (MemoryTransport(network, peer) for peer in (A, B, C))
        async with one, two, three:
            for transport in (one, two, three):
                await transport.serve(ECHO, echo)
            across, inside = await one.open(C, ECHO), await one.open(B, ECHO)
            network.partition([A, B], [C])
            with pytest.raises(StreamBroken):
                await across.receive()
            with pytest.raises(PeerUnreachable):
                await three.open(B, ECHO)
            await inside.send("still")
            assert (await inside.receive()).kind == "still"
            network.heal()
            assert (await call(three, B, ECHO, "hi")).kind == "hi"

    asyncio.run(main())


def test_a_strangers_large_payload_is_refused_until_the_handler_allows_it() -> None:
    async def main() -> None:
        network = MemoryNetwork()

        async def careful(stream: Stream) -> None:
            if (await stream.receive()).kind == "friend":
                stream.allow(100_000)
            await stream.send("got", {"size": len((await stream.receive()).payload)})

        async with MemoryTransport(network, A) as one, MemoryTransport(network, B) as two:
            await two.serve(ECHO, careful)
            for kind in ("friend", "stranger"):
                stream = await one.open(B, ECHO)
                await stream.send(kind)
                await stream.send("gift", {}, [bytes(100_000)])
                if kind == "friend":
                    assert (await stream.receive()).header["size"] == 100_000
                else:
                    with pytest.raises(StreamBroken):
                        await stream.receive()

    asyncio.run(main())


def test_a_killed_peer_stops_and_its_streams_break() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        stopped = asyncio.Event()

        async def patient(stream: Stream) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        async with MemoryTransport(network, A) as one:
            two = MemoryTransport(network, B)
            await two.serve(ECHO, patient)
            stream = await one.open(B, ECHO)
            await asyncio.sleep(0)
            network.kill(B)
            with pytest.raises(StreamBroken):
                await stream.receive()
            await stopped.wait()
            for attempt in (one.open(B, ECHO), two.open(A, ECHO)):
                with pytest.raises(PeerUnreachable):
                    await attempt

    asyncio.run(main())


def test_one_peer_cannot_open_streams_without_end() -> None:
    async def main() -> None:
        handlers = Handlers(per_peer=2)
        release = asyncio.Event()

        async def wait(stream: Stream) -> None:
            await release.wait()

        handlers.add(ECHO, wait)
        near = []
        for _ in range(3):
            ours, theirs = stream_pair(A, B, ECHO)
            handlers.accept(theirs)
            near.append(ours)
        with pytest.raises(StreamBroken):
            await near[2].receive()
        release.set()
        with pytest.raises(StreamClosed):
            await near[0].receive()
        await asyncio.sleep(0)
        ours, theirs = stream_pair(A, B, ECHO)
        handlers.accept(theirs)
        with pytest.raises(StreamClosed):  # there is room again
            await ours.receive()
        with pytest.raises(ValueError, match="already served"):
            handlers.add(ECHO, wait)
        await handlers.aclose()

    asyncio.run(main())


# The directory.

ONE, TWO, THREE = Identity.generate(), Identity.generate(), Identity.generate()
JOB = JobId("ab" * 32)


def claim(identity: Identity, term: int = 1) -> ClaimRecord:
    return ClaimRecord(
        job=JOB, stage=0, peer=identity.peer_id, role="owner", term=term, score=1.0, step=0, load=0.0
    )


def job(identity: Identity, term: int, step: int) -> JobRecord:
    return JobRecord(
        job=JOB,
        name="demo",
        kind="train",
        state="running",
        term=term,
        step=step,
        lead=identity.peer_id,
        stages=2,
        snapshot=None,
        snapshot_step=0,
        author=identity.peer_id,
    )


def peer(identity: Identity) -> PeerRecord:
    return PeerRecord(
        peer=identity.peer_id,
        name="x",
        addresses=(),
        role="peer",
        device="cpu",
        flops_per_second=1.0,
        memory_bytes=1,
        free_memory_bytes=1,
        software="0",
        opset=1,
        started_at=0.0,
    )


def test_records_are_seen_by_others_until_they_expire() -> None:
    async def main() -> None:
        network, clock = MemoryNetwork(), ManualClock()
        one, two = MemoryDirectory(network, ONE, clock), MemoryDirectory(network, TWO, clock)
        await one.publish(claim(ONE), ttl_seconds=6)
        await one.publish(peer(ONE), ttl_seconds=20)
        await two.publish(peer(TWO), ttl_seconds=20)
        assert await two.claims(JOB, 0) == (claim(ONE),)
        assert await two.claims(JOB, 1) == ()
        assert {record.peer for record in await one.peers()} == {ONE.peer_id, TWO.peer_id}
        clock.advance(5)
        assert await two.claims(JOB, 0)
        clock.advance(2)
        assert await two.claims(JOB, 0) == () and await one.claims(JOB, 0) == ()
        assert len(await one.peers()) == 2

    asyncio.run(main())


def test_readers_get_the_newest_job_record() -> None:
    async def main() -> None:
        network, clock = MemoryNetwork(), ManualClock()
        one, two = MemoryDirectory(network, ONE, clock), MemoryDirectory(network, TWO, clock)
        await one.publish(job(ONE, term=1, step=9))
        await two.publish(job(TWO, term=2, step=8))
        assert await one.job(JOB) == job(TWO, term=2, step=8)
        assert await one.jobs() == (job(TWO, term=2, step=8),)
        assert await one.job(JobId("cd" * 32)) is None

    asyncio.run(main())


def test_forged_and_replayed_records_are_dropped() -> None:
    async def main() -> None:
        network, clock = MemoryNetwork(), ManualClock()
        one, two = MemoryDirectory(network, ONE, clock), MemoryDirectory(network, TWO, clock)
        with pytest.raises(RecordError):
            await one.publish(claim(TWO))
        old = claim(ONE, term=1)
        sealed = seal(old, ONE, clock() + 6)
        await one.publish(old)
        clock.advance(2)
        await one.publish(replace(old, term=2))
        key, subkey = key_of(old), subkey_of(old)
        network.store(TWO.peer_id, key, subkey, sealed, clock())  # a replay of the first record
        network.store(TWO.peer_id, key, subkey, sealed[:-1] + b"?", clock())
        network.store(TWO.peer_id, claims_key(JOB, 7), subkey, sealed, clock())
        assert [record.term for record in await two.claims(JOB, 0)] == [2]
        assert await two.claims(JOB, 7) == ()
        network.replica(TWO.peer_id)[key][subkey] = (9e9, sealed[:-1] + b"?")  # a storing node that lies
        assert await two.claims(JOB, 0) == ()
        assert [record.term for record in await one.claims(JOB, 0)] == [2]

    asyncio.run(main())


def test_a_partition_hides_new_records_and_newcomers_see_old_ones() -> None:
    async def main() -> None:
        network, clock = MemoryNetwork(), ManualClock()
        one, two = MemoryDirectory(network, ONE, clock), MemoryDirectory(network, TWO, clock)
        network.partition([ONE.peer_id], [TWO.peer_id])
        await one.publish(claim(ONE))
        assert await one.claims(JOB, 0) and not await two.claims(JOB, 0)
        three = MemoryDirectory(network, THREE, clock)
        assert await three.claims(JOB, 0) == (claim(ONE),)
        network.heal()
        await one.publish(claim(ONE, term=2))
        assert await two.claims(JOB, 0) == (claim(ONE, term=2),)
        network.kill(ONE.peer_id)
        await one.publish(claim(ONE, term=3))
        assert await two.claims(JOB, 0) == (claim(ONE, term=2),)
        await two.aclose()

    asyncio.run(main())


def test_whoever_speaks_gets_in_however_many_silent_streams_are_open() -> None:
    async def main() -> None:
        handlers = Handlers(silent=4)

        async def answer(stream: Stream) -> None:
            frame = await stream.receive()
            await stream.send(frame.kind)

        handlers.add(ECHO, answer)
        silent = []
        for number in range(10):
            ours, theirs = stream_pair(PeerId(f"stranger {number}"), B, ECHO)
            handlers.accept(theirs)
            silent.append(ours)
        ours, theirs = stream_pair(A, B, ECHO)
        handlers.accept(theirs)
        await ours.send("hello")
        assert (await ours.receive()).kind == "hello"
        for stream in silent[:7]:
            with pytest.raises(StreamBroken):
                await stream.receive()
        await silent[-1].send("late")
        assert (await silent[-1].receive()).kind == "late"
        await handlers.aclose()

    asyncio.run(main())


def test_a_stream_on_which_nothing_is_said_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.swarm.streams.handlers.FIRST_FRAME_SECONDS", 0.01)

    async def main() -> None:
        handlers = Handlers()

        async def answer(stream: Stream) -> None:
            frame = await stream.receive()
            await asyncio.sleep(0.05)  # it may take its time to answer
            await stream.send(frame.kind)
            await stream.receive()

        handlers.add(ECHO, answer)
        speaks, theirs = stream_pair(A, B, ECHO)
        handlers.accept(theirs)
        await speaks.send("hello")
        silent, theirs = stream_pair(C, B, ECHO)
        handlers.accept(theirs)
        with pytest.raises(StreamBroken):
            await silent.receive()
        assert (await speaks.receive()).kind == "hello"
        await handlers.aclose()

    asyncio.run(main())


def test_no_number_of_identities_opens_streams_without_end() -> None:
    async def main() -> None:
        handlers = Handlers(in_all=3)

        async def wait(stream: Stream) -> None:
            await stream.receive()
            await asyncio.Event().wait()

        handlers.add(ECHO, wait)
        near = []
        for number in range(4):
            ours, theirs = stream_pair(PeerId(f"stranger {number}"), B, ECHO)
            handlers.accept(theirs)
            near.append(ours)
        with pytest.raises(StreamBroken):
            await near[3].receive()
        await near[0].send("still there")
        await handlers.aclose()

    asyncio.run(main())
