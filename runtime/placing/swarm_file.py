"""`swarm.toml`: the peers and links of a swarm that need not exist, for `fusion-peer plan` and for emulated networks.

[[sites]]                    # optional: a rule for all pairs of peers that name it, instead of a link for each
name = "lab"
mbps = 1000                  # of each pair, each way; left out: no limit but the peers' own
rtt_ms = 1

[[peers]]
name = "lab-1"
site = "lab"                 # optional
gflops = 300                 # what it reaches, in float32 (or mflops)
memory = "8GiB"              # what it lends
up_mbps = 40                 # of its own line, shared by all that it sends; left out: no limit
down_mbps = 100
rtt_ms = 10                  # from it to the exchange and back: added at either end of a pair, but not within a site

[[peers]]
name = "home"
count = 50                   # home-1 to home-50, all alike; names of [[links]] are these
device = "rtx-3080"          # instead of gflops and memory: a row of devices.toml, of which
efficiency = 0.5             # so much of its peak is reached; it lends all its memory unless memory says less

[[links]]
between = ["lab", "home"]    # both ways, or from = "lab", to = "home"; each a peer or a site
mbps = 80
rtt_ms = 20                  # where both ends are peers, nothing is added to it

[default]                    # all other pairs
rtt_ms = 30

Two peers without any such rule are 40 ms apart (0 where both have an rtt_ms of their own), at 10 Mbps (or as fast as up_mbps
and down_mbps allow, where there are both). `queue_ms` and `loss` describe a pair further for emulation; placement reads
neither. `memory_gb_per_second` limits operators that are not arithmetic. `price_usd` is what a peer costs, if that of its
device's row is not right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any

from fusion.dag.placement.network import UNKNOWN_LINK, Device, Link, Network
from fusion.runtime.job import toml_files
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import build
from fusion.runtime.job.manifest import Precision
from fusion.runtime.job.size_text import parse_size
from fusion.runtime.placing.device_table import DeviceRow, device_row
from fusion.swarm.links.view import BYTES_PER_MBIT

MAX_SWARM_BYTES = 64 << 20
MAX_PEERS = 1_000_000  # counted out
LEAST_MBPS = 1e-6  # of any line: with less, times are more than a float holds
# Of a device's peak: large products of a transformer in training reach 0.44 to 0.52 of an A100's (Megatron-LM, arXiv 2104.04473).
EFFICIENCY = 0.5


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One way between two peers: what the way itself allows; the lines of the two peers are not in it."""

    mbps: float = math.inf
    rtt_ms: float
    queue_ms: float | None = None  # how long a full queue takes to drain; None: left to the emulator
    loss: float = 0.0
    known: bool = True  # False: nothing in the file names it

    @property
    def link(self) -> Link:
        return Link(alpha_seconds=self.rtt_ms / 2000, bytes_per_second=self.mbps * BYTES_PER_MBIT)


@dataclass(frozen=True, kw_only=True)
class PeerEntry:
    name: str
    count: int | None = None  # so many peers like this one
    gflops: float | None = None
    mflops: float | None = None
    device: str | None = None
    efficiency: float | None = None
    memory: int | str | None = None
    memory_gb_per_second: float | None = None
    price_usd: float | None = None
    site: str | None = None
    up_mbps: float | None = None
    down_mbps: float | None = None
    rtt_ms: float | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        if sum(value is not None for value in (self.gflops, self.mflops, self.device)) != 1:
            raise ValueError("gflops (or mflops) must be set, or device: one of the three")
        for key in ("gflops", "mflops", "memory_gb_per_second", "price_usd"):
            _check_above_zero(key, getattr(self, key))
        for key in ("up_mbps", "down_mbps"):
            _check_rate(key, getattr(self, key))
        _check_not_below_zero("rtt_ms", self.rtt_ms)
        if self.count is not None and not 1 <= self.count <= MAX_PEERS:
            raise ValueError(f"count must be from 1 to {MAX_PEERS}, not {self.count}")
        if self.efficiency is not None and (self.device is None or not 0 < self.efficiency <= 1):
            raise ValueError("efficiency is of a device, above 0 and at most 1")
        if self.memory is None and (self.row is None or self.row.memory is None):
            raise ValueError(
                "memory is missing"
                if self.row is None
                else f"memory must be set: {self.device} has none of its own"
            )
        if self.memory_bytes < 1:
            raise ValueError(f"memory must be a size such as 4GiB, not {self.memory}")

    @cached_property
    def row(self) -> DeviceRow | None:
        return None if self.device is None else device_row(self.device)

    def flops_per_second(self, precision: Precision = "float32") -> float:
        """That it reaches; the same at all precisions for a peer given by its gflops."""
        if self.row is not None:
            return self.row.peak_flops_per_second(precision) * (self.efficiency or EFFICIENCY)
        return self.gflops * 1e9 if self.gflops is not None else (self.mflops or 0.0) * 1e6

    @cached_property
    def memory_bytes(self) -> int:
        if isinstance(self.memory, int):
            return self.memory
        return parse_size(self.memory or (self.row and self.row.memory) or "", "memory")

    @property
    def memory_bytes_per_second(self) -> float:
        if self.memory_gb_per_second is not None:
            return self.memory_gb_per_second * 1e9
        return self.row.memory_gb_per_second * 1e9 if self.row else Device.memory_bytes_per_second

    @property
    def price(self) -> float | None:
        """In dollars; None where it is not given."""
        return self.row.price_usd if self.price_usd is None and self.row else self.price_usd

    def of_device(self, precision: Precision) -> Device:
        return Device(
            peer=self.name,
            flops_per_second=self.flops_per_second(precision),
            memory_bytes=self.memory_bytes,
            memory_bytes_per_second=self.memory_bytes_per_second,
            up_bytes_per_second=math.inf if self.up_mbps is None else self.up_mbps * BYTES_PER_MBIT,
            down_bytes_per_second=math.inf if self.down_mbps is None else self.down_mbps * BYTES_PER_MBIT,
        )

    def counted_out(self) -> tuple[PeerEntry, ...]:
        """One for each of `count`, with a name of its own."""
        if self.count is None:
            return (self,)
        return tuple(replace(self, name=f"{self.name}-{i}", count=None) for i in range(1, self.count + 1))


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """The figures of a link, of a site's inside, or of the default; without `mbps` it sets no limit of its own."""

    mbps: float | None = None
    rtt_ms: float
    queue_ms: float | None = None
    loss: float = 0.0

    def __post_init__(self) -> None:
        _check_rate("mbps", self.mbps)
        _check_above_zero("queue_ms", self.queue_ms)
        _check_not_below_zero("rtt_ms", self.rtt_ms)
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"loss must be from 0 to below 1, not {self.loss}")

    def pair(self, more_rtt_ms: float) -> Pair:
        mbps = math.inf if self.mbps is None else self.mbps
        return Pair(mbps=mbps, rtt_ms=self.rtt_ms + more_rtt_ms, queue_ms=self.queue_ms, loss=self.loss)


@dataclass(frozen=True, kw_only=True)
class SwarmFile:
    peers: tuple[PeerEntry, ...]
    sites: Mapping[str, LinkFigures]
    links: Mapping[tuple[str, str], LinkFigures]  # by (from, to), each a peer or a site
    default: LinkFigures | None = None

    @cached_property
    def by_name(self) -> dict[str, PeerEntry]:
        return {peer.name: peer for peer in self.peers}

    def pair(self, a: str, b: str) -> Pair:
        """The way from peer `a` to peer `b`, by the rule that says the most about just these two. KeyError if the
        swarm does not have both."""
        one, two = self.by_name[a], self.by_name[b]
        inside = one.site is not None and one.site == two.site
        # What a peer adds lies between it and the exchange, so neither neighbours nor those who know better add it.
        more = 0.0 if inside else (one.rtt_ms or 0.0) + (two.rtt_ms or 0.0)
        if (a, b) in self.links:
            return self.links[a, b].pair(0.0)
        for key in ((a, two.site), (one.site, b), (one.site, two.site)):
            way = self.links.get(key)  # type: ignore[arg-type]
            if way is not None:
                return way.pair(more)
        if inside:
            return self.sites[one.site or ""].pair(0.0)
        if self.default is not None:
            return self.default.pair(more)
        away = one.rtt_ms is not None and two.rtt_ms is not None
        limited = one.up_mbps is not None and two.down_mbps is not None
        return Pair(
            mbps=math.inf if limited else UNKNOWN_LINK.bytes_per_second / BYTES_PER_MBIT,
            rtt_ms=more if away else more + UNKNOWN_LINK.alpha_seconds * 2000,
            known=away and limited,
        )

    def network(self, precision: Precision = "float32") -> Network:
        """As placement sees it. Its links are computed on access: there may be 10^8 of them."""
        return Network(
            devices=tuple(peer.of_device(precision) for peer in self.peers), links=_LinksByRule(self)
        )

    def with_lines(self, mbps: float) -> SwarmFile:
        """The same peers, each with a line of its own of so many Mbps, up and down. JobError where that is no rate."""
        _check_rate("--line-mbps", mbps)
        return replace(self, peers=tuple(replace(p, up_mbps=mbps, down_mbps=mbps) for p in self.peers))

    def price(self, names: Iterable[str]) -> float | None:
        """Of these peers, in dollars; None unless all have one."""
        found = [self.by_name[name].price for name in names]
        return sum(p for p in found if p is not None) if None not in found else None


class _LinksByRule(Mapping[tuple[str, str], Link]):
    def __init__(self, swarm: SwarmFile) -> None:
        self._swarm = swarm
        self._made: dict[tuple[float, float], Link] = {}  # few pairs differ from all others

    def __getitem__(self, pair: tuple[str, str]) -> Link:
        if pair[0] == pair[1]:
            raise KeyError(pair)
        found = self._swarm.pair(*pair)
        figures = found.mbps, found.rtt_ms
        link = self._made.get(figures)
        if link is None:
            link = self._made[figures] = found.link
        return link

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return permutations(self._swarm.by_name, 2)

    def __len__(self) -> int:
        return len(self._swarm.peers) * (len(self._swarm.peers) - 1)


def load(path: Path) -> SwarmFile:
    """Read a swarm file. JobError names in one line the field that is wrong and what would be right."""
    text = toml_files.read(path, MAX_SWARM_BYTES)
    try:
        return parse(text)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def parse(text: str) -> SwarmFile:
    """A swarm from TOML text. Raises JobError."""
    table = toml_files.tables(text, "a swarm")
    try:
        return _swarm(table)
    except JobError:
        raise
    except ValueError as error:
        raise JobError(str(error)) from None


def _swarm(table: dict[str, Any]) -> SwarmFile:
    _check_known(table, {"peers", "sites", "links", "default"}, "")
    entries = [(where, build(PeerEntry, entry, where)) for where, entry in _entries(table, "peers")]
    if (total := sum(entry.count or 1 for _, entry in entries)) > MAX_PEERS:
        raise JobError(f"peers: {total} of them, counted out, and at most {MAX_PEERS} may be")
    counted = [entry.counted_out() for _, entry in entries]
    peers = tuple(peer for some in counted for peer in some)
    if not peers:
        raise JobError("there is no peer: add a [[peers]] table with name, gflops and memory")
    sites: dict[str, LinkFigures] = {}
    names: set[str] = set()
    for where, entry in _entries(table, "sites"):
        name = entry.get("name")
        if not isinstance(name, str):
            raise JobError(f"{where}.name must be text")
        _check_name(name, f"{where}.")
        sites[name] = build(LinkFigures, {k: v for k, v in entry.items() if k != "name"}, where)
        _check_new(name, names, where)
    for (where, peer_entry), some in zip(entries, counted, strict=True):
        for peer in some:
            _check_new(peer.name, names, where)
        if peer_entry.site is not None and peer_entry.site not in sites:
            known = ", ".join(list(sites)[:10]) or "there are none"
            raise JobError(f"{where}.site: no [[sites]] is called {peer_entry.site!r:.60} (sites: {known})")
    links: dict[tuple[str, str], LinkFigures] = {}
    for where, entry in _entries(table, "links"):
        way = build(LinkFigures, {k: v for k, v in entry.items() if k not in _ENDS}, where)
        for ends in _ends(entry, names, where):
            if ends in links:
                raise JobError(f"{where}: the link from {ends[0]} to {ends[1]} is given twice")
            links[ends] = way
    default = build(LinkFigures, table["default"], "default") if "default" in table else None
    return SwarmFile(peers=peers, sites=sites, links=links, default=default)


_ENDS = ("between", "from", "to")


def _entries(table: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """Each table of [[key]] with the name that messages give it."""
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise JobError(f"{key} must be tables, each under [[{key}]]")
    known = {
        "peers": {f.name for f in fields(PeerEntry)},
        "sites": {"name", *(f.name for f in fields(LinkFigures))},
        "links": {*_ENDS, *(f.name for f in fields(LinkFigures))},
    }[key]
    entries = [(f"{key}[{i}]", entry) for i, entry in enumerate(found)]
    for where, entry in entries:
        _check_known(entry, known, f"{where}.")
    return entries


def _ends(entry: dict[str, Any], names: set[str], where: str) -> list[tuple[str, str]]:
    """The ordered pairs that a [[links]] table is about."""
    given = [key for key in _ENDS if key in entry]
    if given not in (["between"], ["from", "to"]):
        raise JobError(f'{where} must have between = ["a", "b"], or from = "a" and to = "b"')
    ends = entry["between"] if given == ["between"] else [entry["from"], entry["to"]]
    if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise JobError(f"{where}.{given[0]} must name two peers or sites")
    for end in ends:
        if end not in names:
            raise JobError(f"{where}: no peer and no site is called {end!r:.60}")
    if ends[0] == ends[1]:
        raise JobError(
            f"{where} must join two, not {ends[0]} with itself; [[sites]] says how a site is inside"
        )
    pair = (ends[0], ends[1])
    return [pair, pair[::-1]] if given == ["between"] else [pair]


def _check_known(table: dict[str, Any], known: set[str], prefix: str) -> None:
    for key in table:
        if key not in known:
            raise JobError(f"{prefix}{key!s:.80} is not known here (known: {', '.join(sorted(known))})")


def _check_new(name: str, names: set[str], where: str) -> None:
    if name in names:
        raise JobError(f"{where}.name: {name!r:.60} is taken; peers and sites need names of their own")
    names.add(name)


def _check_name(name: str, prefix: str = "") -> None:
    if not (0 < len(name) <= 100 and name.isprintable()):
        raise JobError(f"{prefix}name must be text of 1 to 100 printable characters, not {name!r:.60}")


def _check_above_zero(key: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise JobError(f"{key} must be above 0 and finite, not {value:g}")


def _check_rate(key: str, mbps: float | None) -> None:
    _check_above_zero(key, mbps)
    if mbps is not None and mbps < LEAST_MBPS:
        raise JobError(f"{key} must be at least {LEAST_MBPS:g}, a bit a second, not {mbps:g}")


def _check_not_below_zero(key: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise JobError(f"{key} must be 0 or more and finite, not {value:g}")
