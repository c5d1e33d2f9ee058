"""Disks and blobs of a world: what a peer writes survives its process, and other peers read its blobs while it answers.

`WorldPath` implements the part of `pathlib.Path` that the runtime uses, over a dictionary. `WorldBlobs` gives the guarantees
of `fusion.swarm.blobs.blobs.Blobs` (content-addressed, fetched from any live holder, retried with another) without its
protocol, which has tests of its own.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from worlds.network import Network

from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import BlobError
from fusion.swarm.transport import PeerId


class Disk:
    """A peer's files and blobs, which outlive its process."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.blobs: dict[Digest, bytes] = {}


class WorldPath:
    def __init__(self, disk: Disk, name: str) -> None:
        self.disk = disk
        self._name = name

    def __truediv__(self, other: str) -> WorldPath:
        return WorldPath(self.disk, f"{self._name}/{other}")

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"WorldPath({self._name})"

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorldPath) and other._name == self._name and other.disk is self.disk

    def __lt__(self, other: WorldPath) -> bool:
        return self._name < other._name

    @property
    def name(self) -> str:
        return self._name.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    @property
    def suffix(self) -> str:
        return "." + self.name.rpartition(".")[2] if "." in self.name else ""

    @property
    def parent(self) -> WorldPath:
        return WorldPath(self.disk, self._name.rpartition("/")[0])

    def with_name(self, name: str) -> WorldPath:
        return self.parent / name

    def with_suffix(self, suffix: str) -> WorldPath:
        return self.with_name(self.stem + suffix)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        return

    def exists(self) -> bool:
        return self._name in self.disk.files

    is_file = exists

    def unlink(self, missing_ok: bool = False) -> None:
        if self.disk.files.pop(self._name, None) is None and not missing_ok:
            raise FileNotFoundError(self._name)

    def read_bytes(self) -> bytes:
        try:
            return self.disk.files[self._name]
        except KeyError:
            raise FileNotFoundError(self._name) from None

    def write_bytes(self, data: bytes) -> int:
        self.disk.files[self._name] = bytes(data)
        return len(data)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        return self.write_bytes(text.encode(encoding))

    def replace(self, target: WorldPath) -> WorldPath:
        self.disk.files[target._name] = self.read_bytes()
        del self.disk.files[self._name]
        return target

    def iterdir(self) -> Iterator[WorldPath]:
        return self.glob("*")

    def glob(self, pattern: str) -> Iterator[WorldPath]:
        whole = f"{self._name}/{pattern}"
        return iter([WorldPath(self.disk, n) for n in sorted(self.disk.files) if fnmatch.fnmatch(n, whole)])


class BlobPath(WorldPath):
    """The path of a blob, to read."""

    def __init__(self, disk: Disk, digest: Digest) -> None:
        super().__init__(disk, f"blobs/{digest}")
        self.digest = digest

    def read_bytes(self) -> bytes:
        try:
            return self.disk.blobs[self.digest]
        except KeyError:
            raise FileNotFoundError(str(self)) from None

    def exists(self) -> bool:
        return self.digest in self.disk.blobs


class WorldStore:
    """Implements the part of `BlobStore` that the runtime uses."""

    quota_bytes = 1 << 40
    largest_bytes = 1 << 38
    used_bytes = 0

    def __init__(self, disk: Disk, shelf: dict[Digest, bytes]) -> None:
        self.disk = disk
        self._shelf = shelf  # the launcher's files, which every peer has

    def has(self, digest: Digest) -> bool:
        return digest in self.disk.blobs or digest in self._shelf

    def size(self, digest: Digest) -> int:
        return len(self.content(digest))

    def content(self, digest: Digest) -> bytes:
        data = self.disk.blobs.get(digest)
        if data is None:
            data = self._shelf.get(digest)
        if data is None:
            raise BlobError(f"blob {digest[:8]} is not here")
        return data

    def put(self, data: bytes | WorldPath) -> Digest:
        content = data.read_bytes() if isinstance(data, WorldPath) else bytes(data)
        digest = digest_of(content)
        self.disk.blobs[digest] = content
        return digest

    def path(self, digest: Digest) -> BlobPath:
        self.disk.blobs.setdefault(digest, self.content(digest))
        return BlobPath(self.disk, digest)

    def delete(self, digest: Digest) -> None:
        self.disk.blobs.pop(digest, None)


class Holders:
    """The blob stores of all peers, and which of them can be read now."""

    def __init__(self, network: Network, rng: random.Random, slowest_seconds: float) -> None:
        self.network = network
        self.rng = rng
        self.slowest_seconds = slowest_seconds
        self.stores: dict[PeerId, WorldStore] = {}

    def answering(self, reader: PeerId, digest: Digest) -> list[PeerId]:
        network = self.network
        return [
            peer
            for peer, store in self.stores.items()
            if peer != reader
            and store.has(digest)
            and peer in network.transports
            and not network.transports[peer].lane.frozen
            and network.answers(reader, peer)
            and network.answers(peer, reader)
        ]


class WorldBlobs:
    """Stands for `fusion.swarm.blobs.blobs.Blobs`, with the same methods, errors and retries."""

    attempts = 6
    retry_seconds = 1.0

    def __init__(self, peer_id: PeerId, store: WorldStore, holders: Holders) -> None:
        self.store = store
        self._peer = peer_id
        self._holders = holders
        holders.stores[peer_id] = store

    def has(self, digest: Digest) -> bool:
        return self.store.has(digest)

    def of(self, job: JobId) -> WorldBlobs:
        """The same blobs for every job, since the job is open to all."""
        return self

    def hold(self, holder: object, digests: Iterable[Digest]) -> None:
        """Do nothing: no blob is deleted to make room."""

    async def put(self, data: Any) -> Digest:
        await self._wait()
        return self.store.put(data)

    async def put_pieces(self, size: int, pieces: Iterable[bytes | memoryview]) -> Digest:
        return await self.put(b"".join(pieces))

    async def drop(self, digest: Digest) -> None:
        await self._wait()
        self.store.delete(digest)

    async def fetch(
        self, digest: Digest, hints: Sequence[PeerId] = (), *, max_bytes: int | None = None
    ) -> BlobPath:
        fruitless = 0
        while not self.store.has(digest):
            holders = self._holders.answering(self._peer, digest)
            await self._wait()
            if holders:
                holder = self._holders.rng.choice(holders)
                await self._wait(5.0)
                if holder in self._holders.answering(
                    self._peer, digest
                ):  # it answered during the whole transfer
                    self.store.disk.blobs[digest] = self._holders.stores[holder].content(digest)
                    break
            fruitless += 1
            if fruitless >= self.attempts:
                raise BlobError(f"cannot fetch blob {digest[:8]}: nobody announces it")
            await asyncio.sleep(self.retry_seconds)
        return self.store.path(digest)

    async def read(self, digest: Digest, max_bytes: int, hints: Sequence[PeerId] = ()) -> bytes:
        return (await self.fetch(digest, hints, max_bytes=max_bytes)).read_bytes()

    async def _wait(self, times: float = 1.0) -> None:
        holders = self._holders
        await asyncio.sleep(holders.slowest_seconds * times * holders.rng.random())


@lru_cache(maxsize=4096)
def digest_of(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())
