"""What is remembered of a key that all share, and whose names have room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.directory_records import peer_record

from fusion.swarm.dht.remembered import Remembered, fair_share
from fusion.swarm.directory.sealing import Sealed
from fusion.swarm.identity import Identity

RECORD = peer_record(Identity.generate())


def sealed(expires_at: float) -> Sealed:
    return Sealed(RECORD, expires_at, b"")


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def test_what_ends_later_stays_until_it_ends() -> None:
    key = Remembered()
    key.add({"a": sealed(10.0), "b": sealed(5.0)}, {}, 0.0)
    key.add({"a": sealed(8.0), "b": sealed(7.0)}, {}, 0.0)
    assert {name: each.expires_at for name, each in key.valid(6.0).items()} == {"a": 10.0, "b": 7.0}
    assert key.valid(9.0).keys() == {"a"}


def test_a_name_is_remembered_with_all_who_reported_it() -> None:
    key = Remembered(most=4)
    key.add({"a": sealed(9.0)}, {"a": ["honest"]}, 0.0)
    key.add({"a": sealed(9.0)}, {"a": ("liar",)}, 0.0)
    lies = names("lie", 9)
    key.add(dict.fromkeys(lies, sealed(9.0)), dict.fromkeys(lies, ("liar",)), 0.0)
    assert "a" in key.valid(1.0) and len(key.valid(1.0)) == 4


def test_one_that_reports_more_than_there_is_room_for_keeps_nobody_out() -> None:
    key, lies = Remembered(most=16), names("lie", 16)
    key.add(dict.fromkeys(lies, sealed(9.0)), dict.fromkeys(lies, ("liar",)), 0.0)
    assert key.valid(0.0).keys() == set(lies)
    honest = names("job", 6)
    key.add(dict.fromkeys(honest, sealed(9.0)), dict.fromkeys(honest, ("one", "other")), 0.0)
    assert set(honest) < key.valid(0.0).keys() and len(key.valid(0.0)) == 16
    key.add(dict.fromkeys(names("more", 16), sealed(9.0)), dict.fromkeys(names("more", 16), ("liar",)), 0.0)
    assert set(honest) < key.valid(0.0).keys()


def test_of_one_who_reports_too_much_what_is_known_longest_stays() -> None:
    assert fair_share(dict.fromkeys(names("n", 9), ("one",)), 4) == names("n", 4)


@given(
    st.dictionaries(st.text(max_size=3), st.sets(st.sampled_from("abcde"), max_size=3), max_size=40),
    st.integers(1, 50),
)
def test_room_is_used_up_and_everybody_has_a_share(reported_by: dict[str, set[str]], most: int) -> None:
    kept = fair_share(reported_by, most)
    assert len(kept) == min(most, len(reported_by)) == len(set(kept))
    accounts = {account for reporters in reported_by.values() for account in reporters}
    for account in accounts:
        alone = [name for name, reporters in reported_by.items() if reporters == {account}]
        others = sum(reporters != {account} and account in reporters for reporters in reported_by.values())
        share = most // len(accounts)
        assert len([name for name in alone if name in kept]) >= min(len(alone), share - others)
