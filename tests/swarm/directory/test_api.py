"""The directory: rules that need no network, the gate of a storing node, and real DHT nodes on loopback."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import permutations

import msgpack
import pytest
import uvloop
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st
from support.directory_records import (
    JOB,
    claim_record,
    digest,
    job_record,
    peer_record,
    provider_record,
    raw_seal,
)
from support.processes import below

from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.dht.guard import MAX_JOBS_PER_AUTHOR, StoreGuard
from fusion.swarm.dht.lookup import LookupConfig, Node, NodeReply
from fusion.swarm.dht.values import MAX_SUBKEYS, key_id, parse_values
from fusion.swarm.directory.api import PEER_KEYS
from fusion.swarm.directory.job_order import newest_jobs
from fusion.swarm.directory.keys import jobs_key, key_of, shard, subkey_of
from fusion.swarm.directory.records import Record
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS, MAX_RECORD_BYTES, RECORD_VERSION, seal
from fusion.swarm.errors import PeerUnreachable, RecordError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.streams.p2p import P2PConfig, P2PTransport

ALICE, BOB, MALLORY = Identity.generate(), Identity.generate(), Identity.generate()


@dataclass
class Offer:
    """What is offered to a storing node, by the name of what is wrong with it."""

    what: str
    key: str
    subkey: str
    data: bytes
    expires_at: float


def hostile_offers(now: float) -> list[Offer]:
    """Everything that must be dropped, all about ALICE or by MALLORY, who has a key of her own."""
    alices, mallorys = claim_record(ALICE, score=0.5), claim_record(MALLORY)
    key, soon = key_of(alices), now + 6

    def offer(what: str, data: bytes, subkey: str = MALLORY.peer_id, **changes: object) -> Offer:
        return replace(Offer(what, key, subkey, data, soon), **changes)  # type: ignore[arg-type]

    valid = seal(mallorys, MALLORY, soon)
    return [
        offer("forged", raw_seal(alices, MALLORY, soon), ALICE.peer_id),
        offer("author not the speaker", raw_seal(alices, MALLORY, soon, author=MALLORY.peer_id)),
        offer("another's subkey", valid, ALICE.peer_id),
        offer("another stage", valid, key=key_of(replace(mallorys, stage=1))),
        offer("another kind of key", valid, key=key_of(peer_record(MALLORY))),
        offer("expired", seal(mallorys, MALLORY, now - 30), expires_at=now - 30),
        offer("too far in the future", seal(mallorys, MALLORY, now + 9999), expires_at=now + 9999),
        offer("oversized", raw_seal(mallorys, MALLORY, soon, values={"role": "x" * MAX_RECORD_BYTES})),
        offer("lower version", raw_seal(mallorys, MALLORY, soon, version=RECORD_VERSION - 1)),
        offer("unknown kind", raw_seal(mallorys, MALLORY, soon, kind="king")),
        offer("bad field", raw_seal(mallorys, MALLORY, soon, values={"score": 7.0})),
        offer("unsigned", msgpack.packb([*msgpack.unpackb(valid)[:3], b""])),
        offer("garbage", b"\xc1garbage"),
        offer("empty", b""),
        offer("deep", b"\x91" * 4000),
    ]


# Rules without a network.


def test_of_several_authors_a_job_has_the_highest_term_then_the_last_state_then_step() -> None:
    launched = job_record(MALLORY, state="launching", term=0, step=0)
    waiting = job_record(ALICE, state="launching", term=1, step=0)
    running = job_record(ALICE, term=1, step=0)
    further = job_record(BOB, term=1, step=20)
    done = job_record(ALICE, term=1, step=20, state="done")
    taken_over = job_record(BOB, term=2, step=15)
    order = [launched, waiting, running, further, done, taken_over]
    other = job_record(ALICE, job=digest("other"))
    for last in range(1, len(order) + 1):
        for shuffled in permutations(order[:last][-3:]):
            found = newest_jobs([other, *shuffled])
            assert {record.job: record for record in found}[JOB] == order[last - 1]
            assert len(found) == 2


def test_keys_lie_where_hivemind_puts_them() -> None:
    for key in ("peers/0", f"claims/{JOB}/65536", "ключ"):
        assert key_id(key) == int(DHTID.generate(source=key))


def test_hivemind_s_values_are_read() -> None:
    value = DictionaryDHTValue()
    for subkey, data in [("a", b"1"), (b"bytes", b"2"), ("long", b"x" * (MAX_RECORD_BYTES + 1)), ("b", b"3")]:
        value.store(subkey, data, time.time() + 60)
    value.store("number", 7, time.time() + 60)
    assert parse_values(MSGPackSerializer.dumps(value)) == {"a": b"1", "b": b"3"}


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=100, deadline=None)
def test_garbage_for_a_value_is_refused(data: bytes, wrapped: bool) -> None:
    with pytest.raises(ValueError):
        parse_values(msgpack.packb(msgpack.ExtType(0x50, data)) if wrapped else data)


# The same hostile records at a memory directory and at the gate of a storing node.


@pytest.mark.parametrize("number", range(len(hostile_offers(0.0))))
def test_a_memory_directory_drops_hostile_records(number: int) -> None:
    clock, network = ManualClock(), MemoryNetwork()
    reader = MemoryDirectory(network, BOB, clock)
    offer = hostile_offers(clock.now)[number]

    async def scenario() -> None:
        await MemoryDirectory(network, ALICE, clock).publish(claim_record(ALICE))
        network.store(ALICE.peer_id, offer.key, offer.subkey, offer.data, clock.now)  # past a storing node
        network.replicas[BOB.peer_id].setdefault(offer.key, {})["x"] = (offer.expires_at, offer.data)
        assert await reader.claims(JOB, 0) == (claim_record(ALICE),)
        assert await reader.peers() == ()
        assert await reader.claims(JOB, 1) == ()

    asyncio.run(scenario())


@dataclass
class Offered:
    """As hivemind's DHTRecord."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def offered(offer: Offer) -> Offered:
    key = key_id(offer.key).to_bytes(20, "big")
    until = offer.expires_at + CLOCK_TOLERANCE_SECONDS
    return Offered(key, msgpack.packb(offer.subkey), offer.data, until)


def good_offer(record: Record, author: Identity, now: float) -> Offer:
    return Offer("good", key_of(record), subkey_of(record), seal(record, author, now + 6), now + 6)


@pytest.mark.parametrize("number", range(len(hostile_offers(0.0))))
def test_the_gate_lets_nothing_hostile_in(number: int) -> None:
    guard = StoreGuard(lambda key: set(), lambda: 1e6)
    assert not guard.validate(offered(hostile_offers(1e6)[number]))


def test_the_gate_lets_records_in_for_as_long_as_they_were_signed() -> None:
    guard = StoreGuard(lambda key: set(), lambda: 1e6)
    for record in (claim_record(ALICE), peer_record(ALICE), job_record(ALICE), provider_record(ALICE)):
        offer = offered(good_offer(record, ALICE, 1e6))
        assert guard.validate(offer)
        assert not guard.validate(replace(offer, expiration_time=offer.expiration_time + 1))
        assert not guard.validate(
            replace(offer, subkey=MSGPackSerializer.dumps(None))
        )  # a value without subkeys
        assert not guard.validate(replace(offer, subkey=b""))  # hivemind's mark of a whole dictionary
        assert not guard.validate(replace(offer, key=bytes(20)))


def test_a_key_is_full_at_some_point_but_can_be_renewed() -> None:
    now = 1e6
    renewed = offered(good_offer(claim_record(ALICE), ALICE, now))
    crowd = {f"peer {i}" for i in range(MAX_SUBKEYS - 1)} | {ALICE.peer_id}
    guard = StoreGuard(lambda key: crowd, lambda: now)
    assert guard.validate(renewed)
    assert not guard.validate(offered(good_offer(claim_record(BOB), BOB, now)))
    own = {f"{ALICE.peer_id}/{i}" for i in range(MAX_JOBS_PER_AUTHOR)}
    guard = StoreGuard(lambda key: own, lambda: now)
    assert not guard.validate(offered(good_offer(job_record(ALICE), ALICE, now)))
    assert guard.validate(offered(good_offer(job_record(BOB), BOB, now)))


# Real DHT nodes.


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


async def offer_to(member: Member, taker: Member, offer: Offer) -> bool:
    """Ask another node to store something, as any program on the network can."""
    request = offered(offer)
    protocol = member.directory._protocol
    store = dht_pb2.StoreRequest(
        keys=[request.key],
        subkeys=[request.subkey],
        values=[request.value],
        expiration_time=[request.expiration_time],
        in_cache=[False],
        peer=protocol.node_info,
    )
    answer = await protocol.get_stub(taker.transport.p2p.peer_id).rpc_store(store, timeout=10.0)
    (accepted,) = answer.store_ok
    return bool(accepted)


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
            assert not client.directory._protocol.storage.data
            await client.directory.publish(job_record(client.identity, state="launching", term=0, step=0))
            lead = job_record(two.identity, step=5)
            await two.directory.publish(lead)
            assert await three.directory.job(JOB) == lead
            assert await three.directory.jobs() == (lead,)
            assert await three.directory.job(digest("none")) is None
            for member in (one, two):
                await member.directory.publish(claim_record(member.identity))
            reads = await asyncio.gather(*(three.directory.claims(JOB, stage) for stage in (0, 0, 1)))
            assert [len(claims) for claims in reads] == [2, 2, 0]
            # What is said later counts, even when it was to end sooner.
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
                storage = hostile.directory._protocol.storage
                for subkey in (offer.subkey, "x"):
                    storage.store_subkey(DHTID(key_id(offer.key)), subkey, offer.data, now + 60)
                    storage.store_subkey(DHTID(key_id(key_of(good))), subkey, offer.data, now + 60)
            assert await reader.directory.claims(JOB, 0) == (good,)
            assert await reader.directory.claims(JOB, 1) == ()
            assert await reader.directory.peers() == ()

            # A replay of what was true once.
            old = good_offer(good, honest.identity, now - 1)
            assert time.time() < old.expires_at < now + 6
            assert not await offer_to(hostile, reader, old)
            storage.store_subkey(DHTID(key_id(old.key)), old.subkey, old.data, now + 3600)
            fresh = claim_record(honest.identity, step=99)
            await honest.directory.publish(fresh, ttl_seconds=6)
            assert not await offer_to(hostile, honest, old)
            assert await reader.directory.claims(JOB, 0) == (fresh,)

            # Answers that are no answers at all hide nothing that others hold.
            record = job_record(honest.identity)
            await honest.directory.publish(record)
            place = DHTID(key_id(jobs_key(shard(JOB))))
            for bad in (b"\xc1", MSGPackSerializer.dumps([1, 2]), b"\x91" * 10_000):
                storage.clear()
                storage.store(place, bad, now + 60)
                assert await reader.directory.jobs() == (record,)
            storage.clear()
            poisoned = DictionaryDHTValue()
            poisoned.maxsize = "many"
            poisoned.data = {b"\xff": (b"", float("inf"))}  # type: ignore[dict-item]
            storage.store(place, poisoned, now + 60)
            assert await reader.directory.jobs() == (record,)

    uvloop.run(scenario())


@pytest.mark.process
def test_a_glance_asks_few_nodes_and_tells_what_a_search_would() -> None:
    async def scenario() -> None:
        async with swarm(False, False, False, False) as members:
            reader = members[0].directory
            asked: list[int] = []
            ask = reader._ask

            async def counted(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
                asked.append(len(keys))
                return await ask(node, keys)

            reader._ask = counted  # type: ignore[method-assign]
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
                member.directory._protocol.storage.clear()
            assert {r.peer for r in await reader.peers(max_age_seconds=1e-9)} == everyone
            assert await reader.jobs(max_age_seconds=1e-9) == (job,)
            real = reader.now
            reader.now = lambda: real() + 6.0  # type: ignore[method-assign]
            assert await reader.peers(max_age_seconds=60.0) == await reader.jobs(max_age_seconds=60.0) == ()

    uvloop.run(scenario())


@pytest.mark.process
def test_a_glance_learns_of_nearer_nodes_from_those_it_asks() -> None:
    async def scenario() -> None:
        async with swarm(False, False, False) as members:
            reader, key = members[0].directory, key_id(PEER_KEYS[0])
            await reader.peers(max_age_seconds=1e-9)
            ask, stranger, asked = reader._ask, Node(key, Identity.generate().peer_id), []

            async def named(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
                asked.append(node)
                answer = None if node == stranger else await ask(node, keys)
                return answer and NodeReply(
                    answer.values, {key: [*near, stranger] for key, near in answer.nearest.items()}
                )

            reader._ask = named  # type: ignore[method-assign]
            await reader.peers(max_age_seconds=1e-9)
            assert stranger not in asked
            await reader.peers(max_age_seconds=1e-9)
            assert stranger in asked
            # It did not answer: the others keep the key.
            assert len(reader._holders.of(key, (), time.monotonic())) == 2

    uvloop.run(scenario())


@pytest.mark.process
def test_a_glance_goes_past_nodes_that_are_gone() -> None:
    async def scenario() -> None:
        async with swarm(False, False, False, False) as members:
            reader = members[0].directory
            await reader.jobs(max_age_seconds=1e-9)
            record = job_record(members[1].identity)
            await members[1].directory.publish(record, ttl_seconds=60)
            reader._protocol.storage.clear()
            for member in members[2:]:
                await member.stack.aclose()
            assert await reader.jobs(max_age_seconds=1e-9) == (record,)

    uvloop.run(scenario())


@pytest.mark.process
def test_records_end_when_their_author_said() -> None:
    async def scenario() -> None:
        async with swarm(False, False) as (author, reader):
            await author.directory.publish(peer_record(author.identity), ttl_seconds=5.0)
            (sealed,) = author.directory._stored(key_id(key_of(peer_record(author.identity))))
            assert len(await reader.directory.peers()) == 1
            real = reader.directory.now
            reader.directory.now = lambda: real() + 5.0  # type: ignore[method-assign]
            assert await reader.directory.peers() == ()
            assert sealed in reader.directory._stored(key_id(key_of(peer_record(author.identity))))

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


@pytest.mark.process
def test_clocks_are_read_by_their_middle() -> None:
    async def scenario() -> None:
        async with swarm(False) as (alone,):
            directory = alone.directory
            for offsets, expected in [([0.4], 0.0), ([8.0], 4.0), ([8.0, 8.1], 8.0), ([0.1, 0.2, 9e9], 0.0)]:
                directory._offsets = {Identity.generate().peer_id: offset for offset in offsets}
                assert directory.now() - time.time() == pytest.approx(expected, abs=0.2)

    uvloop.run(scenario())
