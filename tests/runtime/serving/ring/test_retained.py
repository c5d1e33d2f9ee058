"""What is retained is found by its gateway alone, and gives way by who holds most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, HASH_BYTES, PrefixHash
from fusion.runtime.serving.ring.retained import (
    IDLE_SECONDS,
    MAX_PER_GATEWAY,
    MAX_RETAINED,
    RetainedPrefixes,
)
from fusion.swarm.transport import PeerId

ME, YOU, THEM = PeerId("me"), PeerId("you"), PeerId("them")


def chain(*contents: int) -> bytes:
    return PrefixHash(b"", "").chain([content for content in contents for _ in range(BLOCK_POSITIONS)])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def retain(kept: RetainedPrefixes, gateway: PeerId, *contents: int, size: int = 1) -> int:
    name, _ = kept.add(gateway, chain(*contents))
    assert name is not None and kept.sized(name, BLOCK_POSITIONS * len(contents), size)
    return name


def test_the_longest_beginning_is_found_and_only_by_whose_it_is() -> None:
    kept = RetainedPrefixes(Clock())
    short, long = retain(kept, ME, 1, 2), retain(kept, ME, 1, 3, 4)
    for sought, name, blocks in (((1, 2, 9), short, 2), ((1, 3, 9), long, 2), ((1, 3, 4, 5), long, 3)):
        found = kept.find(ME, chain(*sought))
        assert found is not None and (found[0].name, found[1]) == (name, blocks)
    assert kept.find(ME, chain(9, 1)) is None and kept.find(ME, b"") is None
    assert kept.find(YOU, chain(1, 2)) is None


def test_what_goes_on_takes_the_place_of_its_beginning() -> None:
    kept = RetainedPrefixes(Clock())
    first = retain(kept, ME, 1, 2)
    retain(kept, YOU, 1, 2)
    name, gone = kept.add(ME, chain(1, 2, 3))
    assert gone == [first] and len(kept) == 2
    assert kept.add(ME, chain(1, 2)) == (None, [])  # there already, and more of it
    found = kept.find(ME, chain(1, 2, 3))
    assert found is not None and found[0].name == name


def test_only_what_there_really_is_is_found() -> None:
    kept = RetainedPrefixes(Clock())
    name, _ = kept.add(ME, chain(1, 2, 3))
    assert name is not None and kept.sized(name, 2 * BLOCK_POSITIONS + 5, 1)
    found = kept.find(ME, chain(1, 2, 3))
    assert found is not None and found[1] == 2
    assert not kept.sized(name, BLOCK_POSITIONS - 1, 1) and not len(kept)
    assert not kept.sized(name, 500, 1)


def test_who_holds_most_gives_way_with_what_it_has_not_used_for_longest() -> None:
    kept = RetainedPrefixes(Clock())
    yours = retain(kept, YOU, 1, size=5)
    mine = [retain(kept, ME, i, size=2) for i in range(4)]
    kept.find(ME, chain(0))
    gone = [kept.evict() for _ in range(6)]
    assert [entry and entry.name for entry in gone] == [mine[1], mine[2], yours, mine[3], mine[0], None]


def test_what_nobody_comes_back_to_goes() -> None:
    clock = Clock()
    kept = RetainedPrefixes(clock)
    old, used = retain(kept, ME, 1), retain(kept, ME, 2)
    clock.now = IDLE_SECONDS - 1
    kept.find(ME, chain(2))
    assert kept.expired() == []
    clock.now = IDLE_SECONDS + 1
    assert kept.expired() == [old] and kept.find(ME, chain(2)) is not None
    clock.now *= 3
    assert kept.expired() == [used]


@given(st.lists(st.tuples(st.sampled_from([ME, YOU, THEM]), st.integers(0, 1 << 20)), max_size=400))
def test_there_are_never_too_many(adds: list[tuple[PeerId, int]]) -> None:
    kept = RetainedPrefixes(Clock())
    there: set[int] = set()
    for gateway, content in adds:
        name, gone = kept.add(gateway, content.to_bytes(HASH_BYTES, "big"))
        there = (there | {name} if name is not None else there) - set(gone)
        assert len(kept) == len(there) <= MAX_RETAINED


def test_one_gateway_pushes_out_its_own() -> None:
    kept = RetainedPrefixes(Clock())
    retain(kept, YOU, 1, 2)
    for i in range(2 * MAX_PER_GATEWAY):
        retain(kept, ME, i)
    assert len(kept) == MAX_PER_GATEWAY + 1 and kept.find(YOU, chain(1, 2)) is not None
    for i in range(MAX_RETAINED):
        retain(kept, PeerId(f"p{i}"), i)
    assert len(kept) == MAX_RETAINED
    assert kept.find(PeerId(f"p{MAX_RETAINED - 1}"), chain(MAX_RETAINED - 1)) is not None
