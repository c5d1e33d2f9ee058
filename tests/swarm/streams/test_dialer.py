from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from fusion.swarm.errors import PeerUnreachable
from fusion.swarm.streams.dialer import BANNER, Dialer, DialerConfig, accepts, tcp_target
from fusion.swarm.transport import PeerId

PEER = PeerId("peer")
SECONDS = 5.0


@asynccontextmanager
async def host(greeting: bytes | None = BANNER) -> AsyncIterator[str]:
    """Something that listens and says `greeting`, or nothing; its multiaddr."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greeting is not None:
            writer.write(greeting)
            writer.close()
        else:
            await reader.read()
            writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


class Daemon:
    """What p2pd would be asked."""

    def __init__(self) -> None:
        self.connected: set[PeerId] = set()
        self.dialled: list[tuple[PeerId, tuple[str, ...]]] = []
        self.asked = 0
        self.now = 100.0
        self.dialer = Dialer(
            self._list, self._dial, DialerConfig(knock_seconds=SECONDS), clock=lambda: self.now
        )

    async def _list(self) -> frozenset[PeerId]:
        self.asked += 1
        return frozenset(self.connected)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self.dialled.append((peer, tuple(addresses)))
        self.connected.add(peer)


async def free_address() -> str:
    async with host() as address:
        pass
    return address


def test_only_addresses_that_answer_are_dialled() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        dead = await free_address()
        async with host() as address, host(b"HTTP/1.1 400 Bad Request\r\n") as other:
            daemon.dialer.learn(PEER, [f"{where}/p2p/peer" for where in (dead, other, address)])
            await daemon.dialer.reach(PEER)
            await daemon.dialer.reach(PEER)  # connected now
        assert daemon.dialled == [(PEER, (f"{address}/p2p/peer",))]

    asyncio.run(scenario())


def test_a_dead_peer_is_never_dialled_and_one_that_is_back_is_at_once() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        async with host() as address:
            pass
        daemon.dialer.learn(PEER, [address])
        for _ in range(3):
            with pytest.raises(PeerUnreachable, match=r"cannot reach peer: 127.0.0.1 port .*refused"):
                await daemon.dialer.reach(PEER)
        assert daemon.dialled == []
        async with host() as again:
            daemon.dialer.learn(PEER, [again])
            await daemon.dialer.reach(PEER)
        assert daemon.dialled == [(PEER, (again,))]

    asyncio.run(scenario())


def test_where_no_tcp_address_answers_those_of_other_kinds_are_dialled() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        named = "/dns4/example.org/tcp/4001/p2p/peer"
        daemon.dialer.learn(PEER, [f"{await free_address()}/p2p/peer", named])
        await daemon.dialer.reach(PEER)
        assert daemon.dialled == [(PEER, (named,))]
        daemon.connected.clear()
        async with host() as address:
            daemon.dialer.learn(PEER, [named, address])
            await daemon.dialer.reach(PEER)
        assert daemon.dialled[1:] == [(PEER, (address,))]

    asyncio.run(scenario())


def test_where_somebody_else_has_the_first_address_the_others_are_dialled() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        refused = asyncio.Event()

        async def greet_late(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await refused.wait()
            writer.write(BANNER)
            writer.close()

        async def dial(peer: PeerId, addresses: Sequence[str]) -> None:
            await daemon._dial(peer, addresses)
            if addresses == [private]:
                daemon.connected.clear()
                refused.set()
                raise PeerUnreachable("remote key matches another peer")

        dialer = Dialer(daemon._list, dial, DialerConfig(knock_seconds=SECONDS), clock=lambda: daemon.now)
        far = await asyncio.start_server(greet_late, "127.0.0.1", 0)
        dead, public = await free_address(), f"/ip4/127.0.0.1/tcp/{far.sockets[0].getsockname()[1]}"
        async with far, host() as private:
            dialer.learn(PEER, [private, dead, public])
            await dialer.reach(PEER)
            assert daemon.dialled == [(PEER, (private,)), (PEER, (public,))]
            daemon.connected.clear()
            dialer.learn(PEER, [private, dead])
            with pytest.raises(PeerUnreachable, match="remote key"):
                await dialer.reach(PEER)
        await dialer.aclose()

    asyncio.run(scenario())


def test_a_connection_that_outlasts_the_doubt_is_good_though_no_address_answers() -> None:
    """As with a peer behind a router, which dialled us."""

    async def scenario() -> None:
        daemon = Daemon()
        daemon.connected.add(PEER)
        dialer = Dialer(daemon._list, daemon._dial, DialerConfig(knock_seconds=0.1), clock=lambda: daemon.now)
        async with host(None) as silent:
            dialer.learn(PEER, [silent])
            dialer.invalidate(PEER)
            reaching = asyncio.create_task(dialer.reach(PEER))
            await asyncio.sleep(0.01)
            daemon.now += 1.0
            await reaching
            dialer.invalidate(PEER)
            reaching = asyncio.create_task(dialer.reach(PEER))
            await asyncio.sleep(0.01)
            daemon.connected.clear()
            daemon.now += 1.0
            with pytest.raises(PeerUnreachable):
                await reaching

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "address",
    ["/ip4/localhost/tcp/4001", "/ip4/999.0.0.1/tcp/4001", "/ip6/127.0.0.1/tcp/4001", "/ip6/fe80::1%eth0/tcp/4001",
     "/ip4/127.0.0.1/tcp/\uff14\uff10", "/ip4/127.0.0.1/tcp/0000080000", "/ip4/127.0.0.1/tcp/65536"],
)  # fmt: skip
def test_what_is_no_ip_address_is_no_target(address: str) -> None:
    """A name would be looked up for whoever wrote it into a record."""
    assert tcp_target(address) is None and tcp_target(f"{address}/p2p/peer") is None


def test_those_who_want_the_same_peer_share_a_dial() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        async with host() as address:
            daemon.dialer.learn(PEER, [address])
            await asyncio.gather(*(daemon.dialer.reach(PEER) for _ in range(5)))
        assert len(daemon.dialled) == 1
        await daemon.dialer.aclose()

    asyncio.run(scenario())


def test_one_who_waits_no_longer_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        async with host() as address:
            daemon.dialer.learn(PEER, [address])
            first = asyncio.create_task(daemon.dialer.reach(PEER))
            second = asyncio.create_task(daemon.dialer.reach(PEER))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            first.cancel()
            await second
        assert daemon.connected == {PEER}

    asyncio.run(scenario())


def test_where_nothing_fresh_is_known_p2pd_looks_itself() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        await daemon.dialer.reach(PEER)
        daemon.dialer.learn(PEER, ["/dns4/example.org/tcp/4001/p2p/peer", "/p2p-circuit"])
        await daemon.dialer.reach(PEER)
        daemon.dialer.learn(PEER, [await free_address()])
        daemon.now += 61.0
        await daemon.dialer.reach(PEER)
        assert daemon.dialled == []

    asyncio.run(scenario())


def test_those_who_ask_at_the_same_time_share_one_question() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        daemon.connected.add(PEER)
        await asyncio.gather(*(daemon.dialer.reach(PEER, max_age_seconds=age) for age in (0.0, 2.0, 2.0)))
        assert daemon.asked == 1
        # What is answered to a question from before a doubt is for those who asked it.
        early = asyncio.create_task(daemon.dialer.connected())
        await asyncio.sleep(0)
        daemon.dialer.invalidate()
        late = asyncio.create_task(daemon.dialer.connected(max_age_seconds=2.0))
        await asyncio.gather(early, late)
        assert daemon.asked == 3
        assert await daemon.dialer.connected(max_age_seconds=2.0) == {PEER}
        assert daemon.asked == 3

    asyncio.run(scenario())


def test_an_older_list_tells_who_is_connected_but_not_who_is_not() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        await daemon.dialer.connected()
        daemon.connected.add(PEER)  # it dialled us
        daemon.now += 1.0
        async with host() as address:
            daemon.dialer.learn(PEER, [address])
            await daemon.dialer.reach(PEER, max_age_seconds=2.0)
        assert daemon.asked == 2 and daemon.dialled == []

    asyncio.run(scenario())


def test_p2pds_answer_is_used_again_until_in_doubt() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        daemon.connected.add(PEER)
        for _ in range(3):
            await daemon.dialer.reach(PEER, max_age_seconds=1.0)
        assert daemon.asked == 1
        daemon.dialer.invalidate()
        await daemon.dialer.reach(PEER, max_age_seconds=1.0)
        assert daemon.asked == 2
        daemon.now += 2.0
        await daemon.dialer.reach(PEER, max_age_seconds=1.0)
        await daemon.dialer.reach(PEER)
        assert daemon.asked == 4

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (b"hello", "it hung up"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no peer answers there"),
        (None, "no answer in"),
    ],
)
def test_what_is_no_peer_is_reported(greeting: bytes | None, reason: str) -> None:
    async def scenario() -> None:
        async with host(greeting) as address:
            with pytest.raises(PeerUnreachable, match=reason):
                await accepts(f"{address}/p2p/peer", 0.05 if greeting is None else SECONDS)

    asyncio.run(scenario())


def test_the_book_is_bounded() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        dialer = Dialer(daemon._list, daemon._dial, DialerConfig(peers=3), clock=lambda: daemon.now)
        dead = await free_address()
        for number in range(10):
            dialer.learn(PeerId(str(number)), [dead] * 100)
        await dialer.reach(PeerId("6"))  # forgotten
        with pytest.raises(PeerUnreachable):
            await dialer.reach(PeerId("7"))

    asyncio.run(scenario())


def test_a_bad_setting_is_named() -> None:
    with pytest.raises(ValueError, match="knock_seconds"):
        DialerConfig(knock_seconds=0)


def test_a_connection_is_not_trusted_just_after_a_stream_broke() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        daemon.connected.add(PEER)  # says p2pd, which has not noticed yet
        async with host() as address:
            daemon.dialer.learn(PEER, [address])
            daemon.dialer.invalidate(PEER)
            await daemon.dialer.reach(PEER)
        daemon.dialer.learn(PEER, [await free_address()])
        with pytest.raises(PeerUnreachable):
            await daemon.dialer.reach(PEER)
        daemon.now += 1.0
        await daemon.dialer.reach(PEER)

    asyncio.run(scenario())


def test_a_hint_is_tried_beside_what_the_peer_itself_said() -> None:
    async def scenario() -> None:
        daemon = Daemon()
        dead = await free_address()
        async with host() as address, host() as other:
            daemon.dialer.learn(PEER, [address])
            daemon.dialer.hint(PEER, dead)
            daemon.dialer.hint(PEER, "/dns4/example.org/tcp/4001")
            await daemon.dialer.reach(PEER)
            assert daemon.dialled == [(PEER, (address,))]
            daemon.connected.clear()
            daemon.dialer.learn(PEER, [dead])
            daemon.dialer.hint(PEER, other)
            await daemon.dialer.reach(PEER)
            assert daemon.dialled[1:] == [(PEER, (other,))]
        daemon.connected.clear()
        daemon.now += 61.0
        daemon.dialer.hint(PEER, dead)
        with pytest.raises(PeerUnreachable):
            await daemon.dialer.reach(PEER)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lives", "greeting", "cut"), [(False, BANNER, True), (True, BANNER, False), (False, None, False)]
)
def test_only_a_connection_over_which_nothing_comes_is_given_up_and_only_for_a_new_one(
    lives: bool, greeting: bytes | None, cut: bool
) -> None:
    async def scenario() -> None:
        daemon = Daemon()
        daemon.connected.add(PEER)
        asked: list[PeerId] = []

        async def alive(peer: PeerId) -> bool:
            asked.append(peer)
            return lives

        async def hang_up(peer: PeerId) -> None:
            daemon.connected.discard(peer)

        dialer = Dialer(
            daemon._list, daemon._dial, DialerConfig(knock_seconds=0.2 if greeting is None else SECONDS),
            clock=lambda: daemon.now, is_alive=alive, hang_up=hang_up,
        )  # fmt: skip
        async with host(greeting) as address:
            dialer.learn(PEER, [address])
            for _ in range(3):  # looked into once
                dialer.unanswered(PEER)
            await asyncio.gather(*dialer._examining)
        assert asked == [PEER] and daemon.connected == {PEER}
        assert daemon.dialled == ([(PEER, (address,))] if cut else [])
        await dialer.aclose()

    asyncio.run(scenario())
