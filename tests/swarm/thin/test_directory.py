"""The directory as a client without the DHT has it: a peer's, over streams in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from support.directory_records import claim_record, job_record, link_record, peer_record, provider_record

from fusion.swarm.dht.request_budget import BudgetConfig
from fusion.swarm.directory.keys import jobs_key, peers_key, shard
from fusion.swarm.directory.sealing import seal
from fusion.swarm.errors import (
    FrameError,
    PeerUnreachable,
    RemoteError,
    SwarmError,
    UnknownProtocol,
)
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.protocol import DIRECTORY
from fusion.swarm.thin import directory_server, remote_directory
from fusion.swarm.thin.directory_server import BUSY, CLIENT, MAX_KEYS, DirectoryServer
from fusion.swarm.thin.remote_directory import RemoteDirectory
from fusion.swarm.transport import Frame, Handler, PeerId, Stream, call

NOW = 1_700_000_000.0


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


@dataclass
class Served:
    """A peer's directory, with the keys that were queried."""

    directory: MemoryDirectory
    queried: list[list[str]] = field(default_factory=list)

    def now(self) -> float:
        return self.directory.now()

    async def sealed_under(self, keys: Sequence[str]) -> list[list[bytes]]:
        self.queried.append(list(keys))
        return await self.directory.sealed_under(keys)


@dataclass
class World:
    network: MemoryNetwork
    peer: Identity
    published: MemoryDirectory
    served: Served
    client: MemoryTransport
    directory: RemoteDirectory
    doubted: list[PeerId] = field(default_factory=list)
    learned: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)


@asynccontextmanager
async def world(
    handler: Handler | None = None, client_clock: Clock | None = None, clock: Clock | None = None
) -> AsyncIterator[World]:
    """`handler` instead of an honest server."""
    network, peer, asker = MemoryNetwork(), Identity.generate(), Identity.generate()
    async with (
        MemoryTransport(network, peer.peer_id) as there,
        MemoryTransport(network, asker.peer_id) as here,
    ):
        published = MemoryDirectory(network, peer, clock or Clock())
        served = Served(published)
        await there.serve(DIRECTORY.name, handler or DirectoryServer(served, Clock()).serve_stream)
        made: World

        async def gateway() -> PeerId:
            if peer.peer_id in made.doubted:
                raise PeerUnreachable("nobody answers")
            return peer.peer_id

        directory = RemoteDirectory(
            here,
            gateway,
            lambda peer: made.doubted.append(peer),
            lambda peer, addresses: made.learned.update({peer: tuple(addresses)}),
            client_clock or Clock(),
        )
        made = World(network, peer, published, served, here, directory)
        try:
            yield made
        finally:
            await directory.aclose()


def test_every_kind_of_record_comes_as_it_was_published() -> None:
    async def main() -> None:
        async with world() as w:
            job, claim = job_record(w.peer), claim_record(w.peer)
            known = [peer_record(w.peer), job, claim, link_record(w.peer), provider_record(w.peer)]
            for record in known:
                await w.published.publish(record)
            seen = w.directory
            assert await seen.peers() == (known[0],) and await seen.links() == (known[3],)
            assert await seen.job_records() == await seen.jobs() == (job,) and await seen.job(job.job) == job
            (got,) = await seen.claims(claim.job, claim.stage)
            assert (got.peer, got.term) == (claim.peer, claim.term) and got.expires_at > NOW
            assert await seen.providers(known[4].digest) == (known[4],)  # type: ignore[attr-defined]
            assert await seen.claims(claim.job, claim.stage + 1) == ()
            assert w.learned == {w.peer.peer_id: known[0].addresses}  # type: ignore[attr-defined]

    asyncio.run(main())


def test_what_is_asked_at_the_same_moment_goes_in_as_few_questions_as_have_room() -> None:
    async def main() -> None:
        async with world() as w:
            claim = claim_record(w.peer)
            await w.published.publish(claim)
            found = await asyncio.gather(*(w.directory.claims(claim.job, n) for n in range(MAX_KEYS + 6)))
            assert [len(each) for each in found] == [int(n == claim.stage) for n in range(MAX_KEYS + 6)]
            assert [len(keys) for keys in w.served.queried] == [MAX_KEYS, 6]

    asyncio.run(main())


def test_an_answer_that_is_full_is_asked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_server, "ANSWER_BYTES", 1000)

    async def main() -> None:
        async with world() as w:
            others = [Identity.generate() for _ in range(12)]
            for other in others:
                await MemoryDirectory(w.network, other, Clock()).publish(peer_record(other))
            found = await w.directory.peers()
            assert {record.peer for record in found} == {other.peer_id for other in others}
            assert len(w.served.queried) > 2

    asyncio.run(main())


def test_a_client_whose_clock_is_wrong_goes_by_the_swarms() -> None:
    async def main() -> None:
        async with world(client_clock=Clock(NOW - 5000.0)) as w:
            await w.published.publish(peer_record(w.peer))
            assert len(await w.directory.peers()) == 1
            assert abs(w.directory.now() - NOW) < 0.01

    asyncio.run(main())


@pytest.mark.parametrize(
    "header",
    [
        *({}, {"keys": []}, {"keys": "peers/1"}, {"keys": [1]}, {"keys": ["peers/1"] * (MAX_KEYS + 1)}),
        *(
            {"keys": [key]}
            for key in ("peers/x", "peers/111", "claims/ab/1", "other/1", "providers/" + "g" * 64)
        ),
    ],
)
def test_nonsense_is_refused_before_anything_is_looked_up(header: dict[str, Any]) -> None:
    async def main() -> None:
        async with world() as w:
            with pytest.raises(RemoteError, match="keys must be"):
                await call(w.client, w.peer.peer_id, DIRECTORY.name, "read", header)
            with pytest.raises(RemoteError, match="knows read"):
                await call(w.client, w.peer.peer_id, DIRECTORY.name, "write", {"keys": ["peers/1"]})
            assert w.served.queried == []

    asyncio.run(main())


def test_whoever_asks_for_more_than_its_share_is_told_and_others_are_answered() -> None:
    async def main() -> None:
        async with world() as w:
            header = {"keys": [f"claims/{'0' * 64}/{n}" for n in range(MAX_KEYS)]}
            for _ in range(int(CLIENT.burst) // MAX_KEYS):
                await call(w.client, w.peer.peer_id, DIRECTORY.name, "read", header)
            asked = len(w.served.queried)
            with pytest.raises(RemoteError, match=BUSY):
                await call(w.client, w.peer.peer_id, DIRECTORY.name, "read", header)
            assert len(w.served.queried) == asked
            async with MemoryTransport(w.network, Identity.generate().peer_id) as other:
                await call(other, w.peer.peer_id, DIRECTORY.name, "read", header)

    asyncio.run(main())


def answering(*records: object, key: str, now: object = NOW, last: str = "done") -> Handler:
    async def attend(stream: Stream) -> None:
        await stream.receive()
        await stream.send("values", {"key": key, "now": now}, [msgpack.packb(list(records))])
        await stream.send(last)

    return attend


def test_a_peer_that_lies_shows_nothing_that_was_not_signed() -> None:
    """Forged, expired, stored elsewhere, or no record: of all that the honest record alone is left."""
    job = job_record(Identity.generate())
    key = jobs_key(shard(job.job))

    async def main() -> None:
        honest, liar = Identity.generate(), Identity.generate()
        mine = job_record(honest, author=honest.peer_id)
        good = seal(mine, honest, NOW + 5)
        forged = seal(job_record(liar, author=liar.peer_id), liar, NOW + 5).replace(
            liar.peer_id.encode(), honest.peer_id.encode()
        )
        expired, elsewhere = seal(mine, honest, NOW - 1), seal(peer_record(honest), honest, NOW + 5)
        lies = answering(forged, expired, elsewhere, b"", b"\xc1", [], good[:-1], good, key=key)
        async with world(lies) as w:
            assert await w.directory.job_records(mine.job) == (mine,)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (answering(key="peers/0"), FrameError),
        (answering(key="", now="then"), FrameError),
        (answering(key="", last="values"), FrameError),
    ],
)
def test_an_answer_to_another_question_is_none(handler: Handler, error: type[Exception]) -> None:
    async def main() -> None:
        async with world(handler) as w:
            with pytest.raises(error):
                await w.directory.job_records(job_record(w.peer).job)

    asyncio.run(main())


def test_a_peer_that_is_gone_is_doubted_and_one_of_an_older_release_says_so() -> None:
    async def main() -> None:
        async with world() as w:
            w.network.transports.pop(w.peer.peer_id)
            with pytest.raises(SwarmError):
                await w.directory.peers()
            assert w.doubted == [w.peer.peer_id]
        network, peer, asker = MemoryNetwork(), Identity.generate(), Identity.generate()
        async with MemoryTransport(network, peer.peer_id), MemoryTransport(network, asker.peer_id) as here:

            async def gateway() -> PeerId:
                return peer.peer_id

            old = RemoteDirectory(here, gateway, lambda peer: None, lambda *_: None)
            with pytest.raises(UnknownProtocol, match="older release"):
                await old.peers()

    asyncio.run(main())


def test_a_peer_that_is_there_and_tells_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_directory, "ANSWER_SECONDS", 0.05)
    asked = 0

    async def silent(stream: Stream) -> None:
        nonlocal asked
        asked += 1
        await stream.receive()
        await asyncio.sleep(60.0)

    async def main() -> None:
        async with world(silent) as w, asyncio.timeout(5.0):

            async def gateway() -> PeerId:  # the only one there is
                return w.peer.peer_id

            w.directory._gateway = gateway
            with pytest.raises(PeerUnreachable, match="does not answer"):
                await w.directory.peers()

    asyncio.run(main())
    assert asked == 2


def test_keys_of_all_kinds_can_be_asked_for() -> None:
    for key in (peers_key(15), jobs_key(0), f"claims/{'a' * 64}/65535", f"providers/{'0' * 64}", "links/3"):
        assert directory_server._KEY.fullmatch(key)


class Asker:
    """The server's end of a stream on which a client reads these keys."""

    protocol = DIRECTORY.name

    def __init__(self, remote: str, keys: Sequence[str]) -> None:
        self.remote = PeerId(remote)
        self._keys = list(keys)

    async def receive(self) -> Frame:
        return Frame("read", {"keys": self._keys})

    async def send(self, kind: str, header: object = None, payload: object = ()) -> None: ...


class Full:
    """A directory with 400 records under each key."""

    def __init__(self) -> None:
        self.asked = 0

    def now(self) -> float:
        return NOW

    async def sealed_under(self, keys: Sequence[str]) -> list[list[bytes]]:
        self.asked += len(keys)
        return [[bytes(1000)] * 400 for _ in keys]


def test_what_was_just_found_is_not_looked_up_again() -> None:
    async def main() -> None:
        clock, full = Clock(), Full()
        server = DirectoryServer(full, clock)
        for n in range(20):
            await server.serve_stream(Asker(f"client{n}", [f"providers/{'a' * 64}"]))  # type: ignore[arg-type]
        assert full.asked == 1
        clock.now += directory_server.CACHE_SECONDS
        await server.serve_stream(Asker("client", [f"providers/{'a' * 64}"]))  # type: ignore[arg-type]
        assert full.asked == 2

    asyncio.run(main())


def test_full_keys_cost_a_client_what_they_cost_us_and_all_clients_half_of_what_nodes_give_us() -> None:
    async def main() -> None:
        clock, full = Clock(), Full()
        server = DirectoryServer(full, clock)

        async def read(client: str) -> None:
            key = f"providers/{full.asked:064x}"
            await server.serve_stream(Asker(client, [key]))  # type: ignore[arg-type]

        with pytest.raises(ValueError, match=BUSY):
            for _ in range(30):
                await read("greedy")
        assert 10 < full.asked < 30
        await read("another")
        with pytest.raises(ValueError, match=BUSY):
            for n in range(2000):
                await read(f"client{n}")
        node_tokens = full.asked * (directory_server.OUR_KEY + directory_server.OUR_KIB * 400_000 / 1024)
        assert node_tokens < BudgetConfig.burst / 2 + 50

    asyncio.run(main())
