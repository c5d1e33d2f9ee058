from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from support.directory_records import peer_record

from fusion.swarm.directory.bootstrap import MAX_CACHED, load_cached, save_cached
from fusion.swarm.directory.membership import Membership, MembershipConfig
from fusion.swarm.directory.missing_peers import MissingPeersConfig
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId

QUICK = MissingPeersConfig(first_seconds=0.005, share=0.001)


class Neighbours:
    """A DHT's idea of who is near, for a memory network."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self.network, self.peer_id = network, peer_id
        self.known: set[PeerId] = set()
        self.joins: list[PeerId] = []

    async def join(self, peer: PeerId) -> bool:
        self.joins.append(peer)
        self.known.add(peer)
        return True

    async def refresh(self) -> int:
        return len(self.neighbours())

    def neighbours(self) -> tuple[PeerId, ...]:
        return tuple(
            peer
            for peer in sorted(self.known)
            if peer in self.network.transports and self.network.reachable(self.peer_id, peer)
        )


class Room:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork()

    def peer(self, **config: object) -> tuple[Membership, MemoryDirectory, Neighbours, Identity]:
        identity = Identity.generate()
        transport = MemoryTransport(self.network, identity.peer_id)
        directory = MemoryDirectory(self.network, identity, self.clock)
        neighbours = Neighbours(self.network, identity.peer_id)
        addresses = transport.addresses
        membership = Membership(
            transport,
            directory,
            neighbours,
            lambda: peer_record(identity, addresses=addresses),
            MembershipConfig(heartbeat_seconds=0.005, first_retry_seconds=0.005, **config),  # type: ignore[arg-type]
        )
        return membership, directory, neighbours, identity


def address(identity: Identity) -> str:
    return f"/memory/{identity.peer_id}/p2p/{identity.peer_id}"


def test_a_peer_joins_and_announces_itself() -> None:
    async def scenario() -> None:
        room = Room()
        first, directory, _, seed = room.peer()
        second, _, neighbours, identity = room.peer(bootstrap=(address(seed),))
        async with asyncio.timeout(5), first:
            await first.announced.wait()  # a swarm of one
            async with second:
                await second.joined.wait()
                await second.announced.wait()
                assert neighbours.neighbours() == (seed.peer_id,)
                assert {r.peer for r in await directory.peers()} == {seed.peer_id, identity.peer_id}
        room.clock.advance(1)
        assert await directory.peers() == ()  # gone within three heartbeats of the last one

    asyncio.run(scenario())


def test_a_seed_that_does_not_answer_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        room = Room()
        first, _, _, seed = room.peer()
        gone = address(Identity.generate())
        second, _, neighbours, _ = room.peer(bootstrap=(gone, address(seed)))
        connect = second._transport.connect

        async def slow(to: str) -> PeerId:
            return await (asyncio.Event().wait() if to == gone else connect(to))  # type: ignore[return-value]

        monkeypatch.setattr(second._transport, "connect", slow)
        async with asyncio.timeout(5), first, second:
            await second.joined.wait()
            assert neighbours.joins == [seed.peer_id]

    asyncio.run(scenario())


def test_a_dead_bootstrap_is_tried_again_until_it_lives(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        room = Room()
        seed = Identity.generate()
        membership, directory, neighbours, _ = room.peer(bootstrap=(address(seed),))
        async with asyncio.timeout(5), membership:
            while not caplog.records:
                await asyncio.sleep(0.001)
            # Alone, but alive: it announces itself to whoever may come.
            while not await directory.peers():
                await asyncio.sleep(0.001)
            assert not membership.joined.is_set() and not membership.announced.is_set()
            await asyncio.sleep(0.05)
            MemoryTransport(room.network, seed.peer_id)
            await membership.joined.wait()
            await membership.announced.wait()
            # And when it dies later, the same again.
            room.network.transports.pop(seed.peer_id)
            neighbours.known.clear()
            joins = len(neighbours.joins)
            await asyncio.sleep(0.02)
            MemoryTransport(room.network, seed.peer_id)
            while len(neighbours.joins) == joins:
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    complaints = [r.message for r in caplog.records if "trying again in the background" in r.message]
    assert 1 <= len(complaints) <= 2  # once for each time it was lost, not for each attempt


def test_a_client_whose_ways_are_all_dead_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It goes on with nothing: whoever opened it says what became of it."""

    async def scenario() -> None:
        room = Room()
        identity = Identity.generate()
        client = Membership(
            MemoryTransport(room.network, identity.peer_id),
            MemoryDirectory(room.network, identity, room.clock),
            Neighbours(room.network, identity.peer_id),
            None,
            MembershipConfig(bootstrap=(address(Identity.generate()),)),
        )
        assert not await client.join()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert not caplog.records


def test_peers_met_are_seeds_of_the_next_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room()
        cache = tmp_path / "peers.json"
        seed, directory, _, identity = room.peer()
        await seed.announce()
        met = f"/ip4/192.0.2.1/tcp/4001/p2p/{identity.peer_id}"
        await directory.publish(peer_record(identity, addresses=(met,)))
        membership, *_ = room.peer(cache_path=cache)
        assert membership.seeds == ()
        await membership.look()
        assert membership.seeds == load_cached(cache) == (met,)

    asyncio.run(scenario())


def test_those_who_answer_are_remembered_among_any_number_that_are_only_listed(tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room()
        membership, _, neighbours, _ = room.peer(cache_path=tmp_path / "peers.json")
        listed = [Identity.generate() for _ in range(3 * MAX_CACHED)]
        for number, identity in enumerate(listed):
            made_up = f"/ip4/192.0.2.1/tcp/{4001 + number}/p2p/{identity.peer_id}"
            theirs = MemoryDirectory(room.network, identity, room.clock)
            await theirs.publish(peer_record(identity, addresses=(made_up,)))
        friend, other, *_ = listed
        neighbours.known = {friend.peer_id, other.peer_id}
        for identity in (friend, other):
            MemoryTransport(room.network, identity.peer_id)
        await membership.look()
        assert {seed.rpartition("/p2p/")[2] for seed in membership.seeds} == neighbours.known

    asyncio.run(scenario())


def test_a_remembered_peer_is_the_way_in_when_the_bootstrap_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room()
        cache = tmp_path / "peers.json"
        _, _, _, friend = room.peer()
        save_cached(cache, [address(friend)])
        membership, _, neighbours, _ = room.peer(cache_path=cache, bootstrap=(address(Identity.generate()),))
        async with asyncio.timeout(5), membership:
            await membership.joined.wait()
            assert neighbours.neighbours() == (friend.peer_id,)

    asyncio.run(scenario())


def test_seeds_are_probed_while_all_is_well() -> None:
    async def scenario() -> None:
        room = Room()
        _, _, _, here = room.peer()
        away = Identity.generate()
        membership, _, neighbours, _ = room.peer(bootstrap=(address(here), address(away)), probe_seconds=0.01)
        async with asyncio.timeout(5), membership:
            await membership.joined.wait()
            MemoryTransport(room.network, away.peer_id)  # the other half of the swarm is back
            while away.peer_id not in neighbours.neighbours():
                await asyncio.sleep(0.001)

    asyncio.run(scenario())


def test_the_halves_of_a_swarm_find_each_other_again_without_a_seed() -> None:
    async def scenario() -> None:
        room = Room()
        first, _, first_near, seed = room.peer(look_seconds=0.005, search_seconds=0.005, missing=QUICK)
        second, _, second_near, other = room.peer(
            bootstrap=(address(seed),),
            look_seconds=0.005,
            search_seconds=0.005,
            probe_seconds=1e6,
            missing=QUICK,
        )
        third, *_ = room.peer(bootstrap=(address(seed),))
        async with asyncio.timeout(10), first, second, third:
            await second.joined.wait()
            await third.joined.wait()
            first_near.known.add(other.peer_id)
            while not (first.seeds and second.seeds):
                await asyncio.sleep(0.001)
            room.network.partition([seed.peer_id], [other.peer_id])
            for _ in range(20):
                room.clock.advance(0.05)  # the other side's records expire
                await asyncio.sleep(0.005)
            # In a memory network the list alone is whole as soon as the link is: here only dialling counts.
            first.look = second.look = nothing  # type: ignore[method-assign]
            joins = len(second_near.joins)
            room.network.heal()
            while len(second_near.joins) == joins:
                await asyncio.sleep(0.001)
            assert seed.peer_id in second_near.joins[joins:]

    asyncio.run(scenario())


async def nothing() -> None:
    pass


def test_a_listed_peers_addresses_are_told() -> None:
    async def scenario() -> None:
        room = Room()
        one, _, _, seed = room.peer()
        await one.announce()
        membership, _, neighbours, _ = room.peer()
        learned: list[tuple[PeerId, tuple[str, ...], bool]] = []
        membership._learn = lambda peer, addresses, answers: learned.append((peer, tuple(addresses), answers))
        await membership.look()
        neighbours.known = {seed.peer_id}
        await membership.look()
        assert learned == [(seed.peer_id, (address(seed),), answers) for answers in (False, True)]

    asyncio.run(scenario())


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        room = Room()
        (tmp_path / "file").write_bytes(b"")
        other, *_ = room.peer()
        await other.announce()
        membership, *_ = room.peer(cache_path=tmp_path / "file" / "peers.json")
        await membership.look()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [r.message for r in caplog.records if "cannot remember peers" in r.message]


def test_a_bad_setting_is_named() -> None:
    with pytest.raises(ValueError, match="heartbeat_seconds"):
        MembershipConfig(heartbeat_seconds=0)
