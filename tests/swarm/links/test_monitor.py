"""Links over the in-memory transport. It has no rates of its own, so the tests say when bytes come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fusion.swarm.directory.records import MAX_PAIRS
from fusion.swarm.errors import FrameError, RemoteError, StreamBroken
from fusion.swarm.identity import Identity
from fusion.swarm.links.monitor import LinkConfig, LinkMonitor
from fusion.swarm.links.packet_trains import MOST_BYTES
from fusion.swarm.links.prober import ProbeConfig
from fusion.swarm.links.probes import (
    STREAMS_PER_PEER,
    Allowance,
    ProbeLine,
    ProbeReport,
)
from fusion.swarm.links.table import LISTED_SECONDS
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.protocol import PROBE
from fusion.swarm.transport import UNASKED_BYTES, PeerId, checked

MBPS = 1e6 / 8


class Swarm:
    """Peers on one clock who have met; `flow` lets payloads come in."""

    def __init__(self, count: int, config: LinkConfig | None = None) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork()
        self.identities = [Identity.generate() for _ in range(count)]
        self.ids = [identity.peer_id for identity in self.identities]
        self.transports = [MemoryTransport(self.network, peer) for peer in self.ids]
        self.directories = [MemoryDirectory(self.network, one, self.clock) for one in self.identities]
        for transport in self.transports:
            transport.counter.receive_log._clock = self.clock
        self.links = [
            LinkMonitor(transport, directory, transport.counter.receive_log, config, self.clock)
            for transport, directory in zip(self.transports, self.directories, strict=True)
        ]

    async def begin(self) -> None:
        for links in self.links:
            await links.serve()
            for peer in self.ids:
                links.meet(peer)
        for _ in range(2):
            for links in self.links:
                await links.ping()

    async def flow(self, seconds: float, **rates: float) -> None:
        """Payloads for so long, e.g. `ab=8` from peer a to peer b at 8 Mbps, and a tick of everybody each second."""
        pairs = [(ord(pair[0]) - 97, ord(pair[1]) - 97, rate) for pair, rate in rates.items()]
        for _ in range(round(seconds)):
            for sender, receiver, _rate in pairs:
                self._arrived(sender, receiver, 0, began=True)
            for _ in range(20):
                self.clock.advance(0.05)
                for sender, receiver, rate in pairs:
                    self._arrived(sender, receiver, int(rate * MBPS * 0.05))
            for sender, receiver, _rate in pairs:
                self._arrived(sender, receiver, 0, ended=True)
            for links in self.links:
                await links.tick()
            for _ in range(20):
                await asyncio.sleep(0)

    def _arrived(
        self, sender: int, receiver: int, size: int, began: bool = False, ended: bool = False
    ) -> None:
        self.transports[sender].counter.sent(self.ids[receiver], size)
        self.transports[receiver].counter.receive_log.read(self.ids[sender], size, began=began, ended=ended)

    def rate(self, pair: str) -> float | None:
        """In Mbps, as the sender knows it."""
        one, two = (ord(letter) - 97 for letter in pair)
        found = self.links[one].snapshot().link(self.ids[one], self.ids[two]).bytes_per_second
        return None if found is None else found / MBPS


def swarm(count: int, work: Callable[[Swarm], Coroutine[Any, Any, None]], **config: Any) -> None:
    async def main() -> None:
        made = Swarm(count, LinkConfig(**config) if config else None)
        await made.begin()
        try:
            await work(made)
        finally:
            for links in made.links:
                await links.aclose()

    asyncio.run(main())


def test_who_sends_learns_how_it_comes_in() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(4, ab=40)
        assert swarm.rate("ab") == pytest.approx(40, rel=0.05)
        assert swarm.links[0].up_mbps == pytest.approx(40, rel=0.05)
        assert swarm.links[1].down_mbps == pytest.approx(40, rel=0.05)
        assert swarm.links[1].up_mbps == 0.0

    swarm(2, work)


def test_a_link_cut_to_a_tenth_is_noticed_in_five_seconds_and_published() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(6, ab=80)
        await swarm.flow(4, ab=8)
        assert swarm.rate("ab") < 20
        view = await swarm.links[2].refresh()  # somebody who has nothing to do with it
        link = view.link(swarm.ids[0], swarm.ids[1])
        assert link.measured and link.bytes_per_second is not None and link.bytes_per_second < 20 * MBPS

    swarm(3, work)


def test_sharing_an_uplink_is_no_cut_and_is_seen_as_sharing() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(5, ab=20)
        await swarm.flow(5, ac=20)
        await swarm.flow(8, ab=10, ac=10)
        assert swarm.rate("ab") == pytest.approx(20, rel=0.05)
        assert swarm.links[0].up_mbps == pytest.approx(20, rel=0.1)

    swarm(3, work)


def test_two_that_are_only_used_together_add_up_to_the_uplink() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(6, ab=10, ac=10)
        assert swarm.links[0].up_mbps == pytest.approx(20, rel=0.1)
        await swarm.flow(6, ba=5, ca=7)
        assert swarm.links[0].down_mbps == pytest.approx(12, rel=0.1)

    swarm(3, work)


def test_an_uplink_that_was_cut_is_believed_within_seconds() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(5, ac=80)
        await swarm.flow(5, ab=80)
        assert swarm.links[0].up_mbps == pytest.approx(80, rel=0.1)
        await swarm.flow(5, ab=8)  # and nothing to c, of whom the last is that it took 80
        assert swarm.links[0].up_mbps < 12
        assert swarm.links[1].down_mbps < 12  # for all that it knows it is that one
        await swarm.flow(5, cb=60)
        assert swarm.links[1].down_mbps == pytest.approx(60, rel=0.1)
        assert swarm.links[0].up_mbps < 12

    swarm(3, work)


def test_a_shared_uplink_that_was_cut_is_believed_too() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(6, ab=40, ac=40)
        assert swarm.links[0].up_mbps == pytest.approx(80, rel=0.1)
        await swarm.flow(8, ab=4, ac=4)
        assert swarm.links[0].up_mbps < 12

    swarm(3, work)


def test_what_nobody_measured_is_estimated_from_both_ends() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(5, ab=20, cd=8)
        records = []
        for directory, links, transport in zip(swarm.directories, swarm.links, swarm.transports, strict=True):
            records.append(peer(transport.peer_id, links))
            await directory.publish(records[-1])
        view = await swarm.links[0].refresh(0.0)
        link = view.link(swarm.ids[0], swarm.ids[3])  # a's uplink and d's downlink
        assert link.rtt_measured and not link.rate_measured
        assert link.bytes_per_second == pytest.approx(8 * MBPS, rel=0.1)
        assert view.link(swarm.ids[1], swarm.ids[2]).bytes_per_second is None

    swarm(4, work)


def test_traffic_with_silent_peers_is_not_reported_and_they_are_left_alone() -> None:
    async def work(swarm: Swarm) -> None:
        swarm.network.kill(swarm.ids[1])
        await swarm.flow(3, ba=10)  # the last of it
        assert swarm.links[0].down_mbps == pytest.approx(10, rel=0.1)
        assert swarm.rate("ab") is None
        swarm.clock.advance(3 * LISTED_SECONDS)
        await swarm.links[0].tick()
        assert not swarm.links[0].record().pairs

    swarm(2, work)


def test_a_directory_that_hangs_holds_up_no_timing() -> None:
    async def hangs(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def work(swarm: Swarm) -> None:
        swarm.directories[1].publish = hangs  # type: ignore[method-assign]
        async with asyncio.timeout(60.0):
            await swarm.flow(5, ab=8)
        assert swarm.rate("ab") == pytest.approx(8, rel=0.1)

    swarm(2, work)


def test_an_idle_swarm_stays_within_its_allowance() -> None:
    async def work(swarm: Swarm) -> None:
        for _ in range(600):
            swarm.clock.advance(1.0)
            for links in swarm.links:
                for peer in swarm.ids:
                    links.meet(peer)
                await links.tick()
                await links.ping()
                await links.probe()
        for transport in swarm.transports:
            sent = sum(count.sent_bytes for count in transport.traffic().values())
            assert sent < 2_000_000 + 600 * 9_000  # both bursts, then bytes a second

    swarm(
        3, work, probing=ProbeConfig(first_bytes=1e6, first_bytes_per_second=4e3, check_bytes_per_second=4e3)
    )


# What others may ask.


def test_hostile_probes_are_refused_in_one_line() -> None:
    async def work(swarm: Swarm) -> None:
        async def ask(kind: str, header: dict[str, Any], payload: bytes = b"") -> str:
            stream = await swarm.transports[1].open(swarm.ids[0], PROBE.name)
            try:
                await stream.send(kind, header, [payload])
                return checked(await stream.receive()).kind
            except RemoteError as error:
                assert "\n" not in str(error)
                return str(error)
            finally:
                stream.abort()
                for _ in range(10):
                    await asyncio.sleep(0)

        assert await ask("ping", {}) == "pong"
        assert "want" in await ask("want", {"bytes": MOST_BYTES + 1})
        assert "want" in await ask("want", {"bytes": True})
        assert "not granted" in await ask("train", {}, bytes(1000))
        assert "not granted" in await ask("ping", {}, b"x")
        assert "probes are" in await ask("dance", {})
        good = ProbeReport(
            size=1, seconds=1.0, bytes_per_second=1.0, sure=True, sharers=1, together=1.0
        ).to_header()
        for name, value in (("bytes", -1), ("seconds", float("nan")), ("bytes_per_second", -1.0), ("sharers", 0),
                            ("bytes_per_second", "fast"), ("seconds", True)):  # fmt: skip
            assert "a" in await ask("report", {**good, name: value})
            assert swarm.rate("ab") is None

    swarm(2, work)


def test_nothing_large_is_read_that_was_not_granted() -> None:
    async def work(swarm: Swarm) -> None:
        large = bytes(UNASKED_BYTES + 1)
        stream = await swarm.transports[1].open(swarm.ids[0], PROBE.name)
        await stream.send("train", {}, [large])
        with pytest.raises(StreamBroken):
            await stream.receive()
        stream = await swarm.transports[1].open(swarm.ids[0], PROBE.name)
        for kind, header, payload in (("want", {"bytes": len(large)}, b""), ("train", {}, large)):
            await stream.send(kind, header, [payload])
            checked(await stream.receive())
        await stream.send("train", {}, [large])
        with pytest.raises(StreamBroken):
            await stream.receive()

    swarm(2, work)


def test_a_flood_is_refused_and_the_others_are_still_answered() -> None:
    async def work(swarm: Swarm) -> None:
        stream = await swarm.transports[1].open(swarm.ids[0], PROBE.name)
        with pytest.raises(RemoteError, match="too many or too large"):
            for _ in range(40):
                await stream.send("want", {"bytes": MOST_BYTES})
                checked(await stream.receive())
        line = ProbeLine(swarm.transports[2], swarm.ids[0], swarm.clock)
        took, _ = await line.ping(1.0)
        assert took >= 0
        line.drop()

    swarm(3, work)


def test_what_all_have_used_up_is_charged_to_nobody() -> None:
    async def work(swarm: Swarm) -> None:
        swarm.links[0]._host._all.clear()
        line = ProbeLine(swarm.transports[1], swarm.ids[0], swarm.clock)
        for _ in range(40):
            assert await line.train(MOST_BYTES, 0.0, 1.0) is None
        swarm.clock.advance(60.0)
        assert await line.train(MOST_BYTES, 0.0, 1.0) is not None
        line.drop()

    swarm(2, work)


def test_streams_per_peer_are_few() -> None:
    async def work(swarm: Swarm) -> None:
        streams = [
            await swarm.transports[1].open(swarm.ids[0], PROBE.name) for _ in range(STREAMS_PER_PEER + 1)
        ]
        with pytest.raises(RemoteError, match="streams"):
            await streams[-1].send("ping")
            checked(await streams[-1].receive())

    swarm(2, work)


def test_one_train_at_a_time() -> None:
    async def work(swarm: Swarm) -> None:
        first = await swarm.transports[1].open(swarm.ids[0], PROBE.name)
        await first.send("want", {"bytes": 1000})
        assert checked(await first.receive()).kind == "go"
        line = ProbeLine(swarm.transports[2], swarm.ids[0], swarm.clock)
        assert await line.train(1000, 0.0, 1.0) is None
        await first.send("train", {}, [bytes(1000)])
        assert checked(await first.receive()).kind == "rate"
        train = await line.train(1000, 0.0, 1.0)
        assert train is not None and train.size == 1000
        line.drop()

    swarm(3, work)


def test_an_answer_that_is_none_is_an_error_of_the_peer() -> None:
    async def work(swarm: Swarm) -> None:
        async def liar(stream: Any) -> None:
            while True:
                await stream.receive()
                await stream.send("pong", {"coordinate": [0.0, float("inf"), 0.0], "error": 0.1})

        transport = MemoryTransport(swarm.network, Identity.generate().peer_id)
        await transport.serve(PROBE.name, liar)
        line = ProbeLine(swarm.transports[0], transport.peer_id, swarm.clock)
        with pytest.raises(FrameError, match="coordinate"):
            await line.ping(1.0)
        line.drop()

    swarm(2, work)


def report_of(rate_mbps: float) -> ProbeReport:
    rate = rate_mbps * MBPS
    return ProbeReport(size=1 << 20, seconds=1.0, bytes_per_second=rate, sure=True, sharers=1, together=rate)


def test_those_who_are_listed_nowhere_take_no_place_in_a_record() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(3, ab=40, ac=40)
        for _ in range(MAX_PAIRS):
            who = Identity.generate().peer_id
            log = swarm.transports[0].counter.receive_log
            log.read(who, 0, began=True, ended=False)
            for _ in range(4):
                swarm.clock.advance(0.05)
                log.read(who, 50_000, began=False, ended=False)
            log.read(who, 0, began=False, ended=True)
            await swarm.links[0].tick()
            line = ProbeLine(MemoryTransport(swarm.network, who), swarm.ids[0], swarm.clock)
            await line.report(report_of(40), 1.0)
            await asyncio.sleep(0)
            line.drop()
        assert {pair.peer for pair in swarm.links[0].record().pairs} == set(swarm.ids[1:])
        assert {neighbour.peer for neighbour in swarm.links[0]._table.every()} == set(swarm.ids[1:])

    swarm(3, work)


@pytest.mark.parametrize("listed", [True, False])
def test_what_is_said_of_payloads_that_nobody_sent_lowers_nothing(listed: bool) -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(5, ab=40, da=40)
        table = swarm.links[0]._table
        if not listed:
            del table._listed[swarm.ids[2]]
        line = ProbeLine(swarm.transports[2], swarm.ids[0], swarm.clock)
        for rate in (80.0, 8e-6, 8e-6, 8e-6):
            await line.report(report_of(rate), 1.0)
            await asyncio.sleep(0.01)
            swarm.clock.advance(1.0)
        line.drop()
        assert swarm.links[0].up_mbps == pytest.approx(40, rel=0.05)
        neighbour = table.find(swarm.ids[2])
        assert neighbour is not None and neighbour.out.estimate is None

    swarm(4, work)


def test_a_link_did_not_fall_below_half_of_what_goes_over_it() -> None:
    async def work(swarm: Swarm) -> None:
        await swarm.flow(5, ab=40)
        line = ProbeLine(swarm.transports[1], swarm.ids[0], swarm.clock)
        for _ in range(6):
            await swarm.flow(1, ab=40)
            for _ in range(4):
                await line.report(report_of(8e-6), 1.0)
                await asyncio.sleep(0.01)
            assert swarm.links[0].up_mbps >= 19
        line.drop()

    swarm(2, work)


def test_an_allowance_fills_again() -> None:
    clock = ManualClock()
    allowance = Allowance(10, 2, clock)
    assert allowance.take(10) and not allowance.take(1)
    clock.advance(3)
    assert allowance.take(6) and not allowance.take(1)


def peer(peer_id: PeerId, links: LinkMonitor) -> Any:
    from fusion.swarm.directory.records import PeerRecord

    return PeerRecord(
        peer=peer_id, name="x", addresses=(), role="peer", device="cpu", flops_per_second=1.0, memory_bytes=1,
        free_memory_bytes=1, software="", opset=1, started_at=1.0, up_mbps=links.up_mbps, down_mbps=links.down_mbps,
        coordinate=links.coordinate.parts, coordinate_error=links.coordinate.error,
    )  # fmt: skip
