"""`fusion-peer status --links`: round trip and rate of every pair of peers, measured or estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

from fusion.cli import client
from fusion.cli.terminal.output import Output

if TYPE_CHECKING:
    from fusion.swarm.directory.records import PeerRecord
    from fusion.swarm.links.view import LinkView

MOST_ESTIMATED = 16  # peers, up to which the table shows what nobody has measured too


async def link_status(way: client.Way, output: Output) -> None:
    from fusion.swarm.links.view import link_view

    async with client.connect(way) as context:
        found = await client.working_peers(context)
        records = await context.directory.links()
    peers = sorted(found, key=lambda each: each.name)
    view = link_view(peers, records)
    pairs = list(rows(peers, view))
    output.emit({"links": pairs, "peers": [_own(each) for each in peers]})
    names: dict[str, str] = {each.peer: each.name for each in peers}
    output.table(
        "Peers",
        ("name", "up Mbps", "down Mbps"),
        [(each.name, _text(each.up_mbps or None), _text(each.down_mbps or None)) for each in peers],
    )
    output.table(
        "Links",
        ("from", "to", "RTT ms", "Mbps", "rate is", "age"),
        [
            (
                *(names[pair["from"]], names[pair["to"]], _text(pair["rtt_ms"]), _text(pair["mbps"])),
                *(pair["rate"], "-" if pair["age_seconds"] is None else f"{pair['age_seconds']:.0f} s"),
            )
            for pair in pairs
            if len(peers) <= MOST_ESTIMATED or "measured" in (pair["rtt"], pair["rate"])
        ],
    )


def rows(peers: Sequence[PeerRecord], view: LinkView) -> Iterator[dict[str, Any]]:
    """Every ordered pair as JSON has it: `rtt` and `rate` say "measured", "estimated" or "unknown", a rate of which no
    more is known than that it is so fast "at least"."""
    for one, two in permutations(peers, 2):
        link = view.link(one.peer, two.peer)
        rtt, rate = link.rtt_seconds, link.bytes_per_second
        yield {
            "from": one.peer,
            "to": two.peer,
            "rtt_ms": None if rtt is None else round(1e3 * rtt, 3),
            "mbps": None if rate is None else round(8e-6 * rate, 3),
            "rtt": _origin(rtt, link.rtt_measured),
            "rate": "at least" if link.at_least else _origin(rate, link.rate_measured),
            "age_seconds": None if link.age_seconds is None else round(link.age_seconds, 1),
        }


def _own(peer: PeerRecord) -> dict[str, Any]:
    return {
        "peer": peer.peer,
        "name": peer.name,
        "up_mbps": peer.up_mbps or None,
        "down_mbps": peer.down_mbps or None,
        "coordinate": peer.coordinate,
        "coordinate_error": peer.coordinate_error,
    }


def _origin(value: float | None, measured: bool) -> str:
    return "unknown" if value is None else "measured" if measured else "estimated"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
