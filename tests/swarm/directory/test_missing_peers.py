from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.directory_records import peer_record
from support.examples import examples

from fusion.swarm.directory.missing_peers import MissingPeers, MissingPeersConfig
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.identity import Identity

US, *OTHERS = [Identity.generate() for _ in range(5)]
NAMES = tuple(o.peer_id for o in OTHERS)
RECORDS = tuple(peer_record(o, addresses=(f"/ip4/192.0.2.1/tcp/4001/p2p/{o.peer_id}",)) for o in OTHERS)


def test_who_is_listed_no_longer_is_looked_for_until_it_is_back() -> None:
    missing = MissingPeers(US.peer_id)
    missing.update(RECORDS, NAMES, 0.0)
    assert missing.due(0.0) == {}
    missing.update(RECORDS[1:], NAMES, 5.0)
    gone = RECORDS[0]
    assert missing.due(5.0) == {gone.peer: gone.addresses}
    assert missing.due(6.0) == {}
    assert gone.peer in missing.due(7.5)
    missing.update(RECORDS, NAMES, 8.0)
    assert missing.due(60.0) == {}
    missing.update(RECORDS[1:], NAMES, 61.0)
    missing.answered(gone.peer)
    missing.update(RECORDS[1:], NAMES, 66.0)
    assert missing.due(66.0) == {}


def test_the_longer_it_is_missing_the_rarer_it_is_tried() -> None:
    missing = MissingPeers(US.peer_id, MissingPeersConfig(first_seconds=2.0, share=0.1, forget_seconds=600.0))
    missing.update(RECORDS[:1], NAMES, 0.0)
    missing.update((), NAMES, 0.0)
    tries = [second for second in range(2000) if missing.due(float(second))]
    assert tries[:4] == [0, 2, 4, 6]
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert 500 <= tries[-1] <= 600 and len(tries) < 60


def test_clients_and_ourselves_are_nobody_to_look_for() -> None:
    missing = MissingPeers(US.peer_id)
    missing.update([replace(RECORDS[0], role="client"), replace(RECORDS[1], peer=US.peer_id)], NAMES, 0.0)
    missing.update((), NAMES, 1.0)
    assert missing.due(1.0) == {}


def test_whoever_never_answered_is_not_looked_for() -> None:
    """Strangers list any number of peers that there are not, at addresses that are somebody's."""
    missing = MissingPeers(US.peer_id, MissingPeersConfig(peers=1))
    missing.update(RECORDS, [RECORDS[2].peer], 0.0)
    missing.update(RECORDS, (), 5.0)  # it does not answer any more, before its record runs out
    missing.update((), (), 10.0)
    assert missing.due(10.0) == {RECORDS[2].peer: RECORDS[2].addresses}
    missing.update(RECORDS, (), 15.0)
    missing.update((), (), 20.0)
    assert missing.due(20.0) == {}


def test_in_a_large_swarm_the_last_to_go_are_looked_for() -> None:
    missing = MissingPeers(US.peer_id, MissingPeersConfig(peers=2))
    for count in (4, 3, 2, 1, 0):
        missing.update(RECORDS[:count], NAMES, float(4 - count))
    assert set(missing.due(10.0)) == {RECORDS[0].peer, RECORDS[1].peer}


def _seen(listed: frozenset[int]) -> tuple[PeerRecord, ...]:
    return tuple(RECORDS[i] for i in sorted(listed))


@settings(max_examples=examples(60))
@given(st.lists(st.frozensets(st.sampled_from(range(len(RECORDS)))), max_size=8))
def test_the_missing_are_those_met_and_not_listed(lists: list[frozenset[int]]) -> None:
    missing = MissingPeers(US.peer_id)
    met: set[int] = set()
    for at, listed in enumerate(lists):
        missing.update(_seen(listed), NAMES, 100.0 * at)
        met |= listed
        assert set(missing.due(100.0 * at + 50.0)) == {RECORDS[i].peer for i in met - listed}


def test_a_bad_setting_is_named() -> None:
    with pytest.raises(ValueError, match="share"):
        MissingPeersConfig(share=0)
