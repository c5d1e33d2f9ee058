"""The swarm as placement sees it: the links of its records, and guesses for all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf

from fusion.dag.placement.machine import SEPARATE_MACHINE, Machine
from fusion.dag.placement.network import Device, Link, Network
from fusion.dag.placement.speeds import Speeds
from fusion.runtime.placing.link_guess import link_guess, machines_of
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.links.packet_trains import FAST
from fusion.swarm.links.view import LinkView, PairLink
from fusion.swarm.transport import PeerId

# Of the cores of a machine, of sender and reader together, through both daemons: measured between training peers of one machine,
# twice what a message costs with warm caches.
MESSAGE_SECONDS, BYTE_SECONDS = 1e-3, 2e-8


@dataclass(frozen=True, kw_only=True)
class KnownNetwork:
    network: Network
    view: LinkView

    def known(self, a: str, b: str) -> bool:
        """Whether round trip and rate from `a` to `b` were measured."""
        return self.view.link(PeerId(a), PeerId(b)).measured


def known_network(peers: Sequence[PeerRecord], view: LinkView) -> KnownNetwork:
    """Of every ordered pair what was measured; else an estimate from coordinates, uplinks and downlinks; else a guess from addresses.
    A line that was not measured has no limit. Devices are in the order in which their peers started."""
    peers = sorted(peers, key=lambda peer: (peer.started_at, peer.peer))
    best_out, best_in = _best(view)
    machines = machines_of(peers)
    devices = tuple(
        Device(
            peer=peer.peer,
            flops_per_second=max(peer.flops_per_second, 1.0),
            memory_bytes=peer.free_memory_bytes,
            up_bytes_per_second=_line(view.up.get(peer.peer), best_out.get(peer.peer, 0.0)),
            down_bytes_per_second=_line(view.down.get(peer.peer), best_in.get(peer.peer, 0.0)),
            measured=_speeds(peer),
            machine=_machine(machines[peer.peer], peer.cores),
        )
        for peer in peers
    )
    return KnownNetwork(network=Network(devices=devices, links=_KnownLinks(peers, view)), view=view)


class _KnownLinks(Mapping[tuple[str, str], Link]):
    """Every ordered pair of `peers`, computed on access: anybody may publish thousands of peers, and placement reads the links of a
    shortlist only."""

    def __init__(self, peers: Sequence[PeerRecord], view: LinkView) -> None:
        self._peers = frozenset(peer.peer for peer in peers)
        self._view = view
        self._guess = link_guess(peers)
        self._found: dict[tuple[str, str], Link] = {}

    def __getitem__(self, pair: tuple[str, str]) -> Link:
        found = self._found.get(pair)
        if found is None:
            a, b = pair
            if a == b or not self._peers >= {a, b}:
                raise KeyError(pair)
            found = _link(self._view.link(PeerId(a), PeerId(b)), self._guess(a, b))
            self._found[pair] = found
        return found

    def __len__(self) -> int:
        return len(self._peers) * (len(self._peers) - 1)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return permutations(sorted(self._peers), 2)


def _speeds(peer: PeerRecord) -> Speeds | None:
    try:
        return Speeds.of(peer.speeds)
    except ValueError:  # an older release announces none
        return None


def _machine(name: str, cores: float) -> Machine:
    if not cores:
        return SEPARATE_MACHINE
    return Machine(
        name=name, cores=max(1.0, cores), message_seconds=MESSAGE_SECONDS, byte_seconds=BYTE_SECONDS
    )


def _link(known: PairLink, guess: Link) -> Link:
    rate = known.bytes_per_second or guess.bytes_per_second
    return Link(
        alpha_seconds=guess.alpha_seconds if known.rtt_seconds is None else known.rtt_seconds / 2,
        bytes_per_second=max(rate, guess.bytes_per_second) if known.at_least else rate,
    )


def _line(seen: float | None, best_pair: float) -> float:
    """The rate of a peer's line: at least that of its fastest measured link, whatever it announces; without limit from FAST on."""
    rate = inf if seen is None else max(seen, best_pair)
    return inf if rate >= FAST else rate


def _best(view: LinkView) -> tuple[dict[PeerId, float], dict[PeerId, float]]:
    """The fastest measured link from, and to, each peer, in bytes per second."""
    out: dict[PeerId, float] = {}
    into: dict[PeerId, float] = {}
    for a, b in view.pairs:
        rate = view.link(a, b)
        if rate.rate_measured and rate.bytes_per_second is not None:
            out[a] = max(out.get(a, 0.0), rate.bytes_per_second)
            into[b] = max(into.get(b, 0.0), rate.bytes_per_second)
    return out, into
