from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.blobs.eviction import (
    FRESH_SECONDS,
    KEPT_SECONDS,
    Held,
    Needs,
    outdated,
    to_announce,
    victims,
)
from fusion.swarm.blobs.index import CHUNK_BYTES, index_of
from fusion.swarm.blobs.partial_blob import PartialBlob
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import QuotaExceeded

NOW = 1e9
DIGESTS = [Digest(f"{n:064x}") for n in range(12)]
STORES = st.dictionaries(
    st.sampled_from(DIGESTS),
    st.builds(Held, st.integers(0, 100), st.floats(NOW - 2 * KEPT_SECONDS, NOW)),
)
NEEDED = st.sets(st.sampled_from(DIGESTS))


class Holder:
    pass


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@given(STORES, NEEDED, st.integers(1, 500))
def test_only_what_nobody_needs_makes_room_and_no_more_than_asked(
    held: dict[Digest, Held], needed: set[Digest], wanted: int
) -> None:
    chosen = victims(held, needed, wanted, NOW)
    free = {d: b for d, b in held.items() if d not in needed and NOW - b.used_at >= FRESH_SECONDS}
    assert set(chosen) <= set(free)
    if not chosen:
        assert sum(blob.size_bytes for blob in free.values()) < wanted
        return
    assert sum(free[d].size_bytes for d in chosen) >= wanted > sum(free[d].size_bytes for d in chosen[:-1])
    kept = [free[d].used_at for d in set(free) - set(chosen)]
    assert all(free[d].used_at <= at for d in chosen for at in kept)


@given(STORES, NEEDED)
def test_a_day_after_its_last_use_nothing_is_left_but_what_is_needed(
    held: dict[Digest, Held], needed: set[Digest]
) -> None:
    gone = outdated(held, needed, NOW + KEPT_SECONDS)
    assert set(held) - set(gone) == set(held) & needed


@given(STORES, NEEDED, st.integers(1, 20))
def test_what_is_needed_is_announced_first(held: dict[Digest, Held], needed: set[Digest], limit: int) -> None:
    announced = to_announce(held, needed, limit, NOW)
    assert len(announced) <= limit
    here = set(held) & needed
    assert set(announced) >= here or (len(announced) == limit and set(announced) <= here)


def test_ten_thousand_blobs_that_nobody_uses_are_announced_to_nobody() -> None:
    held = {Digest(f"{n:064x}"): Held(1, NOW - FRESH_SECONDS) for n in range(10_000)}
    assert to_announce(held, {DIGESTS[3]}, 1024, NOW) == [DIGESTS[3]]


def test_a_holder_that_is_gone_needs_nothing() -> None:
    needs, one, other = Needs(), Holder(), Holder()
    needs.hold(one, DIGESTS[:2])
    needs.hold(other, DIGESTS[1:3])
    needs.hold(other, DIGESTS[1:2])
    assert needs.all() == set(DIGESTS[:2])
    del one
    gc.collect()
    assert needs.all() == {DIGESTS[1]}


def test_needs_may_change_while_another_thread_reads_them() -> None:
    needs, holders = Needs(), [Holder() for _ in range(2000)]
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            needs.all()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            for holder in holders[:1000]:
                needs.hold(holder, DIGESTS[1:])
            reading = pool.submit(read)
            for holder in holders[1000:]:
                needs.hold(holder, DIGESTS)
            done.set()
            reading.result()
    finally:
        sys.setswitchinterval(before)
    assert needs.all() == set(DIGESTS)


@pytest.mark.parametrize("how", ["used", "held"])
def test_what_comes_into_use_while_others_are_swept_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    clock, needs, us = Clock(), Needs(), Holder()
    store = BlobStore(tmp_path, 1000, needs, now=clock)
    first, second = store.put(b"a"), store.put(b"b")
    clock.now += KEPT_SECONDS  # as where a machine slept for a day, and wakes with its jobs
    unlink = Path.unlink

    def slow(path: Path, missing_ok: bool = False) -> None:
        other = second if path.name.startswith(first) else first
        if store.has(other):
            _ = store.path(other) if how == "used" else needs.hold(us, [other])
        unlink(path, missing_ok)

    needs.hold(us, ())
    monkeypatch.setattr(Path, "unlink", slow)
    store.sweep()
    (left,) = store.held()
    assert store.path(left).read_bytes() in (b"a", b"b")


def test_a_full_store_makes_room_and_keeps_what_is_needed(tmp_path: Path) -> None:
    clock, needs, us = Clock(), Needs(), Holder()
    store = BlobStore(tmp_path, 1000, needs, now=clock)
    old, needed, last = store.put(b"a" * 300), store.put(b"b" * 300), store.put(b"c" * 300)
    needs.hold(us, [needed])
    with pytest.raises(QuotaExceeded):  # all of them may be in use
        store.put(b"d" * 400)
    clock.now += FRESH_SECONDS
    store.path(old)
    store.put(b"d" * 400)
    assert store.has(old) and store.has(needed) and not store.has(last)
    with pytest.raises(QuotaExceeded, match="1000 of 1000"):
        store.put(b"e" * 701)


def test_what_is_written_of_a_blob_already_is_not_wanted_of_the_disk_again(tmp_path: Path) -> None:
    free = [3 * CHUNK_BYTES]
    store = BlobStore(tmp_path, 1 << 30, Needs(), spare_bytes=lambda _: free[0])

    def pieces() -> Iterator[bytes]:
        for _ in range(2):
            yield bytes(CHUNK_BYTES)
            free[0] -= CHUNK_BYTES
        small.append(store.put(b"x" * (CHUNK_BYTES // 2)))  # meanwhile, by another

    small: list[Digest] = []
    large = store.put_pieces(2 * CHUNK_BYTES, pieces())
    assert store.has(large) and store.has(small[0])
    free[0] = CHUNK_BYTES
    with pytest.raises(QuotaExceeded, match="the disk is full"):
        store.put(bytes(CHUNK_BYTES + 1))  # what was written counts no longer


def test_what_is_left_to_others_of_the_disk_is_not_used(tmp_path: Path) -> None:
    clock, needs = Clock(), Needs()
    free = [1000]
    store = BlobStore(tmp_path, 1 << 30, needs, now=clock, spare_bytes=lambda _: free[0])
    first = store.put(b"a" * 600)
    free[0] = 400
    with pytest.raises(QuotaExceeded, match=r"the disk is full, .* may take 400 bytes"):
        store.put(b"b" * 500)
    clock.now += FRESH_SECONDS
    free[0] = 1000  # once it is gone; here the folder's disk is not really full
    store.put(b"b" * 500)
    assert store.has(first)


def test_what_is_here_of_a_blob_on_its_way_needs_no_room_again(tmp_path: Path) -> None:
    parts = [bytes([n + 1]) * CHUNK_BYTES for n in range(4)]
    index = index_of(parts)
    free = [5 * CHUNK_BYTES]  # of the disk

    def store() -> BlobStore:
        return BlobStore(tmp_path, 1 << 30, Needs(), spare_bytes=lambda _: free[0])

    def write(partial: PartialBlob, chunk: int) -> None:
        partial.write(chunk, parts[chunk])
        free[0] -= CHUNK_BYTES

    first = store()
    partial = first.begin(index.encode(), index.digest)
    for chunk in (0, 1, 2):
        write(partial, chunk)
    with pytest.raises(QuotaExceeded):
        first.put(b"b" * (CHUNK_BYTES + 1))
    other = first.put(b"b" * CHUNK_BYTES)
    free[0] -= CHUNK_BYTES
    partial.close()
    again = store()  # the fourth chunk has room, and no other
    partial = again.begin(index.encode(), index.digest)
    assert partial.missing == {3}
    write(partial, 3)
    partial.close()
    assert again.path(index.digest).read_bytes() == b"".join(parts) and again.has(other)
    assert again.used_bytes == 5 * CHUNK_BYTES and (again._reserved, again._on_disk) == (0, 0)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_was_ahead_keeps_no_blob_for_as_long(tmp_path: Path, restarted: bool) -> None:
    clock, needs = Clock(), Needs()
    clock.now += 365 * KEPT_SECONDS
    store = BlobStore(tmp_path, 1000, needs, now=clock)
    old = store.put(b"a" * 600)
    clock.now = NOW
    if restarted:
        store = BlobStore(tmp_path, 1000, needs, now=clock)
    store.sweep()
    with pytest.raises(QuotaExceeded):  # it may be in use
        store.put(b"b" * 600)
    clock.now += FRESH_SECONDS
    store.put(b"b" * 600)
    assert not store.has(old)


def test_a_restart_knows_what_was_used_when_and_sweeps_what_is_a_day_old(tmp_path: Path) -> None:
    clock, needs = Clock(), Needs()
    store = BlobStore(tmp_path, 1000, needs, now=clock)
    old, used = store.put(b"a"), store.put(b"b")
    clock.now += KEPT_SECONDS - 1
    store.path(used)
    partial = tmp_path / "partial" / DIGESTS[0]
    partial.write_bytes(b"half")
    os.utime(partial, (NOW, NOW))
    clock.now += 1
    needs = Needs()
    again = BlobStore(tmp_path, 1000, needs, now=clock)
    again.sweep()
    assert again.has(old)  # nobody has had the time to say that it needs it
    needs.hold(Holder, ())
    again.sweep()
    assert not again.has(old) and again.has(used)
    assert not partial.exists()
    assert BlobStore(tmp_path, 1000, now=clock).used_bytes == 1  # and without needs nothing goes


def test_the_day_of_what_is_needed_begins_when_nobody_needs_it_any_more(tmp_path: Path) -> None:
    """A job of two days: what it began with was used when its stages were loaded, and has to be there a day after its end, and when
    its peers start again."""
    clock, needs, job = Clock(), Needs(), Holder()
    store = BlobStore(tmp_path, 1000, needs, now=clock)
    weights, other = store.put(b"weights"), store.put(b"other")
    needs.hold(job, {weights})
    for _ in range(48):
        store.sweep()
        clock.now += 3600
    assert store.has(weights) and not store.has(other)
    store.sweep()
    again = BlobStore(tmp_path, 1000, Needs(), now=clock)
    assert again.held()[weights].used_at == clock.now
    needs.hold(job, ())
    clock.now += KEPT_SECONDS - 1
    store.sweep()
    assert store.has(weights)
    clock.now += 1
    store.sweep()
    assert not store.has(weights)


def test_what_is_half_here_goes_after_a_day_too_and_so_does_what_a_smaller_quota_has_no_room_for(
    tmp_path: Path,
) -> None:
    clock, needs = Clock(), Needs()
    store = BlobStore(tmp_path, 1000, needs, now=clock)
    old, new = store.put(b"a" * 400), store.put(b"b" * 400)
    clock.now += FRESH_SECONDS
    partial = tmp_path / "partial" / DIGESTS[0]
    partial.write_bytes(b"half")
    os.utime(partial, (clock.now, clock.now))
    needs = Needs()
    store = BlobStore(tmp_path, 500, needs, now=clock)
    needs.hold(Holder, ())
    store.path(new)
    store.sweep()
    assert store.has(new) and not store.has(old) and partial.exists()
    clock.now += KEPT_SECONDS
    store.sweep()
    assert not partial.exists() and store.used_bytes == 0


def test_a_half_fetched_blob_that_is_gone_on_with_makes_no_room(tmp_path: Path) -> None:
    parts = [bytes([n + 1]) * CHUNK_BYTES for n in range(3)]
    index = index_of(parts)
    store = BlobStore(tmp_path, 5 * CHUNK_BYTES, spare_bytes=lambda _: 1 << 40)
    half = store.begin(index.encode(), index.digest)
    half.write(0, parts[0])
    half.close()
    forget, begun = store._forget_resumable, []

    def meanwhile(digest: Digest) -> None:
        if not begun:  # another thread goes on with what was just chosen
            store.quota_bytes = 16 * CHUNK_BYTES
            begun.append(store.begin(index.encode(), index.digest))
        forget(digest)

    store._forget_resumable = meanwhile  # type: ignore[method-assign]
    store.put(bytes(4 * CHUNK_BYTES))
    (partial,) = begun
    assert partial.missing == {1, 2}
    for chunk in partial.missing.copy():
        partial.write(chunk, parts[chunk])
    partial.close()
    assert store.path(index.digest).read_bytes() == b"".join(parts)
    assert store.used_bytes == 7 * CHUNK_BYTES
