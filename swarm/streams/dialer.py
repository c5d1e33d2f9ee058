"""Dials peers through p2pd: knows whom it is connected to and the addresses of others, so that p2pd never dials in vain.

libp2p's dial backoff refuses an address for 6 s after it failed, then 9, 14, ... up to five minutes: a peer that is back after a
second, or the other half of a healed partition, would stay unreachable for that long. So callers that may make p2pd dial
await `reach` first, which tries the peer's known addresses itself ("knocks"); p2pd dials those that answered.

And p2pd takes 40 s to notice that a connection died silently (a router forgot it, a machine slept or changed its network). So
callers that wait for a first answer report that by `unanswered`: a connection over which nothing arrives is closed if the peer
answers at one of its addresses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.errors import PeerUnreachable, TransportError
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

BANNER = b"\x13/multistream/1.0.0\n"  # what a libp2p host sends first on a connection

Connected = Callable[[], Awaitable[frozenset[PeerId]]]
Dial = Callable[[PeerId, Sequence[str]], Awaitable[None]]
IsAlive = Callable[[PeerId], Awaitable[bool]]
HangUp = Callable[[PeerId], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class DialerConfig:
    knock_seconds: float = 3.0  # for an address to answer; busy machines are slow
    remember_seconds: float = 60.0  # for learnt addresses; after that p2pd may dial those that it knows
    shaken_seconds: float = 1.0  # for p2pd to notice, after a stream broke, that its connection did
    # A peer is dialled if a list of p2pd's that is no older lacks it.
    fresh_seconds: float = 0.25
    addresses_per_peer: int = 8
    peers: int = 4096
    examine_seconds: float = 3.0  # between two checks of the connection to a peer
    examined_at_once: int = 64  # connections

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")


class Dialer:
    """`connected()` lists p2pd's connections, `dial(peer, addresses)` makes it dial, `hang_up(peer)` makes it close the connection,
    and `is_alive(peer)` checks whether anything passes over it. All raise TransportError."""

    def __init__(
        self,
        connected: Connected,
        dial: Dial,
        config: DialerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_alive: IsAlive | None = None,
        hang_up: HangUp | None = None,
    ) -> None:
        self._list_connected = connected
        self._dial = dial
        self._config = config or DialerConfig()
        self._clock = clock
        self._book: dict[PeerId, tuple[float, tuple[str, ...]]] = {}
        self._connected: frozenset[PeerId] = frozenset()
        self._listed_at = float("-inf")
        self._listing: tuple[float, asyncio.Task[frozenset[PeerId]]] | None = None  # since when
        self._tasks: set[asyncio.Task[frozenset[PeerId]]] = set()
        self._dialling: dict[PeerId, asyncio.Task[None]] = {}
        self._shaken: dict[PeerId, float] = {}  # when a stream to it broke
        self._is_alive = is_alive
        self._hang_up = hang_up
        self._examining: set[asyncio.Task[None]] = set()
        self._examined: dict[PeerId, float] = {}  # when, of late

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember these multiaddrs (that end in /p2p/<peer id>) as the peer's. Ignored where none is plain TCP, which `knock` needs:
        p2pd then has to find the peer."""
        # A dead host refuses no UDP packet: p2pd would wait for it.
        where = sorted((a for a in addresses if "/udp/" not in a), key=lambda a: tcp_target(a) is None)
        if where and tcp_target(where[0]) is not None:
            self._book.pop(peer, None)
            self._book[peer] = (self._clock(), tuple(where[: self._config.addresses_per_peer]))
            while len(self._book) > self._config.peers:
                del self._book[next(iter(self._book))]

    def hint(self, peer: PeerId, address: str) -> None:
        """As `learn`, for one address from another source, tried beside those that the peer itself published."""
        learned_at, addresses = self._book.get(peer, (float("-inf"), ()))
        if self._clock() - learned_at > self._config.remember_seconds:
            self.learn(peer, [address])
        elif address not in addresses and tcp_target(address) is not None:
            kept = addresses[: self._config.addresses_per_peer - 1]
            self._book[peer] = (learned_at, (*kept, address))

    def invalidate(self, peer: PeerId | None = None) -> None:
        """A connection may be gone: list p2pd's connections again before the next dial. With `peer`: a stream to it broke, so that the
        connection may be dead though p2pd does not know yet."""
        self._listed_at = float("-inf")
        self._listing = None  # a list under way may be from before
        if peer is not None:
            now = self._clock()
            self._shaken = {p: at for p, at in self._shaken.items() if now - at < self._config.shaken_seconds}
            self._shaken[peer] = now

    def unanswered(self, peer: PeerId) -> None:
        """The peer has taken longer than usual to answer: check in the background whether the connection is dead or the peer slow."""
        now = self._clock()
        self._examined = {
            p: at for p, at in self._examined.items() if now - at < self._config.examine_seconds
        }
        if peer in self._examined or len(self._examining) >= self._config.examined_at_once:
            return
        self._examined[peer] = now
        task = asyncio.create_task(self._examine(peer), name=f"examine the connection to {peer}")
        self._examining.add(task)
        task.add_done_callback(self._examining.discard)

    async def connected(self, *, max_age_seconds: float = 0.0) -> frozenset[PeerId]:
        """The peers that p2pd is connected to, by a list at most so old."""
        now = self._clock()
        if now - self._listed_at < max_age_seconds:
            return self._connected
        # Callers at the same time share one list.
        if self._listing is None or now - self._listing[0] > max(max_age_seconds, self._config.fresh_seconds):
            task = asyncio.create_task(self._list(now), name="list connections")
            self._listing = (now, task)
            self._tasks.add(task)
            task.add_done_callback(self._listed)
        return await asyncio.shield(self._listing[1])

    async def _list(self, started_at: float) -> frozenset[PeerId]:
        connected = await self._list_connected()
        # Not invalidated meanwhile
        if self._listing is not None and self._listing[1] is asyncio.current_task():
            self._connected, self._listed_at = connected, started_at
        return connected

    def _listed(self, task: asyncio.Task[frozenset[PeerId]]) -> None:
        self._tasks.discard(task)
        if self._listing is not None and self._listing[1] is task:
            self._listing = None
        if not task.cancelled():
            task.exception()  # marks it retrieved: those that awaited it have it

    async def reach(self, peer: PeerId, *, max_age_seconds: float = 0.0) -> None:
        """Return once p2pd is connected to the peer, or at once where we know no address, so that p2pd has to find one. Raises
        PeerUnreachable if none of the known addresses answers."""
        connected = peer in await self.connected(max_age_seconds=max_age_seconds)
        if not connected and max_age_seconds > self._config.fresh_seconds:  # it may have dialled us since
            connected = peer in await self.connected(max_age_seconds=self._config.fresh_seconds)
        if connected and not self._is_shaken(peer):
            return
        addresses = self._known(peer)
        if not addresses:
            return
        task = self._dialling.get(peer)
        if task is None:  # callers for one peer at the same time share one dial
            task = asyncio.create_task(self._knock_and_dial(peer, addresses), name=f"dial {peer}")
            self._dialling[peer] = task
            task.add_done_callback(lambda done: self._dialled(peer, done))
        try:
            await asyncio.shield(task)
        except PeerUnreachable:
            # A peer behind NAT may be connected to us though nobody can dial it.
            if self._is_shaken(peer) or peer not in await self.connected():
                raise

    async def aclose(self) -> None:
        await cancel_all([*self._examining, *self._dialling.values(), *self._tasks])

    def _known(self, peer: PeerId) -> tuple[str, ...]:
        learned_at, addresses = self._book.get(peer, (float("-inf"), ()))
        return addresses if self._clock() - learned_at <= self._config.remember_seconds else ()

    async def _examine(self, peer: PeerId) -> None:
        if self._is_alive is None or self._hang_up is None:
            return
        addresses = self._known(peer)
        try:
            if not addresses or peer not in await self.connected():
                return
            # At the same time, since p2pd of the peer answers both: a frozen or unreachable one answers neither.
            alive, knocks = await asyncio.gather(self._is_alive(peer), self._knock(addresses))
            if alive or not any(map(_succeeded, knocks.values())):
                return
            logger.debug("the connection to %s is dead, and it answers a new one", peer)
            await self._hang_up(peer)
            self.invalidate(peer)
            await self.reach(peer)
        except TransportError as error:
            logger.debug("no new connection to %s: %s", peer, error)

    def _is_shaken(self, peer: PeerId) -> bool:
        return self._clock() - self._shaken.get(peer, float("-inf")) < self._config.shaken_seconds

    def _dialled(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        self._dialling.pop(peer, None)
        self.invalidate()
        if not task.cancelled():
            task.exception()  # marks it retrieved: nobody may await it any more

    async def _knock_and_dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial at the first addresses that answer; if another peer is there, at the remaining ones: a private address of the peer's
        network may be another host's in ours."""
        others = [address for address in addresses if tcp_target(address) is None]
        failure: PeerUnreachable | None = None
        while True:
            knocks = await self._knock(addresses)
            answered = [address for address, task in knocks.items() if _succeeded(task)]
            if not answered:
                break
            try:
                return await self._dial(peer, answered)
            except PeerUnreachable as error:
                failure = failure or error
            addresses = [address for address, task in knocks.items() if task.cancelled()]
        if others:
            return await self._dial(peer, others)
        reasons = [str(task.exception()) for task in knocks.values() if not task.cancelled()]
        raise failure or PeerUnreachable(
            f"cannot reach {peer}: {reasons[0] if reasons else 'nobody answers'}"
        )

    async def _knock(self, addresses: Sequence[str]) -> dict[str, asyncio.Task[None]]:
        """Try all plain TCP addresses at once until one answers. Returns the finished tasks, the unneeded ones cancelled."""
        targets = dict.fromkeys(address for address in addresses if tcp_target(address) is not None)
        knocks = {a: asyncio.create_task(accepts(a, self._config.knock_seconds)) for a in targets}
        waiting = set(knocks.values())
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() is None for task in done):
                    break
        finally:
            await cancel_all(knocks.values())
        return knocks


async def accepts(address: str, seconds: float) -> None:
    """Raises PeerUnreachable unless a libp2p host answers at a TCP multiaddr. Does not check other kinds of address."""
    target = tcp_target(address)
    if target is None:
        return
    host, port = target
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            banner = await reader.readexactly(len(BANNER))
    except TimeoutError:
        raise PeerUnreachable(f"{host} port {port}: no answer in {seconds:g} s") from None
    except asyncio.IncompleteReadError as error:
        raise PeerUnreachable(f"{host} port {port}: it hung up") from error
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise PeerUnreachable(f"{host} port {port}: {reason}") from error
    finally:
        if writer is not None:
            with suppress(OSError):
                writer.transport.abort()
    if banner != BANNER:
        raise PeerUnreachable(f"{host} port {port}: no peer answers there")


def tcp_target(address: str) -> tuple[str, int] | None:
    """Host and port of a plain TCP multiaddr, with or without its /p2p/<peer id>; None for other kinds."""
    where = address.rpartition("/p2p/")[0] or address
    match where.split("/"):
        case ["", ("ip4" | "ip6") as kind, host, "tcp", port] if port.isascii() and port.isdecimal():
            of_kind = ipaddress.IPv4Address if kind == "ip4" else ipaddress.IPv6Address
            try:
                of_kind(host)
            except ValueError:  # a name, which would be looked up
                return None
            plain = "%" not in host and len(port) <= 5 and 0 < int(port) < 65536
            return (host, int(port)) if plain else None
    return None


def _succeeded(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None
