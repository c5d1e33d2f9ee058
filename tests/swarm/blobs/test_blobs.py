from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.instant_loop import run

from fusion.swarm.authority.access import Access
from fusion.swarm.blobs import disk
from fusion.swarm.blobs.announce import ANNOUNCED_AT_ONCE
from fusion.swarm.blobs.blobs import Blobs
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.fetch import PATIENCE
from fusion.swarm.blobs.index import (
    CHUNK_BYTES,
    decode_index,
    digest_of,
    digest_of_index,
    index_of,
)
from fusion.swarm.blobs.partial_blob import BadChunk, PartialBlob
from fusion.swarm.blobs.serve import ALL_UNREAD_CHUNKS, BlobServer
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.blobs.unread import Slot, UnreadChunks
from fusion.swarm.blobs.upload_budget import BURST_SECONDS, UploadBudget
from fusion.swarm.directory.records import Digest, ProviderRecord
from fusion.swarm.errors import BlobError, QuotaExceeded, RemoteError, StreamClosed, SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.protocol import BLOB, MAX_INDEX_BYTES
from fusion.swarm.streams.memory_stream import MemoryStream
from fusion.swarm.transport import Frame, PeerId, Stream, call, checked

QUOTA = 64 << 20
PROMPT = BlobConfig(retry_seconds=0, attempts=2, chunk_seconds=5)
BIG = os.urandom(5 * CHUNK_BYTES + 123)


class Room:
    """Peers with blobs in memory transports; the blobs of peer 0 are under test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()
        self.network = MemoryNetwork()
        self.tasks: list[Blobs] = []

    async def peer(
        self, quota_bytes: int = QUOTA, config: BlobConfig = PROMPT, budget: UploadBudget | None = None
    ) -> Blobs:
        identity = Identity.generate()
        transport = MemoryTransport(self.network, identity.peer_id)
        directory = MemoryDirectory(self.network, identity, self.clock)
        store = BlobStore(self.root / identity.peer_id, quota_bytes)
        blobs = Blobs(store, transport, directory, config, budget)
        await blobs.__aenter__()
        self.tasks.append(blobs)
        return blobs

    async def hostile(self, digest: Digest, handler: Callable[[Stream], Any]) -> PeerId:
        """A peer that says it holds `digest` and answers with `handler`."""
        identity = Identity.generate()
        transport = MemoryTransport(self.network, identity.peer_id)
        await transport.serve(BLOB.name, handler)
        directory = MemoryDirectory(self.network, identity, self.clock)
        await directory.publish(ProviderRecord(digest=digest, peer=identity.peer_id, size_bytes=1))
        return identity.peer_id

    async def __aenter__(self) -> Room:
        return self

    async def __aexit__(self, *_: object) -> None:
        for blobs in self.tasks:
            await blobs.aclose()


def id_of(blobs: Blobs) -> PeerId:
    return blobs._transport.peer_id


# The index.


@given(st.binary(max_size=300))
@settings(max_examples=examples(60))
def test_an_index_names_the_bytes_and_nothing_else_decodes(data: bytes) -> None:
    index = index_of([data] if data else [])
    assert index.digest == digest_of(data)
    assert decode_index(index.encode(), index.digest) == index
    with pytest.raises(BlobError):
        decode_index(data, digest_of_index(data))  # right name, wrong form
    with pytest.raises(BlobError, match="does not belong"):
        decode_index(index.encode() + b"\0", index.digest)


@pytest.mark.parametrize(
    "content",
    [
        [2, 0, CHUNK_BYTES, b""],
        [1, 5, CHUNK_BYTES, b""],
        [1, 0, CHUNK_BYTES, b"x" * 32],
        [1, 5, 10, b"x" * 32],
        [1, -1, CHUNK_BYTES, b""],
        [1, 10**15, CHUNK_BYTES, b"x" * 32],
        [1, 5.0, CHUNK_BYTES, b"x" * 32],
        [True, 0, CHUNK_BYTES, b""],
        [1, 5, CHUNK_BYTES],
        {"size": 5},
    ],
)
def test_a_malformed_index_is_refused(content: object) -> None:
    data = msgpack.packb(content)
    with pytest.raises(BlobError):
        decode_index(data, digest_of_index(data))


def test_a_huge_index_is_refused_before_it_is_read() -> None:
    with pytest.raises(BlobError, match="at most"):
        decode_index(memoryview(bytearray(MAX_INDEX_BYTES + 1)), digest_of(b""))


# The store.


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(BIG)])
def test_a_store_keeps_bytes_and_files(tmp_path: Path, size: int) -> None:
    data = BIG[:size]
    store = BlobStore(tmp_path / "store", QUOTA)
    digest = store.put(data)
    source = tmp_path / "source"
    source.write_bytes(data)
    assert store.put(source) == digest == digest_of(data)
    assert store.path(digest).read_bytes() == data
    assert store.size(digest) == store.used_bytes == size
    again = BlobStore(tmp_path / "store", QUOTA)
    assert {d: blob.size_bytes for d, blob in again.held().items()} == {digest: size}
    again.delete(digest)
    again.delete(digest)
    assert not again.has(digest) and again.used_bytes == 0
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["partial"]


@pytest.mark.parametrize(
    "sizes", [(3, CHUNK_BYTES - 3, 5), (2 * CHUNK_BYTES + 7,), (0, 1, 0, CHUNK_BYTES), (700_000,) * 7]
)
def test_a_store_takes_bytes_as_they_are_made(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    store, pieces = BlobStore(tmp_path, QUOTA), [os.urandom(size) for size in sizes]
    digest = store.put_pieces(sum(sizes), (memoryview(piece) for piece in pieces))
    assert digest == digest_of(b"".join(pieces)) and store.path(digest).read_bytes() == b"".join(pieces)
    for wrong in (sum(sizes) + 1, sum(sizes) - 1):
        with pytest.raises(BlobError, match=r"grew or shrank") as error:
            store.put_pieces(wrong, pieces)
        assert "\n" not in str(error.value)
    assert store.used_bytes == sum(sizes) and not list((tmp_path / "partial").iterdir())


def test_a_store_that_was_cut_off_forgets_what_is_not_whole(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, QUOTA)
    whole, short, bare = store.put(b"whole"), store.put(b"short"), store.put(b"bare")
    (tmp_path / short).write_bytes(b"sho")
    (tmp_path / f"{bare}.index").unlink()
    (tmp_path / "partial" / "tmp-1").write_bytes(b"x" * 1000)
    assert [*BlobStore(tmp_path, QUOTA).held()] == [whole]
    assert {path.name for path in tmp_path.iterdir()} == {whole, f"{whole}.index", "partial"}
    assert not list((tmp_path / "partial").iterdir())


def test_a_quota_is_kept(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 1000)
    digest = store.put(b"x" * 600)
    with pytest.raises(QuotaExceeded, match="600 of 1000 bytes"):
        store.put(b"y" * 401)
    store.put(b"y" * 400)
    store.delete(digest)
    store.put(b"z" * 600)
    assert store.used_bytes == 1000


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path, QUOTA)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fusion.swarm.blobs.disk.settle", full)
    with pytest.raises(QuotaExceeded, match="the disk is full") as caught:
        store.put(b"x")
    assert "\n" not in str(caught.value)
    assert store.used_bytes == 0 and not list((tmp_path / "partial").iterdir())


def test_a_full_disk_takes_no_blob_from_the_job_whose_it_is(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, QUOTA)
    digest = store.put(b"abc", "1" * 64)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(BlobError):
            store.keep_for("2" * 64, [digest])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = BlobStore(tmp_path, QUOTA)
    assert again.jobs_of(digest) == {"1" * 64}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["partial", digest, f"{digest}.index", f"{digest}.jobs"]
    )
    assert not list((tmp_path / "partial").iterdir())


@pytest.mark.parametrize("fetched", [False, True])
def test_a_disk_that_is_full_at_the_index_keeps_nothing_that_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: bool
) -> None:
    store, settled = BlobStore(tmp_path, QUOTA), 0

    def full(_: int) -> None:
        nonlocal settled
        settled += 1
        if settled == 2:  # the data was the first
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fusion.swarm.blobs.disk.settle", full)
    index = index_of([b"data"])
    with pytest.raises(QuotaExceeded, match="the disk is full"):
        if fetched:
            partial = store.begin(index.encode(), index.digest)
            partial.write(0, b"data")
            partial.close()
        else:
            store.put(b"data")
    left = {path.name for path in (tmp_path / "partial").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]
    assert left == ({index.digest, f"{index.digest}.index"} if fetched else set())
    assert store.used_bytes == (4 if fetched else 0)
    if fetched:
        store.begin(index.encode(), index.digest).close()  # all of it is here
    else:
        store.put(b"data")
    assert store.has(index.digest) and store.used_bytes == 4


def test_a_fetch_that_cannot_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("fusion.swarm.blobs.store.PartialBlob", no_file)
    store, index = BlobStore(tmp_path, QUOTA), index_of([b"data"])
    with pytest.raises(BlobError, match="Too many open files"):
        store.begin(index.encode(), index.digest)
    assert not list((tmp_path / "partial").iterdir()) and store.used_bytes == 0


def test_an_index_whose_blob_is_not_on_its_way_is_swept(tmp_path: Path) -> None:
    """What is left of a process that was killed before the first byte of the data, or after the last."""
    index, other = index_of([b"data"]), index_of([b"other"])
    store = BlobStore(tmp_path, QUOTA)
    store.begin(other.encode(), other.digest).close()
    (tmp_path / "partial" / f"{index.digest}.index").write_bytes(index.encode())
    BlobStore(tmp_path, QUOTA)
    left = {path.name for path in (tmp_path / "partial").iterdir()}
    assert left == {other.digest, f"{other.digest}.index"}


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BlobError, match="cannot use"):
        BlobStore(tmp_path / "file", QUOTA)
    with pytest.raises(BlobError, match="cannot read"):
        BlobStore(tmp_path / "store", QUOTA).put(tmp_path / "missing")


@pytest.mark.parametrize("lacks", [(), ("pread", "pwrite")], ids=["POSIX", "Windows"])
def test_a_fetch_goes_on_where_it_stopped_and_believes_only_hashes(
    lacks: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in lacks:
        monkeypatch.delattr(os, name)
    index = index_of(BIG[at : at + CHUNK_BYTES] for at in range(0, len(BIG), CHUNK_BYTES))
    first = BlobStore(tmp_path, QUOTA).begin(index.encode(), index.digest)
    assert first.missing == set(range(6))
    first.write(0, BIG[:CHUNK_BYTES])
    first.write(5, BIG[5 * CHUNK_BYTES :])
    first.write(2, BIG[2 * CHUNK_BYTES : 3 * CHUNK_BYTES])
    with pytest.raises(BadChunk):
        first.write(1, BIG[:CHUNK_BYTES])
    with pytest.raises(BadChunk):
        first.write(1, b"")
    first.close()
    first.close()
    with pytest.raises(BlobError, match="no longer"):
        first.write(1, BIG[CHUNK_BYTES : 2 * CHUNK_BYTES])
    with (tmp_path / "partial" / index.digest).open("r+b") as file:
        file.write(b"bit rot")
    store = BlobStore(tmp_path, QUOTA)
    assert store.used_bytes == len(BIG)
    second = store.begin(index.encode(), index.digest)
    assert second.missing == {0, 1, 3, 4}
    for chunk in (0, 1, 3, 4):
        second.write(chunk, BIG[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
    second.close()
    assert store.path(index.digest).read_bytes() == BIG and store.used_bytes == len(BIG)


def test_where_a_disk_does_not_tell_of_holes_a_file_takes_what_it_is_long() -> None:
    file: Any = SimpleNamespace(exists=lambda: True, stat=lambda: SimpleNamespace(st_size=7))  # on Windows
    assert disk.held_bytes(file) == 7


def test_a_forgotten_fetch_makes_room(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, len(BIG) + 10)
    index = index_of([b"a" * 100])
    store.begin(index.encode(), index.digest).close()
    assert store.used_bytes == 100
    store.put(BIG)
    assert store.used_bytes == len(BIG)
    with pytest.raises(QuotaExceeded):
        store.begin(index.encode(), index.digest)
    assert store.used_bytes == len(BIG)


# Between peers.


def test_a_blob_comes_from_several_holders_at_once_and_has_one_more_afterwards(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holders = [await room.peer() for _ in range(3)]
            for holder in holders:
                digest = await holder.put(BIG)
            ours = await room.peer()
            assert (await ours.fetch(digest)).read_bytes() == BIG
            sent = [peer for peer, bytes_ in ours._transport.traffic().items() if bytes_.received_bytes]
            assert len(sent) == 3
            assert id_of(ours) in {p.peer for p in await holders[0]._directory.providers(digest)}
            # The others may leave now.
            for holder in holders:
                room.network.kill(id_of(holder))
            later = await room.peer()
            assert await later.read(digest, len(BIG)) == BIG

    asyncio.run(scenario())


def test_hints_do_without_the_directory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer()
            for data in (b"", b"tiny", BIG):
                digest = await holder.put(data)
                room.clock.advance(1000)  # every announcement is gone
                assert await ours.read(digest, len(BIG), [Identity.generate().peer_id, id_of(holder)]) == data

    asyncio.run(scenario())


def test_nobody_has_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            ours, other = await room.peer(), await room.peer()
            with pytest.raises(BlobError, match="nobody announces it"):
                await ours.fetch(digest_of(b"no"))
            with pytest.raises(BlobError, match="is not here"):
                await ours.fetch(digest_of(b"no"), [id_of(other)])
            for bad in ("", "../../etc/passwd", "A" * 64):
                with pytest.raises(BlobError, match="not the digest"):
                    await ours.fetch(Digest(bad))

    asyncio.run(scenario())


def test_too_large_is_known_before_anything_is_fetched(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours, small = await room.peer(), await room.peer(), await room.peer(quota_bytes=1000)
            digest = await holder.put(BIG)
            with pytest.raises(BlobError, match="at most 1000 allowed"):
                await ours.read(digest, 1000)
            assert ours.store.used_bytes == 0
            with pytest.raises(QuotaExceeded):
                await small.fetch(digest)
            assert small.store.used_bytes == 0
            await ours.fetch(digest)
            with pytest.raises(BlobError, match="at most 1000 allowed"):
                await ours.read(digest, 1000)

    asyncio.run(scenario())


def test_false_bytes_are_thrown_away_and_their_sender_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer()
            digest = await holder.put(BIG)
            asked = 0

            async def liar(stream: Stream) -> None:
                nonlocal asked
                while True:
                    frame = await stream.receive()
                    if frame.kind == "index":
                        await stream.send("index", {}, [holder.store.index(digest)])
                        continue
                    asked += 1
                    for chunk in frame.header["chunks"]:
                        await stream.send("chunk", {"index": chunk}, [bytes(CHUNK_BYTES)])

            await room.hostile(digest, liar)
            assert await ours.read(digest, len(BIG)) == BIG
            assert asked <= 1

    asyncio.run(scenario())


def test_false_holders_that_send_nothing_do_not_keep_others_from_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion.swarm.blobs.fetch.SILENT_SECONDS", 0.05)

    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer(config=BlobConfig(chunk_seconds=600))
            digest = await holder.put(BIG)
            index = holder.store.index(digest)

            async def silent(stream: Stream) -> None:
                while (await stream.receive()).kind != "index":
                    pass
                await stream.send("index", {}, [index])
                await asyncio.sleep(600)

            false = [await room.hostile(digest, silent) for _ in range(20)]
            assert len(false) > 4 * BlobConfig().holders
            room.clock.advance(1000)
            await holder._announcer._announce(digest)
            async with asyncio.timeout(20):
                assert await ours.read(digest, len(BIG), false) == BIG

    asyncio.run(scenario())


@pytest.mark.parametrize("has_none", [False, True])
def test_hundreds_of_false_holders_cost_seconds_and_not_one_moment_each(
    tmp_path: Path, has_none: bool
) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer(config=BlobConfig())
            digest = await holder.put(b"data")

            async def silent(stream: Stream) -> None:
                await stream.receive()
                await asyncio.sleep(0.2 if has_none else 3600)
                await stream.send("error", {"message": "it is not here"})

            false = [await room.hostile(digest, silent) for _ in range(300)]
            now = asyncio.get_running_loop().time
            began = now()
            ours._directory.providers = nobody  # type: ignore[method-assign]
            assert await ours.read(digest, 4, [*false[:200], id_of(holder), *false[200:]]) == b"data"
            assert now() - began < 20  # of the loop's clock

    async def nobody(_: Digest) -> tuple[ProviderRecord, ...]:
        return ()

    run(scenario())


@pytest.mark.parametrize("answer", ["index", "chunk", "nothing"])
def test_hostile_answers_cost_little(tmp_path: Path, answer: str) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            ours = await room.peer(config=BlobConfig(retry_seconds=0, attempts=2, chunk_seconds=0.05))
            digest = digest_of(BIG)
            index = index_of(BIG[at : at + CHUNK_BYTES] for at in range(0, len(BIG), CHUNK_BYTES))

            async def handler(stream: Stream) -> None:
                while True:
                    frame = await stream.receive()
                    if answer == "nothing":
                        await asyncio.sleep(60)
                    elif answer == "index":
                        await stream.send("index", {}, [b"\xff" * 1000])
                    elif frame.kind == "index":
                        await stream.send("index", {}, [index.encode()])
                    else:
                        await stream.send("chunk", {"index": 10**9}, [b""])

            await room.hostile(digest, handler)
            with pytest.raises(BlobError):
                await ours.fetch(digest)
            assert not ours.has(digest)

    asyncio.run(scenario())


def test_a_slow_holder_does_not_decide_when_the_blob_is_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer(config=BlobConfig(chunk_seconds=600))
            digest = await holder.put(BIG)

            async def slow(stream: Stream) -> None:
                frame = await stream.receive()
                if frame.kind == "index":
                    await stream.send("index", {}, [holder.store.index(digest)])
                await asyncio.sleep(600)

            await room.hostile(digest, slow)
            async with asyncio.timeout(20):
                assert await ours.read(digest, len(BIG)) == BIG

    asyncio.run(scenario())


def test_a_link_too_slow_for_several_holders_at_once_takes_from_one(tmp_path: Path) -> None:
    """Of a link that brings a chunk in 12 s each of four holders has a quarter: none is done in 30 s."""

    async def scenario() -> None:
        async with Room(tmp_path) as room:
            ours = await room.peer(config=BlobConfig())
            parts = [BIG[at : at + CHUNK_BYTES] for at in range(0, len(BIG), CHUNK_BYTES)]
            index, digest = index_of(parts).encode(), digest_of(BIG)
            sending: set[Stream] = set()

            async def shares_the_link(stream: Stream) -> None:
                assert isinstance(stream, MemoryStream)
                while True:
                    frame = await stream.receive()
                    if frame.kind == "index":
                        await stream.send("index", {}, [index])
                        continue
                    for chunk in frame.header["chunks"]:
                        sending.add(stream)
                        came = 0.0
                        while came < 12.0 and not stream.ended:
                            await asyncio.sleep(1.0)
                            came += 1.0 / len(sending)
                        sending.discard(stream)
                        await stream.send("chunk", {"index": chunk}, [parts[chunk]])

            for _ in range(4):
                await room.hostile(digest, shares_the_link)
            assert await ours.read(digest, len(BIG)) == BIG

    run(scenario())


def test_two_who_want_the_same_blob_share_one_fetch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer()
            digest = await holder.put(BIG)
            paths = await asyncio.gather(*(ours.fetch(digest) for _ in range(4)))
            assert len(set(paths)) == 1
            received = ours._transport.traffic()[id_of(holder)].received_bytes
            assert len(BIG) <= received < 1.1 * len(BIG)

    asyncio.run(scenario())


def test_who_allows_little_of_a_blob_does_not_decide_for_who_allows_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer()
            digest = await holder.put(BIG)
            # As where a stranger's job calls the weights of another its graph.
            reads = [ours.read(digest, limit) for limit in (1000, len(BIG) - 1, len(BIG))]
            *few, whole = await asyncio.gather(*reads, return_exceptions=True)
            assert [str(error).partition("; ")[2] for error in few] == [
                "at most 1000 allowed",
                f"at most {len(BIG) - 1} allowed",
            ]
            assert whole == BIG

    run(scenario())


def test_who_asks_while_a_fetch_that_nobody_waits_for_stops_gets_the_blob(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer()
            digest = await holder.put(BIG)
            first = asyncio.create_task(ours.fetch(digest))
            while digest not in ours._running or ours._running[digest].download.fetch is None:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            assert ours._running[digest].task.cancelling()
            assert await ours.read(digest, len(BIG)) == BIG

    asyncio.run(scenario())


def test_a_fetch_that_is_given_up_while_it_begins_keeps_neither_room_nor_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer(quota_bytes=len(BIG) + 10)
            digest = await holder.put(BIG)
            begun, go_on = threading.Event(), threading.Event()
            real = ours.store.begin

            def slow(
                *arguments: Any,
            ) -> PartialBlob:  # as where much of the blob is here, and is hashed first
                begun.set()
                go_on.wait()
                partials.append(real(*arguments))
                return partials[0]

            monkeypatch.setattr(ours.store, "begin", slow)
            fetching = asyncio.create_task(ours.fetch(digest))
            await asyncio.to_thread(begun.wait)
            fetching.cancel()
            await asyncio.wait([fetching])
            go_on.set()
            while ours._running:
                await asyncio.sleep(0)
            await ours.put(BIG[::-1])
            with pytest.raises(BlobError, match="no longer being fetched"):
                partials[0].write(0, BIG[:CHUNK_BYTES])

    partials: list[PartialBlob] = []
    asyncio.run(scenario())


def test_a_fetch_stops_when_nobody_waits_and_goes_on_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer()
            digest = await holder.put(BIG)
            index = holder.store.index(digest)
            given = asyncio.Event()

            async def stops_half_way(stream: Stream) -> None:
                frame = await stream.receive()
                if frame.kind == "index":
                    await stream.send("index", {}, [index])
                    frame = await stream.receive()
                for chunk in frame.header["chunks"][:3]:
                    data = BIG[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
                    await stream.send("chunk", {"index": chunk}, [data])
                given.set()
                await asyncio.sleep(60)

            while holder._announcer._announcing:
                await asyncio.sleep(0)
            room.clock.advance(1000)
            await room.hostile(digest, stops_half_way)
            fetching = asyncio.create_task(ours.fetch(digest))
            await given.wait()
            partial = ours.store._partial / digest
            while not partial.exists() or partial.read_bytes()[:16] != BIG[:16]:  # one byte may be zero
                await asyncio.sleep(0.01)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            while ours._running:
                await asyncio.sleep(0)
            assert not ours.has(digest)
            before = ours._transport.traffic().get(id_of(holder))
            assert before is None
            assert await ours.read(digest, len(BIG), [id_of(holder)]) == BIG
            assert ours._transport.traffic()[id_of(holder)].received_bytes < len(BIG)

    asyncio.run(scenario())


def test_the_upload_budget_paces_what_others_get(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            passed = ManualClock(0.0)

            async def sleep(seconds: float) -> None:
                passed.advance(seconds)
                await asyncio.sleep(0)

            holder = await room.peer(budget=UploadBudget(1e6, passed, sleep))
            one, two = await room.peer(), await room.peer()
            digest = await holder.put(BIG)
            both = (one.read(digest, len(BIG), [id_of(holder)]), two.read(digest, len(BIG), [id_of(holder)]))
            assert await asyncio.gather(*both) == [BIG, BIG]
            # Each has become a holder for the other one meanwhile: at least one copy came from here.
            assert passed.now >= len(BIG) / 1e6 - BURST_SECONDS - 2 * CHUNK_BYTES / 1e6

    asyncio.run(scenario())


def test_indexes_count_in_the_upload_budget(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            budget = UploadBudget(1e6, ManualClock(0.0))
            holder, reader = await room.peer(budget=budget), await room.peer()
            digest = await holder.put(BIG)
            left = budget._left
            frame = await call(reader._transport, id_of(holder), BLOB.name, "index", {"digest": digest})
            assert budget._left == left - len(frame.payload)

    asyncio.run(scenario())


@pytest.mark.parametrize(("times", "patient"), [(3, True), (PATIENCE, False)])
def test_a_holder_may_ask_for_patience_but_not_for_ever(tmp_path: Path, times: int, patient: bool) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            ours, digest = await room.peer(), digest_of(b"data")

            async def handler(stream: Stream) -> None:
                frame = await stream.receive()
                if frame.kind == "index":
                    await stream.send("index", {}, [index_of([b"data"]).encode()])
                    return
                for _ in range(times):
                    await stream.send("wait")
                await stream.send("chunk", {"index": 0}, [b"data"])
                await asyncio.sleep(60)

            peer = await room.hostile(digest, handler)
            if patient:
                assert await ours.read(digest, 4, [peer]) == b"data"
            else:
                with pytest.raises(BlobError, match="keeps us waiting"):
                    await ours.read(digest, 4, [peer])

    asyncio.run(scenario())


def test_likely_holders_are_asked_before_the_directory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer()
            digest = await holder.put(BIG)
            looked_up = asyncio.Event()

            async def never(_: Digest) -> tuple[ProviderRecord, ...]:
                looked_up.set()
                await asyncio.Event().wait()
                raise AssertionError

            ours._directory.providers = never  # type: ignore[method-assign]
            assert await ours.read(digest, len(BIG), [id_of(holder)]) == BIG
            assert looked_up.is_set()  # all the same, for the case that the hint is wrong

    asyncio.run(scenario())


def test_a_frozen_peer_among_the_likely_ones_holds_nothing_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer(config=BlobConfig(chunk_seconds=600))
            digest = await holder.put(BIG)
            index = holder.store.index(digest)

            async def freezes(stream: Stream) -> None:
                frame = await stream.receive()
                if frame.kind == "index":
                    await stream.send("index", {}, [index])
                await asyncio.sleep(600)

            room.clock.advance(1000)
            await holder._announcer._announce(digest)
            frozen = await room.hostile(digest, freezes)
            async with asyncio.timeout(10):
                assert await ours.read(digest, len(BIG), [frozen]) == BIG

    asyncio.run(scenario())


def test_hostile_requests_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder, ours = await room.peer(), await room.peer()
            digest = await holder.put(b"data")
            for kind, header in [
                ("index", {}),
                ("index", {"digest": "../secret"}),
                ("index", {"digest": digest_of(b"other")}),
                ("get", {"digest": digest, "chunks": [1]}),
                ("get", {"digest": digest, "chunks": [-1]}),
                ("get", {"digest": digest, "chunks": ["0"]}),
                ("get", {"digest": digest, "chunks": [0] * 1000}),
                ("get", {"digest": digest, "chunks": 0}),
                ("put", {"digest": digest}),
            ]:
                with pytest.raises(RemoteError):
                    await call(ours._transport, id_of(holder), BLOB.name, kind, header)
            assert await ours.read(digest, 10) == b"data"

    asyncio.run(scenario())


def test_readers_who_take_nothing_hold_little_and_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion.swarm.blobs.serve.UNREAD_CHUNKS", 2)
    read: list[int] = []

    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder = await room.peer(config=replace(PROMPT, chunk_seconds=0.2))
            digest = await holder.put(BIG)
            read_chunk = holder.store.read_chunk
            holder.store.read_chunk = lambda d, c: (read.append(c), read_chunk(d, c))[1]  # type: ignore[method-assign]
            slow = MemoryTransport(room.network, Identity.generate().peer_id)
            streams = [await slow.open(id_of(holder), BLOB.name) for _ in range(6)]
            for stream in streams:
                await stream.send("get", {"digest": digest, "chunks": [0, 1, 0, 1, 0, 1]})
            ours = await room.peer()
            assert await ours.read(digest, len(BIG), [id_of(holder)]) == BIG  # nobody else waits for them
            read.clear()
            for stream in streams:  # each is ended, with what lies before the end
                with pytest.raises(SwarmError):
                    while True:
                        checked(await stream.receive())
            assert len(read) <= 6 * 3
            with pytest.raises(RemoteError, match="left alone"):
                await call(slow, id_of(holder), BLOB.name, "get", {"digest": digest, "chunks": [0]})

    asyncio.run(scenario())


def test_many_blobs_are_announced_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder = await room.peer(config=BlobConfig(announce_seconds=0.01))
            for n in range(40):
                holder.store.put(bytes([n]))
            under_way, most, announced = 0, 0, set()

            async def announce(digest: Digest) -> None:
                nonlocal under_way, most
                under_way, most = under_way + 1, max(most, under_way + 1)
                await asyncio.sleep(0.001)
                under_way -= 1
                announced.add(digest)

            monkeypatch.setattr(holder._announcer, "_announce", announce)
            async with asyncio.timeout(5.0):
                while len(announced) < 40:
                    await asyncio.sleep(0.001)
            assert most == ANNOUNCED_AT_ONCE < 40

    asyncio.run(scenario())


def test_held_blobs_stay_announced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Room(tmp_path) as room:
            holder = await room.peer(config=BlobConfig(announce_seconds=0.01))
            digest = await holder.put(b"data")
            room.clock.advance(10)
            async with asyncio.timeout(5):
                while not await holder._directory.providers(digest):
                    await asyncio.sleep(0.005)
            await holder.drop(digest)
            assert not holder.has(digest)

    asyncio.run(scenario())


def test_a_bad_setting_is_named() -> None:
    with pytest.raises(ValueError, match="holders"):
        BlobConfig(holders=0)


class Reader:
    """The holder's end of a stream to one that asks once, and takes what it is sent or does not."""

    protocol = BLOB.name

    def __init__(self, remote: str, frame: Frame, *, takes: bool) -> None:
        self.remote = PeerId(remote)
        self.got = asyncio.Event()
        self._asked: list[Frame] = [frame]
        self._takes = takes

    async def receive(self) -> Frame:
        if not self._asked:
            raise StreamClosed("asked all")
        return self._asked.pop()

    async def send(self, kind: str, header: object = None, payload: object = ()) -> None:
        if kind != "wait":
            if not self._takes:
                await asyncio.Event().wait()
            self.got.set()


@pytest.mark.parametrize("kind", ["get", "index"])
def test_many_readers_who_take_nothing_keep_nobody_from_reading(tmp_path: Path, kind: str) -> None:
    store = BlobStore(tmp_path, QUOTA)
    frame = Frame(kind, {"digest": store.put(b"data"), "chunks": [0]})
    read = 0
    index = store.index

    def counted(digest: Digest) -> bytes:
        nonlocal read
        read += 1
        return index(digest)

    store.index = counted  # type: ignore[method-assign]

    async def scenario() -> None:
        server = BlobServer(store, Access(), BlobConfig(chunk_seconds=30))
        idle = [Reader(f"idle{n}", frame, takes=False) for n in range(24) for _ in range(8)]
        tasks = [asyncio.create_task(server.serve_stream(each)) for each in idle]  # type: ignore[arg-type]
        await asyncio.sleep(0.3)
        assert server._unread._total == ALL_UNREAD_CHUNKS and read <= ALL_UNREAD_CHUNKS
        honest = Reader("honest", frame, takes=True)
        tasks.append(asyncio.create_task(server.serve_stream(honest)))  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            await honest.got.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert server._unread._total == 0 and not server._unread._held

    asyncio.run(scenario())


def test_a_network_has_no_more_unread_than_four_readers() -> None:
    async def scenario() -> None:
        unread = UnreadChunks(128, 8, 32)
        for n in range(32):
            await unread.acquire(Slot(PeerId(f"one{n // 2}"), "203.0.113.0/24"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await unread.acquire(Slot(PeerId("another"), "203.0.113.0/24"))
        await unread.acquire(Slot(PeerId("another"), "198.51.100.0/24"))

    asyncio.run(scenario())
