"""Trains over a link that the test makes fast or slow, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

import pytest

from fusion.swarm.coordinates import Coordinate
from fusion.swarm.links import packet_trains
from fusion.swarm.links.packet_trains import Train
from fusion.swarm.links.prober import ProbeConfig, Prober
from fusion.swarm.links.probes import ProbeLine, ProbeReport
from fusion.swarm.links.table import DOUBT_SECONDS, PRESS_SECONDS, LinkTable, Neighbour
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.streams.link_estimate import RateEstimate
from fusion.swarm.transport import PeerId, Traffic, Transport

MBPS = 1e6 / 8
RTT = 0.02
REPORT = ProbeReport(size=1, seconds=1.0, bytes_per_second=1.0, sure=True, sharers=1, together=1.0)


@dataclass
class Line:
    """Of `rate`, each train of which takes so many times as long as `held_up` says next; `full`: so much longer is the
    round trip while others fill the way back, from the first train on that meets them."""

    peer: PeerId
    world: World
    rate: float
    full: float = 0.0
    sent_bytes: int = 0
    pressed: bool = False
    held_up: tuple[float, ...] = ()
    beside: tuple[PeerId, int] | None = None  # so many bytes go to somebody else during each train

    async def train(self, size: int, rtt_seconds: float, timeout_seconds: float, *, pressed: bool) -> Train:
        factor, self.held_up = (self.held_up[0], self.held_up[1:]) if self.held_up else (1.0, ())
        self.sent_bytes += size
        self.pressed = pressed
        took = factor * size / self.rate + 3 * self.full + RTT
        self.world.clock.advance(took)
        self.world.sent[self.peer] = self.world.sent.get(self.peer, 0) + size
        if self.beside is not None:
            other, crossed = self.beside
            self.world.sent[other] = self.world.sent.get(other, 0) + crossed
        return packet_trains.train(size, took, rtt_seconds, rtt_seconds, 0.0)

    async def ping(self, timeout_seconds: float) -> tuple[float, Coordinate]:
        return RTT + self.full, Coordinate()


class World:
    """We and neighbours at these rates (Mbps); each has been pinged."""

    def __init__(self, *mbps: float, config: ProbeConfig) -> None:
        self.clock = ManualClock()
        self.sent: dict[PeerId, int] = {}
        self.table = LinkTable(PeerId("us"), len(mbps))
        self.lines = [Line(PeerId(f"peer-{i}"), self, rate * MBPS) for i, rate in enumerate(mbps)]
        self.neighbours = [self.table.add(cast(ProbeLine, line)) for line in self.lines]
        for neighbour in self.neighbours:
            neighbour.answers.count = 5
            neighbour.answers.rtt = neighbour.answers.rtt.updated(self.clock(), RTT, quiet=True)
        self.prober = Prober(
            self.table, cast(Transport, self), config, self.clock, self.learned, lambda *_: None
        )

    def traffic(self) -> dict[PeerId, Traffic]:
        return {peer: Traffic(size, 0) for peer, size in self.sent.items()}

    def learned(self, neighbour: Neighbour, estimate: RateEstimate) -> None:
        self.table.learned(neighbour, estimate, self.clock())

    async def run(self, seconds: float) -> None:
        until = self.clock() + seconds
        while self.clock() < until:
            self.clock.advance(0.2)
            await self.prober.step(self.neighbours)

    def mbps(self, number: int) -> float:
        out = self.neighbours[number].out
        return 0.0 if out is None else out.bytes_per_second / MBPS

    @property
    def probed(self) -> int:
        return sum(line.sent_bytes for line in self.lines)


def world(work: Callable[[World], Coroutine[Any, Any, None]], *mbps: float, **config: float) -> None:
    asyncio.run(work(World(*mbps, config=ProbeConfig(**config))))


def test_every_link_is_measured_and_then_left_alone() -> None:
    async def work(world: World) -> None:
        await world.run(15)
        assert [world.mbps(i) for i in range(4)] == pytest.approx([8, 20, 80, 1000], rel=0.1)
        cost = world.probed
        assert cost < 9e6
        await world.run(40)
        assert world.probed == cost

    world(work, 8, 20, 80, 1000)


def test_two_trains_that_were_held_up_are_not_believed() -> None:
    async def work(world: World) -> None:
        world.lines[0].held_up = (1.0, 1.8, 1.4, 1.0, 1.0)  # the first is too short to count
        await world.run(10)
        assert world.mbps(0) == pytest.approx(40, rel=0.1)

    world(work, 40)


def test_an_idle_link_that_was_cut_is_found_by_a_check() -> None:
    async def work(world: World) -> None:
        await world.run(10)
        cost = world.probed
        await world.run(100)
        assert world.probed - cost <= 2 * 4 * packet_trains.LEAST_BYTES
        world.lines[0].rate /= 10
        await world.run(70)
        assert world.mbps(0) == pytest.approx(8, rel=0.1)

    world(work, 80)


@pytest.mark.parametrize("trains", [1, 2])
def test_a_link_that_is_cut_while_it_is_measured_is_known_at_once(trains: int) -> None:
    async def work(world: World) -> None:
        (neighbour,) = world.neighbours
        while len(neighbour.measuring.trains) < trains and neighbour.measuring.settled_at is None:
            await world.prober.step(world.neighbours)
            world.clock.advance(0.2)
        world.lines[0].rate /= 10
        neighbour.doubt()
        began = world.clock()
        while world.mbps(0) > 1:
            await world.run(0.2)
        assert world.clock() - began < 4
        await world.run(10)
        assert neighbour.measuring.settled_at is not None and world.mbps(0) == pytest.approx(0.8, rel=0.1)

    world(work, 8)


def test_a_way_back_that_others_fill_while_a_link_is_measured_says_nothing_of_it() -> None:
    async def work(world: World) -> None:
        (neighbour,) = world.neighbours
        while not neighbour.measuring.trains:
            await world.prober.step(world.neighbours)
            world.clock.advance(0.2)
        world.lines[0].full = 1.0
        await world.run(10)
        assert world.mbps(0) == pytest.approx(8, rel=0.1)
        world.lines[0].full = 0.0
        await world.run(10)
        assert neighbour.measuring.settled_at is not None and world.mbps(0) == pytest.approx(8, rel=0.1)

    world(work, 8)


def test_one_that_fell_makes_us_look_at_the_others() -> None:
    async def work(world: World) -> None:
        await world.run(40)
        for line in world.lines:
            line.rate = 8 * MBPS
        world.neighbours[0].traffic.report = (world.clock(), REPORT)
        world.learned(world.neighbours[0], RateEstimate(bytes_per_second=8 * MBPS, at=world.clock()))
        await world.run(6)
        assert [world.mbps(i) for i in range(3)] == pytest.approx([8, 8, 8], rel=0.1)
        assert world.table.up_mbps(world.clock()) == pytest.approx(8, rel=0.1)

    world(work, 80, 80, 40)


def test_traffic_tells_but_who_sends_little_may_ask_for_a_train() -> None:
    async def work(world: World) -> None:
        await world.run(10)
        cost, neighbour = world.probed, world.neighbours[0]
        world.lines[0].rate /= 10
        neighbour.doubt()
        neighbour.traffic.report = (world.clock() + 1.0, REPORT)
        await world.run(2)
        assert world.probed == cost
        neighbour.traffic.report = (world.clock() + 8.0, REPORT)
        neighbour.press(world.clock())
        await world.run(4)
        assert world.lines[0].pressed and world.mbps(0) == pytest.approx(8, rel=0.1)
        cost = world.probed
        for _ in range(10):
            neighbour.press(world.clock())
            await world.run(PRESS_SECONDS / 10)
        assert world.probed - cost <= 2 * packet_trains.LEAST_BYTES

    world(work, 80)


def test_while_others_are_sent_to_a_train_only_raises() -> None:
    async def work(world: World) -> None:
        await world.run(10)
        world.lines[0].rate /= 2
        world.neighbours[0].doubt()
        for _ in range(3):
            world.neighbours[1].traffic.report = (world.clock() + 2.0, REPORT)
            await world.run(1)
        assert world.mbps(0) == pytest.approx(80, rel=0.1)

    world(work, 80, 80)


@pytest.mark.parametrize("crossed", [0, 50_000])
def test_a_plain_cut_is_seen_although_others_are_sent_to(crossed: int) -> None:
    async def work(world: World) -> None:
        await world.run(10)
        world.lines[0].rate /= 10
        world.lines[0].beside = PeerId("peer-1"), crossed
        world.neighbours[0].doubt()
        world.neighbours[1].traffic.report = (world.clock() + 2.0, REPORT)
        await world.run(2)
        assert 1.6 * 0.9 < world.mbps(0) < 4

    world(work, 16, 16)


def test_what_others_took_of_our_line_is_no_cut() -> None:
    async def work(world: World) -> None:
        await world.run(10)
        world.lines[0].rate /= 10
        world.lines[0].beside = PeerId("peer-1"), 10 * packet_trains.LEAST_BYTES
        world.neighbours[0].doubt()
        world.neighbours[1].traffic.report = (world.clock() + 2.0, REPORT)
        await world.run(2)
        assert world.mbps(0) == pytest.approx(16, rel=0.1)

    world(work, 16, 16)


def test_one_that_comes_in_slower_casts_doubt_on_the_others() -> None:
    async def work(world: World) -> None:
        await world.run(10)
        await world.run(DOUBT_SECONDS)
        for rate in (16, 1.6):
            estimate = RateEstimate(bytes_per_second=rate * MBPS, at=world.clock())
            world.table.learned_incoming(world.neighbours[0], estimate, world.clock(), firm=True)
        assert [neighbour.measuring.settled_at is None for neighbour in world.neighbours] == [False, True]

    world(work, 16, 16)


def test_traffic_pays_for_few_checks() -> None:
    async def work(world: World) -> None:
        await world.run(20)
        world.prober.carried(1e6)
        await world.run(60)
        cost = world.probed
        await world.run(600)
        assert world.probed - cost <= 0.01 * 600 * 1e6

    world(work, 20, 20, 80, 80)


def test_a_pause_in_the_traffic_is_no_leave_to_measure_it_all_again() -> None:
    async def work(world: World) -> None:
        await world.run(20)
        cost = world.probed
        for _ in range(30):
            world.prober.carried(1e6)
            await world.run(1)
            for neighbour in world.neighbours:
                neighbour.doubt()
            world.prober.carried(0.0)
            await world.run(4)
        assert 0 < world.probed - cost <= 768e3 + 150 * (1e3 + 0.01 * 1e6)

    world(work, 20, 20, 80, 80)


def test_blips_of_traffic_do_not_keep_an_idle_link_from_being_checked() -> None:
    async def work(world: World) -> None:
        await world.run(20)
        world.lines[0].rate = 0.8 * MBPS
        for _ in range(18):
            world.prober.carried(1e6)
            await world.run(0.4)
            world.prober.carried(0.0)
            await world.run(8)
        assert world.mbps(0) < 2

    world(work, 8, 20)


def test_nobody_probes_beyond_what_is_allowed() -> None:
    async def work(world: World) -> None:
        await world.run(300)
        assert world.probed <= 2e6 + 300 * 2e3

    world(work, *[1000.0] * 8, first_bytes=1e6, first_bytes_per_second=1e3, check_bytes_per_second=1e3)


def test_the_number_of_peers_changes_nothing() -> None:
    for count in (6, 20, 48):
        table = LinkTable(PeerId("us"), 6)
        for number in range(count):
            table.meet(PeerId(f"peer-{number}"), 0.0)
        assert len(table.wanted(0.0)) == 6
