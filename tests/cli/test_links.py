from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from fusion.cli.status import rows
from fusion.swarm.directory.records import Pair, PeerRecord
from fusion.swarm.links.view import LinkView
from fusion.swarm.transport import PeerId

A, B = PeerId("a"), PeerId("b")
PEERS = cast(list[PeerRecord], [SimpleNamespace(peer=A), SimpleNamespace(peer=B)])


def test_each_direction_says_what_was_measured() -> None:
    view = LinkView(down={A: 1e6}, pairs={(A, B): Pair(B, 20.0, 80.0, 4.25)})
    there, back = rows(PEERS, view)
    measured: dict[str, Any] = {
        "from": A,
        "to": B,
        "rtt_ms": 20.0,
        "mbps": 80.0,
        "rtt": "measured",
        "rate": "measured",
        "age_seconds": 4.2,
    }
    assert there == measured
    assert (back["from"], back["rtt"], back["rate"], back["mbps"]) == (B, "measured", "estimated", 8.0)


def test_of_a_fast_link_no_more_is_said_than_that() -> None:
    there, back = rows(PEERS, LinkView(down={A: 1e9}, pairs={(A, B): Pair(B, 1.0, 700.0, 0.0)}))
    assert (there["rate"], there["mbps"]) == ("at least", 700.0)
    assert back["rate"] == "estimated"


def test_what_nobody_knows_is_said_to_be_unknown() -> None:
    for row in rows(PEERS, LinkView()):
        assert (row["rtt_ms"], row["mbps"], row["rtt"], row["rate"]) == (None, None, "unknown", "unknown")
