"""Membership of the swarm: announcing us every heartbeat, joining, and joining again.

A peer needs no bootstrap peer to run: it starts alone, dials its seeds and the peers it met in earlier runs for ever in the
background, and others may dial it. Seeds are dialled also while there are neighbours, since a swarm that lost its seeds for a
while may have split in two; and so are, every few seconds, peers that are no longer listed
(`fusion.swarm.directory.missing_peers`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.directory.api import GLANCE_SECONDS, HEARTBEAT_SECONDS, Directory
from fusion.swarm.directory.bootstrap import MAX_CACHED, load_cached, save_cached
from fusion.swarm.directory.missing_peers import MissingPeers, MissingPeersConfig
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.errors import ClosedSwarm, SwarmError, TransportError
from fusion.swarm.transport import PeerId, Transport

logger = logging.getLogger(__name__)

_ADDRESSES_EACH = 4  # of one peer, tried or remembered


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    bootstrap: tuple[str, ...] = ()  # full multiaddrs
    cache_path: Path | None = None  # keeps the peers met for the next start
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    first_retry_seconds: float = 0.5  # doubling, while no seed answers
    longest_retry_seconds: float = 10.0
    probe_seconds: float = 30.0  # between two dials of all seeds while there are neighbours
    look_seconds: float = 5.0  # between two reads of the listed peers
    search_seconds: float = 1.0  # between two checks for missing peers to dial
    remember_seconds: float = 60.0
    seeds_at_once: int = 16
    missing: MissingPeersConfig = MissingPeersConfig()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        for name in (
            "heartbeat_seconds",
            "first_retry_seconds",
            "longest_retry_seconds",
            "probe_seconds",
            "look_seconds",
            "search_seconds",
            "remember_seconds",
            "seeds_at_once",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@runtime_checkable
class Neighbourhood(Protocol):
    """The part of a DHT that joining needs. `HivemindDirectory` is one."""

    async def join(self, peer: PeerId) -> bool:
        """Become the DHT neighbour of a connected peer; False if it does not answer. Raises ClosedSwarm if it answers only members
        of its own swarm, or is no member of ours."""

    async def refresh(self) -> int:
        """Search for nodes around us; returns how many neighbours we have."""

    def neighbours(self) -> tuple[PeerId, ...]: ...


class Membership:
    """`async with Membership(...)`: announces this peer, and keeps it in the swarm, for the length of the block.

    `describe` makes our record as of now. `joined` is set once there is a neighbour, `announced` once our record was published
    to a swarm (to ourselves, where there are no seeds), `refused` once bootstrap peers answered that we are no member of their
    swarm and we have no neighbour: none of these need ever happen.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        neighbourhood: Neighbourhood,
        describe: Callable[[], PeerRecord] | None,
        config: MembershipConfig,
        learn: Callable[[PeerId, Sequence[str], bool], None] = lambda peer, addresses, answers: None,
    ) -> None:
        """`describe` None: a client, which is not announced. `learn` gets the addresses of each listed peer, and whether the peer is
        a neighbour of ours."""
        self.announced = asyncio.Event()
        self.joined = asyncio.Event()
        self.refused = asyncio.Event()
        self._transport = transport
        self._directory = directory
        self._neighbourhood = neighbourhood
        self._describe = describe
        self._config = config
        self._learn = learn
        self._missing = MissingPeers(transport.peer_id, config.missing)
        self._remembered_at = float("-inf")
        self._cached: tuple[str, ...] = ()
        self._warned = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._config.cache_path is not None:
            self._cached = await asyncio.to_thread(load_cached, self._config.cache_path)
        loops = [self._join_for_ever(), self._look_for_ever(), self._search_for_ever()]
        if self._describe is not None:
            loops.append(self._announce_for_ever())
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop. Our record expires by itself. Idempotent."""
        await cancel_all(self._tasks)
        if self._tasks:
            await self._save()
        self._tasks = []

    @property
    def seeds(self) -> tuple[str, ...]:
        """The addresses that we dial to join: the configured ones, then those of peers met before."""
        return tuple(dict.fromkeys([*self._config.bootstrap, *self._cached]))

    async def announce(self) -> bool:
        """Publish our record once; False, logged, if that failed."""
        if self._describe is None:
            return False
        try:
            await self._directory.publish(self._describe(), ttl_seconds=3 * self._config.heartbeat_seconds)
        except SwarmError as error:
            logger.warning("not announced: %s", error)
            return False
        if self.joined.is_set() or not self.seeds:
            self.announced.set()
        return True

    async def join(self) -> bool:
        """Dial every seed that is not a neighbour yet; True if we have a neighbour afterwards."""
        known = {self._transport.peer_id, *self._neighbourhood.neighbours()}
        seeds = [seed for seed in self.seeds if seed.rpartition("/p2p/")[2] not in known]
        limit = asyncio.Semaphore(self._config.seeds_at_once)
        answers = await asyncio.gather(
            *(self._join_through(seed, limit) for seed in seeds), return_exceptions=True
        )
        refused = False
        for seed, answer in zip(seeds, answers, strict=True):
            if isinstance(answer, ClosedSwarm):
                logger.debug("%s: %s", seed, answer)
                refused |= seed in self._config.bootstrap  # a peer met before may be in another swarm now
            elif isinstance(answer, BaseException):
                raise answer
        if not self._neighbourhood.neighbours():
            if refused and not self.joined.is_set():
                self.refused.set()
            if (
                seeds and not self._warned and self._describe is not None
            ):  # a client without a swarm reports that itself
                logger.warning(
                    "none of %d known peers answers; going on alone and trying again in the background",
                    len(seeds),
                )
                self._warned = True
            return False
        if self._warned:
            logger.info("back in the swarm")
        self._warned = False
        self.joined.set()
        return True

    async def look(self) -> None:
        """Read the listed peers, to notice missing ones; now and then save some for the next start, and for when all seeds
        are gone."""
        try:
            records = await self._directory.peers(max_age_seconds=GLANCE_SECONDS)
        except SwarmError as error:
            logger.debug("peers not read: %s", error)
            return
        others = [r for r in records if r.role == "peer" and r.peer != self._transport.peer_id]
        near = frozenset(self._neighbourhood.neighbours())
        for record in others:
            self._learn(record.peer, record.addresses, record.peer in near)
        now = time.monotonic()
        self._missing.update(others, near, now)
        if not others:
            return
        # At random, so that in a large swarm not all peers save the same few; only neighbours, for anybody may list peers.
        chosen = random.sample(others, len(others))
        chosen = [record for record in chosen if record.peer in near] or chosen
        fresh = [address for record in chosen for address in record.addresses[:_ADDRESSES_EACH]]
        self._cached = tuple(dict.fromkeys([*fresh, *self._cached]))[:MAX_CACHED]
        if now - self._remembered_at >= self._config.remember_seconds:
            self._remembered_at = now
            await self._save()

    async def search(self) -> None:
        """Dial the missing peers that are due; those that answer become neighbours again."""
        limit = asyncio.Semaphore(self._config.seeds_at_once)
        due = self._missing.due(time.monotonic())
        outcomes = await asyncio.gather(
            *(self._dial_any(addresses[:_ADDRESSES_EACH], limit) for addresses in due.values()),
            return_exceptions=True,
        )
        for failure in outcomes:
            if isinstance(failure, BaseException) and not isinstance(failure, ClosedSwarm):
                raise failure
        back = [peer for peer, there in zip(due, outcomes, strict=True) if there is True]
        for peer in back:
            self._missing.answered(peer)
        if back:
            logger.info("%d peers that were missing answer again", len(back))
            await self.announce()  # their neighbours need not wait for our next heartbeat

    async def _save(self) -> None:
        if self._config.cache_path is None or not self._cached:
            return
        try:
            await asyncio.to_thread(save_cached, self._config.cache_path, self._cached)
        except OSError as error:
            logger.warning(
                "cannot remember peers in %s: %s", self._config.cache_path, error.strerror or error
            )

    async def _join_through(self, seed: str, limit: asyncio.Semaphore) -> None:
        if await self._dial_any((seed,), limit):
            self.joined.set()  # no need to wait for the other seeds, which may be dead

    async def _dial_any(self, addresses: Sequence[str], limit: asyncio.Semaphore) -> bool:
        """Dial one peer at all of its addresses; whether it is our neighbour afterwards. Raises ClosedSwarm."""
        async with limit:
            tried = await asyncio.gather(
                *(self._transport.connect(address) for address in addresses), return_exceptions=True
            )
            for address, outcome in zip(addresses, tried, strict=True):
                if not isinstance(outcome, BaseException):
                    return await self._neighbourhood.join(outcome)
                if not isinstance(outcome, (TransportError, ValueError)):
                    raise outcome
                logger.debug("%s: %s", address, outcome)
            return False

    async def _announce_for_ever(self) -> None:
        while True:
            await self.announce()
            await asyncio.sleep(self._config.heartbeat_seconds)

    async def _join_for_ever(self) -> None:
        pause = self._config.first_retry_seconds
        while True:
            if await self.join():
                pause = self._config.first_retry_seconds
                await self._neighbourhood.refresh()
                if not self.announced.is_set():
                    await self.announce()  # the swarm need not wait for our next heartbeat
                await self._wait_while_joined()
            else:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # not all peers at once
                pause = min(2 * pause, self._config.longest_retry_seconds)

    async def _wait_while_joined(self) -> None:
        """Returns once we have no neighbours, at the latest after `probe_seconds`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.probe_seconds
        while self._neighbourhood.neighbours() and loop.time() < until:
            await asyncio.sleep(self._config.heartbeat_seconds)

    async def _look_for_ever(self) -> None:
        await self.joined.wait()
        while True:
            await self.look()
            await asyncio.sleep(self._config.look_seconds)

    async def _search_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._config.search_seconds)
            await self.search()
