"""A bounded store that is shared out fairly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.swarm.dht.record_store import (
    MAX_OF_AN_AUTHOR,
    OWN,
    Kept,
    RecordStore,
    StoreLimits,
    author_in,
    displaces,
    loser,
    size_of,
)

SMALL = StoreLimits(
    total_bytes=20_000, key_bytes=6000, peer_key_bytes=4000, network_key_bytes=5000, subkeys=6
)
NETWORK = "d"  # the account of a network, from which "c" sends as well


def kept(sender: str, until: float = 100.0, size: int = 100) -> Kept:
    return Kept(b"x" * size, until, sender, sender)


names = st.sampled_from(["a", "b", "c", "d", OWN])
puts = st.lists(
    st.tuples(
        st.integers(0, 5), names, names, st.floats(1, 200), st.integers(0, 2000), st.floats(0, 20, width=16)
    ),
    max_size=120,
)


@given(puts)
@settings(max_examples=examples(200))
def test_it_never_holds_more_than_it_may_and_its_books_are_right(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    store, now = RecordStore(SMALL), 0.0
    for key, author, sender, until, size, passed in steps:
        now += passed
        account = NETWORK if sender == "c" else sender
        data = Kept(b"x" * size, until, sender, account)
        before = dict(store.at(key, now))
        if store.put(key, author, data, now):
            assert store.at(key, now)[author] == data
        else:
            assert store.at(key, now).get(author) == before.get(author)
        held: Counter[str] = Counter()
        records = 0
        for each in list(store.keys()):
            values = store.at(each, now)
            others = {s: k for s, k in values.items() if k.account != OWN}
            if len(others) == len(values):
                assert len(values) <= SMALL.subkeys
                assert sum(size_of(s, k) for s, k in values.items()) <= SMALL.key_bytes
            assert all(k.until >= now for k in values.values())
            records += len(values)
            of_key: Counter[str] = Counter()
            for subkey, value in values.items():
                of_key[value.account] += size_of(subkey, value)
            held += of_key
            for account, taken in of_key.items():
                senders = {value.sender for value in values.values() if value.account == account}
                most = SMALL.network_key_bytes if senders - {account} else SMALL.peer_key_bytes
                assert account == OWN or taken <= most
            counted = store._keys[each]
            assert (counted.shares, counted.bytes) == (of_key, of_key.total())
            assert counted.of_author == Counter(map(author_in, values))
            assert {account: list(subkeys) for account, subkeys in counted.subkeys.items()} == {
                account: [s for s, k in values.items() if k.account == account] for account in of_key
            }
        assert held == Counter(store.shares) and store._total == held.total() and len(store) == records
        if not held[OWN]:
            assert store._total <= SMALL.total_bytes


@given(st.dictionaries(names, st.integers(0, 1000)), st.sampled_from("abcd"), st.integers(1, 500))
def test_whoever_takes_most_makes_room(shares: dict[str, int], newcomer: str, added: int) -> None:
    found = loser(shares, newcomer, added)
    assert found != OWN
    wanted = shares.get(newcomer, 0) + added
    others = [held for account, held in shares.items() if account not in (OWN, newcomer)]
    if found is None:
        assert not shares.get(newcomer, 0) and max(others, default=0) <= wanted
    elif found == newcomer:
        assert shares[newcomer] > 0 and max(others, default=0) <= wanted
    else:
        assert shares[found] == max(others) > wanted


def test_a_flood_that_ends_late_pushes_out_only_itself() -> None:
    store = RecordStore(StoreLimits(total_bytes=100_000))
    assert store.put(1, "honest", kept("honest", until=6.0), 0.0)
    flood = [store.put(key, "stranger", kept("stranger", until=120.0), 0.0) for key in range(2, 2000)]
    assert all(flood) and store._total <= 100_000
    assert set(store.at(1, 0.0)) == {"honest"}
    assert store.put(3000, "late", kept("late"), 0.0) and store.put(1, "honest", kept("honest", 8.0), 2.0)
    assert max(store.keys()) == 3000 and 2 not in set(store.keys())  # what it renewed longest ago went


def test_many_authors_of_one_sender_leave_room_under_a_key() -> None:
    store = RecordStore()
    for n in range(2000):
        store.put(1, f"made up {n}", kept("stranger"), 0.0)
    assert 0 < store.shares["stranger"] <= store.limits.peer_key_bytes
    assert store.put(1, "honest", kept("honest"), 0.0)
    for n in range(2000, 4000):
        store.put(1, f"made up {n}", kept("stranger"), 0.0)
    assert "honest" in store.at(1, 0.0)


def test_peers_of_one_network_have_more_under_a_key_than_one_peer_and_not_all_of_it() -> None:
    store = RecordStore()
    for n in range(2000):
        store.put(1, f"author {n}", Kept(b"x" * 300, 100.0, f"author {n}", "198.51.100.0/24"), 0.0)
    assert len(store.at(1, 0.0)) > 256
    assert store.shares["198.51.100.0/24"] <= store.limits.network_key_bytes < store.limits.key_bytes


def test_an_author_has_so_many_records_under_a_key() -> None:
    store = RecordStore()
    taken = [store.put(1, f"author/{n}", kept("author"), 0.0) for n in range(MAX_OF_AN_AUTHOR + 5)]
    assert sum(taken) == MAX_OF_AN_AUTHOR
    assert store.put(1, "author/3", kept("author", 101.0), 0.0)
    assert store.put(1, "author2/3", kept("author2"), 0.0)


def test_what_ends_last_stays_and_an_author_s_own_is_not_taken_over() -> None:
    author, other = kept("author", 10.0), kept("other", 10.0)
    assert displaces("author/job", kept("author", 11.0), author)
    assert not displaces("author", kept("author", 9.0), author)
    assert not displaces("author", author, author)
    assert not displaces(
        "author", kept("other", 11.0), author
    )  # it would be charged to the other, and go with it
    assert displaces("author", author, other)
    assert displaces("author", kept("third", 11.0), other)
    assert displaces("author", Kept(b"", 11.0, OWN, OWN), author)


def test_bookkeeping_of_renewals_does_not_grow() -> None:
    store = RecordStore()
    for n in range(20_000):
        store.put(1, "author", kept("author", 100.0 + n / 1000), 0.0)
    assert len(store) == 1 and len(store._ends) < 2000 and len(store._largest) < 2000


def test_a_bad_limit_is_named() -> None:
    with pytest.raises(ValueError, match="subkeys"):
        StoreLimits(subkeys=0)
