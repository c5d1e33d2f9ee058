"""Measures this peer's links, by real traffic, and by short probes where there is none.

The receiver of a payload times it and reports once a second to its sender. So the sender knows both its other transfers and the
result of each, and publishes the pair. Round trips are measured by pings: real answers include computing time. A link without
traffic for long is measured by a short train of bytes: of few candidate neighbours, one at a time, within an allowance.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.coordinates import Coordinate, moved
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import LinkRecord, PeerRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.links.packet_trains import FAST
from fusion.swarm.links.prober import QUIET_BYTES, ProbeConfig, Prober
from fusion.swarm.links.probes import ProbeHost, ProbeLine, ProbeReport
from fusion.swarm.links.table import (
    LISTED_SECONDS,
    TOGETHER_SECONDS,
    WITNESSES,
    LinkTable,
    Neighbour,
    after,
    corrected,
    counted,
    tie_break,
)
from fusion.swarm.links.view import LinkView, link_view
from fusion.swarm.printable import error_line
from fusion.swarm.protocol import PROBE
from fusion.swarm.streams.link_estimate import RateEstimate, Sample
from fusion.swarm.streams.receive_log import ReceiveLog
from fusion.swarm.transport import PeerId, Traffic, Transport

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5  # between two checks for neighbours to ping
MOMENT_SECONDS = 0.1  # that a tick waits for pings and publishing
PROBE_PAUSE_SECONDS = 0.15  # between two checks for neighbours to probe
TRAIN_WEIGHT_SECONDS = 3.0  # of traffic that a train counts as: there is no newer measurement


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    neighbours: int = 6  # pinged and probed without traffic
    tick_seconds: float = 1.0
    ping_seconds: float = 5.0
    first_pings: int = 12  # of a neighbour, PAUSE_SECONDS apart
    answer_seconds: float = 3.0
    busy_answer_seconds: float = 15.0  # while there is traffic: an answer may queue behind payloads
    first_mute_seconds: float = 2.0  # a peer that does not answer gets no probes, each time twice as long
    mute_seconds: float = 30.0  # at most
    publish_seconds: float = 8.0
    probing: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "probing" and not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")


class LinkMonitor:
    """`async with LinkMonitor(...)`: measures for the length of the block. `meet` adds candidates."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        receive_log: ReceiveLog,
        config: LinkConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.coordinate = Coordinate()
        self._transport = transport
        self._directory = directory
        self._receive_log = receive_log
        self._config = config = config or LinkConfig()
        self._clock = clock
        self._host = ProbeHost(
            receive_log, lambda: self.coordinate, self._reported, self._train_received, clock=clock
        )
        self._table = LinkTable(transport.peer_id, config.neighbours)
        self._sent: dict[PeerId, int] = {}  # without probes, as of the last tick
        self._ticked_at = clock()
        self._prober = Prober(self._table, transport, config.probing, clock, self._learned, self._mute)
        self._probed_bytes = 0  # to former neighbours
        self._publishing = False
        self._published_at = float("-inf")
        self._view_at = float("-inf")
        self._records: tuple[tuple[PeerRecord, ...], tuple[LinkRecord, ...]] = ((), ())
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.serve()
        self._start(self._for_ever(self.tick, self._config.tick_seconds))
        self._start(self._for_ever(self.ping, PAUSE_SECONDS))
        self._start(self._for_ever(self.probe, PROBE_PAUSE_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def serve(self) -> None:
        """Answer others' probes; done by `async with`, too."""
        await self._transport.serve(PROBE.name, self._host.serve_stream)

    async def aclose(self) -> None:
        """Stop. Our record expires by itself. Idempotent."""
        await cancel_all(self._tasks)
        for neighbour in self._table.every():
            neighbour.line.drop()

    # The results.

    def meet(self, peer: PeerId, *, answers: bool = True) -> None:
        """Note that the directory lists the peer now. It may become a neighbour; without traffic only if it `answers` us."""
        self._table.meet(peer, self._clock(), answers=answers)

    def doubt(self, peer: PeerId) -> None:
        """Our transfers to the peer take longer than they did: measure the link soon, in spite of traffic, unless it was measured a
        moment ago."""
        neighbour = self._table.find(peer)
        if neighbour is not None:
            neighbour.press(self._clock())

    @property
    def up_mbps(self) -> float:
        """The highest rate seen over all links together; 0: not known."""
        return self._table.up_mbps(self._clock())

    @property
    def down_mbps(self) -> float:
        return self._table.down_mbps(self._clock())

    def record(self) -> LinkRecord:
        """Our measurements, the links in use first."""
        return self._table.record(self._clock())

    @property
    def probe_bytes(self) -> int:
        """The approximate bytes of our own pings, trains and reports so far, without answers to others'."""
        return self._probed_bytes + sum(neighbour.line.sent_bytes for neighbour in self._table.every())

    @property
    def peers(self) -> tuple[PeerRecord, ...]:
        """The listed peers, as of the last `refresh`."""
        return self._records[0]

    def snapshot(self) -> LinkView:
        """The links as of the last `refresh`, with our own as of now."""
        peers, links = self._records
        return link_view(peers, (*links, self.record()))

    async def refresh(self, max_age_seconds: float = 2.0) -> LinkView:
        """Read the others' records, unless the last read is no older than that; returns the view. Raises SwarmError."""
        now = self._clock()
        if now - self._view_at >= max_age_seconds:
            self._view_at = now
            self._records = await asyncio.gather(self._directory.peers(), self._directory.links())
        return self.snapshot()

    # Once a second: received payloads are timed and reported to their senders, and changes are published.

    async def tick(self) -> None:
        now, since = self._clock(), self._ticked_at
        self._ticked_at = now
        self._time_arrivals(now, since)
        self._note_traffic(now, now - since)
        for gone in self._table.forget(now):
            self._probed_bytes += gone.line.sent_bytes
            gone.line.drop()
        age = now - self._published_at
        due = age >= self._config.publish_seconds or any(n.news for n in self._table.every())
        if due and not self._publishing:
            await self._moment(self._publish(now))

    def _time_arrivals(self, now: float, since: float) -> None:
        samples = {}
        for peer in self._receive_log.peers(since):
            if self._host.testing(peer):
                continue
            known = self._table.find(peer)
            found = self._receive_log.sample(
                peer, since, None if known is None else known.answers.rtt.seconds
            )
            if found is not None:
                samples[peer] = found
        if not samples:
            return
        sharers = counted(sample.busy_seconds for sample in samples.values())
        together = sum(sample.bytes_per_second for sample in samples.values()) if sharers > 1 else 0.0
        busy = [sample.busy_seconds for sample in samples.values()]
        for peer, found in samples.items():
            if not self._table.listed(peer):  # it counts as a sharer of our line only, since anybody may send
                continue
            neighbour = self._neighbour(peer)
            report = ProbeReport.of(found, sharers, max(together, found.bytes_per_second))
            neighbour.traffic.active_at = now
            firm = report.sure and sharers == 1
            into = after(
                neighbour.into.estimate, report, report.together, now, sum(busy) - found.busy_seconds
            )
            self._table.learned_incoming(neighbour, into, now, firm=firm)
            if not neighbour.traffic.reporting and neighbour.answers.muted_until <= now:
                neighbour.traffic.reporting = True
                self._start(self._report(neighbour, report))
        self._table.down.add(now, sum(s.size for s in samples.values()) / max(*busy, now - since))

    async def _report(self, neighbour: Neighbour, report: ProbeReport) -> None:
        try:
            await neighbour.line.report(report, self._patience(neighbour))
        except (SwarmError, TimeoutError) as error:
            self._mute(neighbour, error)
        finally:
            neighbour.traffic.reporting = False

    def _reported(self, peer: PeerId, report: ProbeReport) -> None:
        """A report of `peer` on our payloads, about once a second. Anybody may send one: it counts only from a listed peer that we sent
        payloads to."""
        neighbour, now = self._table.find(peer), self._clock()
        if neighbour is None or report.bytes_per_second <= 0 or not self._table.listed(peer):
            return
        if not self._sent_lately(neighbour, now):
            return
        report = corrected(report, neighbour.out.bytes_per_second, neighbour.traffic.sent_bytes_per_second)
        neighbour.traffic.report, neighbour.traffic.active_at = (now, report), now
        together = self._table.sharers(now)
        self._table.carried(report.size, now, self._config.tick_seconds)
        sharers = counted(each.seconds for each in together)
        if report.sure and max(report.sharers, sharers) == 1:
            neighbour.settle(now)
        up = sum(each.bytes_per_second for each in together) if sharers > 1 else 0.0
        others = sum(each.seconds for each in together) - report.seconds if report.sharers == 1 else math.inf
        self._learned(neighbour, after(neighbour.out.estimate, report, max(up, report.together), now, others))

    def _train_received(self, peer: PeerId, sample: Sample) -> None:
        neighbour, now = self._table.find(peer), self._clock()
        if neighbour is None:
            return
        rate, high = sample.bytes_per_second, float("inf")
        if sample.sure:
            rates = neighbour.traffic.train_rates = (*neighbour.traffic.train_rates, rate)[-WITNESSES:]
            high = max(rates) if len(rates) == WITNESSES else high
        known = neighbour.into.estimate or RateEstimate(bytes_per_second=rate, at=now)
        self._table.learned_incoming(
            neighbour,
            known.updated(rate, max(rate, high), TRAIN_WEIGHT_SECONDS, now),
            now,
            firm=sample.sure or rate >= FAST,
        )

    def _learned(self, neighbour: Neighbour, estimate: RateEstimate) -> None:
        self._table.learned(neighbour, estimate, self._clock())

    def _note_traffic(self, now: float, seconds: float) -> None:
        """Make neighbours of the peers that we send much to, and update the traffic of all."""
        total = 0
        traffic = self._transport.traffic()
        self._sent = {peer: sent for peer, sent in self._sent.items() if peer in traffic}
        seconds = max(seconds, 1e-3)
        for peer, count in traffic.items():
            more = self._sent_since_tick(peer, count)
            self._sent[peer] = self._sent.get(peer, 0) + more
            total += more
            if more > QUIET_BYTES and self._table.listed(peer):
                crossing = self._neighbour(peer).traffic
                crossing.active_at = crossing.sent_at = now
            neighbour = self._table.find(peer)
            if neighbour is not None:
                neighbour.traffic.add_sent(more / seconds)
        self._prober.carried(total / seconds)

    def _sent_since_tick(self, peer: PeerId, count: Traffic) -> int:
        """Bytes sent since the last tick, without probes."""
        neighbour = self._table.find(peer)
        sent = count.sent_bytes - (0 if neighbour is None else neighbour.line.sent_bytes)
        return max(0, sent - self._sent.get(peer, 0))

    def _sent_lately(self, neighbour: Neighbour, now: float) -> bool:
        """Whether it may still receive a payload of ours."""
        if now - neighbour.traffic.sent_at <= LISTED_SECONDS:
            return True
        count = self._transport.traffic().get(neighbour.peer)
        return count is not None and self._sent_since_tick(neighbour.peer, count) > QUIET_BYTES

    async def _publish(self, now: float) -> None:
        self._publishing, self._published_at = True, now
        for neighbour in self._table.every():
            neighbour.published = neighbour.newest
        record = self.record()
        try:
            if record.pairs:
                await self._directory.publish(record, ttl_seconds=3 * self._config.publish_seconds)
        except SwarmError as error:
            logger.debug("links: %s", error_line(error))
        finally:
            self._publishing = False

    # Pings.

    async def ping(self) -> None:
        """Ping the neighbours that are due, and wait a moment for their answers."""
        now = self._clock()
        await self._moment(*(self._ping(n) for n in self._chosen(now) if self._to_ping(n, now)))

    def _to_ping(self, neighbour: Neighbour, now: float) -> bool:
        if neighbour.line.busy:
            return False
        fresh = neighbour.answers.count < self._config.first_pings
        return fresh or now - neighbour.answers.pinged_at >= self._config.ping_seconds

    async def _ping(self, neighbour: Neighbour) -> None:
        neighbour.answers.pinged_at = self._clock()
        before = self._bytes_with(neighbour.peer)
        try:
            took, there = await neighbour.line.ping(self._patience(neighbour))
        except (SwarmError, TimeoutError) as error:
            self._mute(neighbour, error)
            return
        now = self._clock()
        crossed = self._bytes_with(neighbour.peer) - before
        quiet = crossed < QUIET_BYTES and now - neighbour.traffic.active_at > TOGETHER_SECONDS
        neighbour.answers.succeeded(took, now, quiet=quiet)
        rtt = neighbour.answers.rtt.seconds
        assert rtt is not None
        direction = tie_break(self._transport.peer_id, neighbour.peer)
        self.coordinate = moved(self.coordinate, there, 1e3 * rtt, direction)

    def _patience(self, neighbour: Neighbour) -> float:
        """Seconds to wait for an answer. Giving one up aborts the stream, and with it the reports on traffic."""
        config = self._config
        busy = self._clock() - neighbour.traffic.active_at <= config.answer_seconds
        return config.busy_answer_seconds if busy else config.answer_seconds

    def _bytes_with(self, peer: PeerId) -> int:
        count = self._transport.traffic().get(peer)
        return 0 if count is None else count.sent_bytes + count.received_bytes

    # Trains.

    async def probe(self) -> None:
        """Send a train to the neighbour that needs one most, if any is due and allowed."""
        await self._prober.step(self._chosen(self._clock()))

    # Neighbours.

    def _neighbour(self, peer: PeerId) -> Neighbour:
        return self._table.find(peer) or self._table.add(ProbeLine(self._transport, peer, self._clock))

    def _chosen(self, now: float) -> list[Neighbour]:
        wanted = [self._neighbour(peer) for peer in self._table.wanted(now)]
        return [neighbour for neighbour in wanted if neighbour.answers.muted_until <= now]

    def _mute(self, neighbour: Neighbour, error: BaseException) -> None:
        logger.debug("no answer to a probe of %s: %s", neighbour.peer, error_line(error))
        neighbour.line.drop()
        neighbour.answers.failed(self._clock(), self._config.first_mute_seconds, self._config.mute_seconds)

    # Tasks.

    async def _for_ever(self, step: Callable[[], Coroutine[Any, Any, None]], pause_seconds: float) -> None:
        while True:
            await asyncio.sleep(pause_seconds)
            try:
                await step()
            except SwarmError as error:
                logger.debug("links: %s", error_line(error))

    async def _moment(self, *works: Coroutine[Any, Any, None]) -> None:
        """Start these and wait at most MOMENT_SECONDS: a slow link must not delay the timing of the others."""
        tasks = [self._start(work) for work in works]
        if tasks:
            await asyncio.wait(tasks, timeout=MOMENT_SECONDS)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="links")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
