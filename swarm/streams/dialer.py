"""Whom p2pd is connected to, and where the others listen, so that it never dials in vain.

libp2p refuses to dial an address again for 6 s after it failed, then 9, 14, ... up to five minutes: a peer that is
back after a second, or a swarm that a cut link had divided, would stay out of reach for that long. So whatever may
make p2pd dial asks `reach` first, which knocks at the peer's known addresses itself; p2pd dials what answered.

And p2pd takes 40 s to notice that a connection died without a word (a router forgot it, a machine slept or changed its network).
So whoever waits for a first answer says so by `unanswered`: a connection over which nothing comes any more is given up
if the peer answers at an address of its own.
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

BANNER = b"\x13/multistream/1.0.0\n"  # what a libp2p host says to whoever connects, before it is asked

Connected = Callable[[], Awaitable[frozenset[PeerId]]]
Dial = Callable[[PeerId, Sequence[str]], Awaitable[None]]
Lives = Callable[[PeerId], Awaitable[bool]]
HangUp = Callable[[PeerId], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class DialerConfig:
    knock_seconds: float = 3.0  # for an address to answer; busy machines take their time
    remember_seconds: float = 60.0  # after which p2pd may try what it knows by itself
    shaken_seconds: float = 1.0  # after a stream broke, for p2pd to learn that the connection did too
    # A list of p2pd's that is no older and lacks a peer is believed: it is dialled.
    fresh_seconds: float = 0.25
    addresses_per_peer: int = 8
    peers: int = 4096
    examine_seconds: float = 3.0  # between two looks at whether the connection to a peer lives
    examined_at_once: int = 64  # connections

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")


class Dialer:
    """`connected()` asks p2pd whom it is connected to, `dial(peer, addresses)` makes it dial, `hang_up(peer)` end the
    connection. `lives(peer)`: whether anything comes over it. All raise TransportError."""

    def __init__(
        self,
        connected: Connected,
        dial: Dial,
        config: DialerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        lives: Lives | None = None,
        hang_up: HangUp | None = None,
    ) -> None:
        self._ask_connected = connected
        self._dial = dial
        self._config = config or DialerConfig()
        self._clock = clock
        self._book: dict[PeerId, tuple[float, tuple[str, ...]]] = {}
        self._connected: frozenset[PeerId] = frozenset()
        self._asked_at = float("-inf")
        self._asking: tuple[float, asyncio.Task[frozenset[PeerId]]] | None = None  # since when
        self._tasks: set[asyncio.Task[frozenset[PeerId]]] = set()
        self._dialling: dict[PeerId, asyncio.Task[None]] = {}
        self._shaken: dict[PeerId, float] = {}  # when a stream to it broke
        self._lives = lives
        self._hang_up = hang_up
        self._examining: set[asyncio.Task[None]] = set()
        self._examined: dict[PeerId, float] = {}  # when, of late

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """The peer says, or we were told, that it listens at these multiaddrs (that end in /p2p/<peer id>). Where none of them
        is plain TCP, at which we could knock, p2pd is left to find it."""
        # Over UDP nobody refuses: a peer that is gone would be waited for.
        where = sorted((a for a in addresses if "/udp/" not in a), key=lambda a: tcp_target(a) is None)
        if where and tcp_target(where[0]) is not None:
            self._book.pop(peer, None)
            self._book[peer] = (self._clock(), tuple(where[: self._config.addresses_per_peer]))
            while len(self._book) > self._config.peers:
                del self._book[next(iter(self._book))]

    def hint(self, peer: PeerId, address: str) -> None:
        """As `learn`, of one address that somebody gave us, to be tried beside those that the peer itself named."""
        learned_at, addresses = self._book.get(peer, (float("-inf"), ()))
        if self._clock() - learned_at > self._config.remember_seconds:
            self.learn(peer, [address])
        elif address not in addresses and tcp_target(address) is not None:
            kept = addresses[: self._config.addresses_per_peer - 1]
            self._book[peer] = (learned_at, (*kept, address))

    def doubt(self, peer: PeerId | None = None) -> None:
        """A connection may be gone: ask p2pd anew before the next dial. With `peer`: a stream to it broke, and p2pd may
        not know yet that the connection has."""
        self._asked_at = float("-inf")
        self._asking = None  # what p2pd answers now may be from before
        if peer is not None:
            now = self._clock()
            self._shaken = {p: at for p, at in self._shaken.items() if now - at < self._config.shaken_seconds}
            self._shaken[peer] = now

    def unanswered(self, peer: PeerId) -> None:
        """The peer has taken longer than usual to answer. It may be slow; or the connection may have died, which is looked into."""
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
        """The peers that p2pd was connected to at most so long ago."""
        now = self._clock()
        if now - self._asked_at < max_age_seconds:
            return self._connected
        # Those who want to know at the same time share one question.
        if self._asking is None or now - self._asking[0] > max(max_age_seconds, self._config.fresh_seconds):
            task = asyncio.create_task(self._list(now), name="who is connected")
            self._asking = (now, task)
            self._tasks.add(task)
            task.add_done_callback(self._listed)
        return await asyncio.shield(self._asking[1])

    async def _list(self, asked_at: float) -> frozenset[PeerId]:
        connected = await self._ask_connected()
        # Nobody doubted it meanwhile
        if self._asking is not None and self._asking[1] is asyncio.current_task():
            self._connected, self._asked_at = connected, asked_at
        return connected

    def _listed(self, task: asyncio.Task[frozenset[PeerId]]) -> None:
        self._tasks.discard(task)
        if self._asking is not None and self._asking[1] is task:
            self._asking = None
        if not task.cancelled():
            task.exception()  # whoever waited has it

    async def reach(self, peer: PeerId, *, max_age_seconds: float = 0.0) -> None:
        """Returns once p2pd is connected to the peer, or where we know of no address to try, so that p2pd has to find
        one. Raises PeerUnreachable if no address that we know answers."""
        connected = peer in await self.connected(max_age_seconds=max_age_seconds)
        if not connected and max_age_seconds > self._config.fresh_seconds:  # it may have dialled us since
            connected = peer in await self.connected(max_age_seconds=self._config.fresh_seconds)
        if connected and not self._is_shaken(peer):
            return
        addresses = self._known(peer)
        if not addresses:
            return
        task = self._dialling.get(peer)
        if task is None:  # those who want the same peer at the same time share one dial
            task = asyncio.create_task(self._knock_and_dial(peer, addresses), name=f"dial {peer}")
            self._dialling[peer] = task
            task.add_done_callback(lambda done: self._dialled(peer, done))
        try:
            await asyncio.shield(task)
        except PeerUnreachable:
            # A peer behind a router is connected with us though nobody can dial it.
            if self._is_shaken(peer) or peer not in await self.connected():
                raise

    async def aclose(self) -> None:
        await cancel_all([*self._examining, *self._dialling.values(), *self._tasks])

    def _known(self, peer: PeerId) -> tuple[str, ...]:
        learned_at, addresses = self._book.get(peer, (float("-inf"), ()))
        return addresses if self._clock() - learned_at <= self._config.remember_seconds else ()

    async def _examine(self, peer: PeerId) -> None:
        if self._lives is None or self._hang_up is None:
            return
        addresses = self._known(peer)
        try:
            if not addresses or peer not in await self.connected():
                return
            # At the same time, and the same peer's p2pd says both: one that is frozen or cut off answers neither.
            lives, knocks = await asyncio.gather(self._lives(peer), self._knock(addresses))
            if lives or not any(map(_went_well, knocks.values())):
                return
            logger.debug("the connection to %s is dead, and it answers a new one", peer)
            await self._hang_up(peer)
            self.doubt(peer)
            await self.reach(peer)
        except TransportError as error:
            logger.debug("no new connection to %s: %s", peer, error)

    def _is_shaken(self, peer: PeerId) -> bool:
        return self._clock() - self._shaken.get(peer, float("-inf")) < self._config.shaken_seconds

    def _dialled(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        self._dialling.pop(peer, None)
        self.doubt()
        if not task.cancelled():
            task.exception()  # whoever waited has it; perhaps nobody does any longer

    async def _knock_and_dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """The first address at which anybody answers; then the others, as it may be somebody else's: a private address that the
        peer has in its own network is another's in ours."""
        others = [address for address in addresses if tcp_target(address) is None]
        failure: PeerUnreachable | None = None
        while True:
            knocks = await self._knock(addresses)
            answered = [address for address, task in knocks.items() if _went_well(task)]
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
        """At all of them that are plain TCP, until one answers or none does. The tasks are over; those that were not needed are
        cancelled."""
        doors = dict.fromkeys(address for address in addresses if tcp_target(address) is not None)
        knocks = {a: asyncio.create_task(accepts(a, self._config.knock_seconds)) for a in doors}
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
    """Raises PeerUnreachable unless a libp2p host answers at a TCP multiaddr; says nothing about others' kinds."""
    target = tcp_target(address)
    if target is None:
        return
    host, port = target
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            said = await reader.readexactly(len(BANNER))
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
    if said != BANNER:
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


def _went_well(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None
