"""The directory on real DHT nodes, on loopback."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import uvloop
from support import directory_records as some
from support.directory_records import (
    JOB,
    claim_record,
    digest,
    good_offer,
    hostile_offers,
    job_record,
    peer_record,
)
from support.processes import below

from fusion.swarm.dht import calls
from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.dht.guard import Offer, check_offer
from fusion.swarm.dht.lookup import LookupConfig, Node, NodeReply
from fusion.swarm.dht.record_store import Kept, RecordStore
from fusion.swarm.dht.values import key_id, node_id
from fusion.swarm.dht.wire import FoundAt
from fusion.swarm.directory.api import PEER_KEYS
from fusion.swarm.directory.keys import claims_key, jobs_key, key_of, shard, subkey_of
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS, seal
from fusion.swarm.errors import PeerUnreachable, RecordError
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig

NOWHERE = SimpleNamespace(authorizer=None)  # in the place of a P2P that nothing is sent over


@dataclass
class Member:
    identity: Identity
    transport: P2PTransport
    directory: HivemindDirectory
    stack: AsyncExitStack


@asynccontextmanager
async def swarm(*clients: bool) -> AsyncIterator[list[Member]]:
    """As many members as arguments; the first is where the others join."""
    config = LookupConfig(patience_seconds=3.0)  # a busy machine must not lose an answer
    async with AsyncExitStack() as everything:
        members: list[Member] = []
        for client in clients:
            identity = Identity.generate()
            stack = await everything.enter_async_context(AsyncExitStack())
            listen = ("/ip4/127.0.0.1/tcp/0",)
            transport = await stack.enter_async_context(
                P2PTransport.start(P2PConfig(identity=identity, listen=listen))
            )
            directory = await HivemindDirectory.start(
                transport.p2p, identity, DhtConfig(client=client, lookup=config, call_seconds=10.0)
            )
            stack.push_async_callback(directory.aclose)
            if members:
                await transport.connect(members[0].transport.addresses[0])
                assert await directory.join(members[0].identity.peer_id)
            members.append(Member(identity, transport, directory, stack))
        yield members


@dataclass
class Four:
    """Members and the loop that they live in, for tests of which each looks from a place that the ones before did not."""

    runner: asyncio.Runner
    members: list[Member]


@pytest.fixture(scope="module")
def four() -> Iterator[Four]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        opening = swarm(False, False, False, False)
        yield Four(runner, runner.run(opening.__aenter__()))
        runner.run(opening.__aexit__(None, None, None))


async def offer_to(member: Member, taker: Member, offer: some.Offer, **changes: object) -> bool:
    """Ask another node to store something, as any program on the network can."""
    until = offer.expires_at + CLOCK_TOLERANCE_SECONDS
    place = key_id(offer.key).to_bytes(20, "big")
    asked = Offer(place, msgpack.packb(offer.subkey), offer.data, until)
    (accepted,) = await member.directory._wire.store(taker.identity.peer_id, [asked], 10.0)
    return accepted


def plant(member: Member, key: str, subkey: str, data: bytes, until: float) -> None:
    """A node keeps what it likes."""
    member.directory._service.records._insert((key_id(key), subkey), Kept(data, until, "", ""))


def clear(member: Member) -> None:
    member.directory._service.records = RecordStore()


@pytest.mark.process
def test_records_travel_between_dht_nodes() -> None:
    async def scenario() -> None:
        async with swarm(False, False, False, True) as members:
            for member in members:
                await member.directory.publish(peer_record(member.identity))
            everyone = {member.identity.peer_id for member in members}
            for member in members:
                assert {record.peer for record in await member.directory.peers()} == everyone
            one, two, three, client = members
            # A client uses the DHT and is no part of it.
            for member in members:
                assert client.identity.peer_id not in member.directory.neighbours()
            assert not len(client.directory._service.records)
            await client.directory.publish(job_record(client.identity, state="launching", term=0, step=0))
            lead = job_record(two.identity, step=5)
            await two.directory.publish(lead)
            assert await three.directory.job(JOB) == lead
            assert await three.directory.jobs() == (lead,)
            assert (
                len(await three.directory.job_records(JOB)) == len(await client.directory.job_records()) == 2
            )
            assert await three.directory.job(digest("none")) is None
            for member in (one, two):
                await member.directory.publish(claim_record(member.identity))
            reads = await asyncio.gather(*(three.directory.claims(JOB, stage) for stage in (0, 0, 1)))
            assert [len(claims) for claims in reads] == [2, 2, 0]
            # The later record counts, even when it was to expire sooner.
            released = claim_record(one.identity, role="released")
            await one.directory.publish(released, ttl_seconds=0.5)
            assert released in await client.directory.claims(JOB, 0)
            with pytest.raises(RecordError, match="cannot be signed"):
                await one.directory.publish(claim_record(two.identity))
            with pytest.raises(RecordError, match="ttl_seconds"):
                await one.directory.publish(claim_record(one.identity), ttl_seconds=1e6)
            # A holder that vanishes takes nothing with it that others hold too.
            await two.stack.aclose()
            assert {record.peer for record in await three.directory.peers()} >= everyone - {
                two.identity.peer_id
            }
            assert await client.directory.job(JOB) == lead

    uvloop.run(scenario())


@pytest.mark.process
def test_dht_nodes_and_readers_drop_hostile_records() -> None:
    async def scenario() -> None:
        async with swarm(False, False, False) as (honest, reader, hostile):
            good = claim_record(honest.identity)
            await honest.directory.publish(good, ttl_seconds=6)
            now = time.time()
            for offer in hostile_offers(now):
                assert not await offer_to(hostile, honest, offer), offer.what
                # The hostile node holds it itself, under several subkeys, and answers with it.
                for subkey in (offer.subkey, "x"):
                    plant(hostile, offer.key, subkey, offer.data, now + 60)
                    plant(hostile, key_of(good), subkey, offer.data, now + 60)
            assert await reader.directory.claims(JOB, 0) == (good,)
            assert await reader.directory.claims(JOB, 1) == ()
            assert await reader.directory.peers() == ()

            # A replay of what was true once.
            old = good_offer(good, honest.identity, now - 1)
            assert time.time() < old.expires_at < now + 6
            assert not await offer_to(hostile, reader, old)
            plant(hostile, old.key, old.subkey, old.data, now + 3600)
            fresh = claim_record(honest.identity, step=99)
            await honest.directory.publish(fresh, ttl_seconds=6)
            assert not await offer_to(hostile, honest, old)
            assert await reader.directory.claims(JOB, 0) == (fresh,)

            # Answers that are no answers at all hide nothing that others hold.
            record = job_record(honest.identity)
            await honest.directory.publish(record)
            place = key_id(jobs_key(shard(JOB)))
            for bad in (b"\xc1", msgpack.packb([1, 2]), b"\x91" * 10_000, b"", b"x" * (3 << 20)):
                clear(hostile)
                found = FoundAt(bad, [])
                hostile.directory._service.find = lambda sender, claimed, keys, found=found: (
                    [found] * len(keys)
                )  # type: ignore[method-assign, misc]
                for key in ("providers/1", "providers/2"):
                    assert await reader.directory.records([key], type(record)) == ()
                assert await reader.directory.jobs() == (record,)
                assert place in {key_id(jobs_key(n)) for n in range(16)}
            # Fewer results than keys are asked for again, none at all is no answer, nor are too many.
            del hostile.directory._service.find  # type: ignore[method-assign]
            real = hostile.directory._service.find
            for results in (0, 1, 40):

                def few(sender, claimed, keys, results=results):  # type: ignore[no-untyped-def]
                    return (real(sender, claimed, keys) * 40)[:results]

                hostile.directory._service.find = few  # type: ignore[method-assign]
                assert await reader.directory.jobs() == (record,)

    uvloop.run(scenario())


@pytest.mark.process
def test_a_glance_asks_few_nodes_and_tells_what_a_search_would(four: Four) -> None:
    async def scenario() -> None:
        members = four.members
        reader = members[0].directory
        asked: list[int] = []
        ask = reader._query

        async def counted(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
            asked.append(len(keys))
            return await ask(node, keys)

        reader._query = counted  # type: ignore[method-assign]
        for member in members[:3]:
            await member.directory.publish(peer_record(member.identity))
        everyone = {member.identity.peer_id for member in members[:3]}
        assert {r.peer for r in await reader.peers(max_age_seconds=60.0)} == everyone  # a search
        assert await reader.jobs(max_age_seconds=60.0) == ()
        asked.clear()
        await members[3].directory.publish(peer_record(members[3].identity))
        job = job_record(members[3].identity)
        await members[3].directory.publish(job)
        assert {r.peer for r in await reader.peers(max_age_seconds=60.0)} == everyone
        assert asked == []  # not that old yet
        # All keep all here: one answer tells all of it, of both lists.
        everyone.add(members[3].identity.peer_id)
        assert {r.peer for r in await reader.peers(max_age_seconds=1e-9)} == everyone
        assert asked == [32]
        asked.clear()
        assert await reader.jobs(max_age_seconds=60.0) == (job,)
        assert asked == []
        # What is known stays so until it expires, though nobody may keep it any longer.
        for member in members:
            clear(member)
        assert {r.peer for r in await reader.peers(max_age_seconds=1e-9)} == everyone
        assert await reader.jobs(max_age_seconds=1e-9) == (job,)
        real = reader.now
        reader.now = lambda: real() + 6.0  # type: ignore[method-assign]
        assert await reader.peers(max_age_seconds=60.0) == await reader.jobs(max_age_seconds=60.0) == ()
        reader.now, reader._query = real, ask  # type: ignore[method-assign]

    four.runner.run(scenario())


@pytest.mark.process
def test_a_glance_learns_of_nearer_nodes_from_those_it_asks(four: Four) -> None:
    async def scenario() -> None:
        members = four.members
        reader, key = members[1].directory, key_id(PEER_KEYS[0])
        await reader.peers(max_age_seconds=1e-9)
        ask, stranger, asked = reader._query, Node(key, Identity.generate().peer_id), []

        async def named(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
            asked.append(node)
            answer = None if node == stranger else await ask(node, keys)
            return answer and NodeReply(
                answer.values, {key: [*near, stranger] for key, near in answer.nearest.items()}
            )

        reader._query = named  # type: ignore[method-assign]
        await reader.peers(max_age_seconds=1e-9)
        assert stranger not in asked
        await reader.peers(max_age_seconds=1e-9)
        assert stranger in asked
        # It did not answer: the others keep the key.
        assert len(reader._holders.of(key, (), time.monotonic())) == len(members) - 1
        reader._query = ask  # type: ignore[method-assign]

    four.runner.run(scenario())


@pytest.mark.process
def test_a_glance_goes_past_nodes_that_are_gone(four: Four) -> None:
    """The last that has all four."""

    async def scenario() -> None:
        members = four.members
        reader = members[1].directory
        await reader.jobs(max_age_seconds=1e-9)
        record = job_record(members[0].identity)
        await members[0].directory.publish(record, ttl_seconds=60)
        reader._service.records = RecordStore()
        for member in members[2:]:
            await member.stack.aclose()
        assert await reader.jobs(max_age_seconds=1e-9) == (record,)

    four.runner.run(scenario())


def test_a_search_that_fails_is_told_and_cancels_nobody() -> None:
    async def scenario() -> None:
        identity, peer = Identity.generate(), Identity.generate().peer_id
        p2p: Any = NOWHERE
        directory = HivemindDirectory(p2p, identity, DhtConfig(client=True))
        directory._service.table.seen(Node(node_id(peer), peer))

        async def broken(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
            raise RuntimeError("a fault of ours")

        directory._query = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await directory.jobs()

    asyncio.run(scenario())


def test_a_node_that_does_not_tell_of_a_key_is_not_taken_at_its_word() -> None:
    async def scenario() -> None:
        identity = Identity.generate()
        p2p: Any = NOWHERE
        directory = HivemindDirectory(p2p, identity, DhtConfig(client=True))
        nodes = [Node(node_id(p), p) for p in (Identity.generate().peer_id for _ in range(2))]
        for node in nodes:
            directory._service.table.seen(node)
        record = job_record(identity)
        kept = {key_id(key_of(record)): {subkey_of(record): seal(record, identity, time.time() + 60)}}
        short: list[Node] = []

        async def fake_query(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
            few = keys[: 1 if node in short else None]
            return NodeReply({key: kept.get(key, {}) for key in few}, dict.fromkeys(few, nodes))

        directory._query = fake_query  # type: ignore[method-assign]
        assert await directory.jobs(max_age_seconds=60.0) == (record,)
        for liar in nodes:
            short[:] = [liar]
            directory._cached.clear()
            assert await directory.jobs(max_age_seconds=1e-9) == (record,)

    asyncio.run(scenario())


def test_a_node_that_tells_a_thousand_names_of_its_own_hides_no_job_that_others_tell() -> None:
    async def scenario() -> None:
        p2p: Any = NOWHERE
        directory = HivemindDirectory(p2p, Identity.generate(), DhtConfig(client=True))
        nodes = [Node(node_id(p), p) for p in (Identity.generate().peer_id for _ in range(4))]
        for node in nodes:
            directory._service.table.seen(node)
        until = time.time() + 60
        author, liar = Identity.generate(), nodes[0]
        record = job_record(author)
        key = key_of(record)
        place = key_id(key)
        forged: dict[str, bytes] = {}
        while len(forged) < 1024:
            stranger = Identity.generate()
            its = job_record(stranger)
            forged[subkey_of(its)] = seal(its, stranger, until)
        honest: dict[str, bytes] = {}

        async def fake_query(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
            values = forged if node is liar else honest
            return NodeReply({k: values if k == place else {} for k in keys}, dict.fromkeys(keys, nodes))

        directory._query = fake_query  # type: ignore[method-assign]
        assert len(await directory.records([key], JobRecord, max_age_seconds=60.0)) == 1024
        honest[subkey_of(record)] = seal(record, author, until)
        for _ in range(len(nodes)):
            directory._cached_at.clear()
            listed = await directory.records([key], JobRecord, max_age_seconds=1e-9)
        assert record in listed and len(listed) == 1024

    asyncio.run(scenario())


def test_the_claims_of_one_job_are_read_though_another_s_are_slow() -> None:
    async def scenario() -> None:
        identity, peer = Identity.generate(), Identity.generate().peer_id
        p2p: Any = NOWHERE
        directory = HivemindDirectory(p2p, identity, DhtConfig(client=True))
        directory._service.table.seen(Node(node_id(peer), peer))
        record = claim_record(identity)
        kept = {subkey_of(record): seal(record, identity, time.time() + 6.0)}
        slow, slower = key_id(claims_key(JobId(digest("another job")), 0)), asyncio.Event()

        async def fake_query(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
            if slow in keys:
                await slower.wait()
            return NodeReply({key: kept if key == key_id(key_of(record)) else {} for key in keys}, {})

        directory._query = fake_query  # type: ignore[method-assign]
        other = asyncio.create_task(directory.claims(JobId(digest("another job")), 0))
        async with asyncio.timeout(10):
            assert await directory.claims(JOB, 0) == (record,)
        assert not other.done()
        slower.set()
        assert await other == ()

    asyncio.run(scenario())


def test_a_peer_whose_clock_was_ahead_is_heard_again_once_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        identity, ahead = Identity.generate(), [3600.0]
        clocks = SimpleNamespace(time=lambda: time.time() + ahead[0], monotonic=time.monotonic)
        monkeypatch.setattr(calls, "time", clocks)
        p2p: Any = NOWHERE
        directory = HivemindDirectory(p2p, identity, DhtConfig())
        before, now = (peer_record(identity, free_memory_bytes=free) for free in (1, 2))
        key, subkey = key_of(now), subkey_of(now)
        await directory.publish(before)
        assert await directory.peers() == (before,)
        ahead[0] = 0.0
        assert await directory.peers() == await directory.peers(max_age_seconds=60.0) == ()
        await directory.publish(now)
        (stored,) = directory._service.values(key_id(key)).values()
        place = key_id(key).to_bytes(20, "big")
        others = Offer(place, msgpack.packb(subkey), stored.data, stored.until)
        assert check_offer(others, time.time()) == subkey  # as the nodes check it that keep it as well
        assert await directory.peers() == (now,)

    asyncio.run(scenario())


@pytest.mark.process
def test_records_end_when_their_author_said() -> None:
    async def scenario() -> None:
        async with swarm(False, False) as (author, reader):
            await author.directory.publish(peer_record(author.identity), ttl_seconds=5.0)
            place = key_id(key_of(peer_record(author.identity)))
            (stored,) = author.directory._service.values(place).values()
            assert len(await reader.directory.peers()) == 1
            real = reader.directory.now
            reader.directory.now = lambda: real() + 5.0  # type: ignore[method-assign]
            assert await reader.directory.peers() == ()
            (kept,) = reader.directory._service.values(place).values()
            assert kept.data == stored.data

    uvloop.run(scenario())


@pytest.mark.process
def test_a_node_alone_is_a_swarm_of_one_and_a_client_alone_is_nothing() -> None:
    async def scenario() -> None:
        async with swarm(False) as (alone,):
            await alone.directory.publish(peer_record(alone.identity))
            assert len(await alone.directory.peers()) == 1
            assert alone.directory.neighbours() == () and await alone.directory.refresh() == 0
            assert not await alone.directory.join(Identity.generate().peer_id)
        async with swarm(True) as (client,):
            assert await client.directory.peers() == ()
            with pytest.raises(PeerUnreachable, match="no peer of the swarm"):
                await client.directory.publish(peer_record(client.identity))

    uvloop.run(scenario())


@pytest.mark.process
def test_a_directory_closes_though_its_daemon_is_dead() -> None:
    async def scenario() -> None:
        async with swarm(False, False) as (one, two):
            before = set(below(os.getpid()))
            await two.stack.aclose()
            for process in before & set(below(os.getpid(), lambda process: process.name() == "p2pd")):
                process.kill()
            async with asyncio.timeout(30):
                await one.directory.aclose()

    uvloop.run(scenario())
