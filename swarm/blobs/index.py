"""A blob's digest: the SHA-256 of its index, which lists the SHA-256 of every chunk.

The digest verifies the index, and the index every chunk by itself, whoever sent them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgpack

from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import BlobError
from fusion.swarm.protocol import MAX_INDEX_BYTES

CHUNK_BYTES = 1 << 20
HASH_BYTES = 32
_VERSION = 1


@dataclass(frozen=True)
class BlobIndex:
    """Size and chunk hashes. All chunks are CHUNK_BYTES long but the last, which is shorter but never empty."""

    size_bytes: int
    hashes: tuple[bytes, ...]

    def encode(self) -> bytes:
        """The canonical bytes; their hash is the blob's digest."""
        data: bytes = msgpack.packb([_VERSION, self.size_bytes, CHUNK_BYTES, b"".join(self.hashes)])
        return data

    @property
    def digest(self) -> Digest:
        return digest_of_index(self.encode())

    def chunk_size(self, chunk: int) -> int:
        return min(CHUNK_BYTES, self.size_bytes - chunk * CHUNK_BYTES)

    def matches(self, chunk: int, data: bytes | memoryview) -> bool:
        return len(data) == self.chunk_size(chunk) and hashlib.sha256(data).digest() == self.hashes[chunk]


def digest_of_index(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


def index_of(chunks: Iterable[bytes | memoryview]) -> BlobIndex:
    """The index of a blob given as its chunks, in order."""
    size, hashes = 0, []
    for chunk in chunks:
        size += len(chunk)
        hashes.append(hashlib.sha256(chunk).digest())
    return BlobIndex(size, tuple(hashes))


def chunks_of(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in chunks of CHUNK_BYTES, the last one shorter."""
    partial = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        if partial:
            missing = CHUNK_BYTES - len(partial)
            partial += view[:missing]
            view = view[missing:]
            if len(partial) < CHUNK_BYTES:
                continue
            yield memoryview(partial)
            partial = bytearray()
        whole = len(view) - len(view) % CHUNK_BYTES
        for at in range(0, whole, CHUNK_BYTES):
            yield view[at : at + CHUNK_BYTES]
        partial += view[whole:]
    if partial:
        yield memoryview(partial)


def digest_of(data: bytes) -> Digest:
    """What `data` would be called as a blob."""
    view = memoryview(data)
    return index_of(view[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)).digest


def decode_index(data: bytes | memoryview, digest: Digest) -> BlobIndex:
    """The index named `digest` from untrusted bytes. Raises BlobError."""
    if len(data) > MAX_INDEX_BYTES:
        raise BlobError(f"an index of {len(data)} bytes for blob {digest[:8]}; at most {MAX_INDEX_BYTES}")
    data = bytes(data)
    if digest_of_index(data) != digest:
        raise BlobError(f"the index does not belong to blob {digest[:8]}")
    try:
        content = msgpack.unpackb(data, max_array_len=4, max_map_len=0, max_str_len=0, max_ext_len=0)
    except (ValueError, RecursionError) as error:
        raise BlobError(f"the index of blob {digest[:8]} is not msgpack") from error
    match content:
        case [1, int() as size, 1048576, bytes() as hashes] if 0 <= size <= 1 << 50 and len(
            hashes
        ) == HASH_BYTES * -(-size // CHUNK_BYTES):
            index = BlobIndex(
                size, tuple(hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
            )
        case _:
            raise BlobError(f"the index of blob {digest[:8]} has not the form of one")
    if index.encode() != data:
        raise BlobError(f"the index of blob {digest[:8]} is not in canonical form")
    return index
