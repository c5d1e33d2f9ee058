"""Prefixes of a sequence as a chain of block hashes, by which stages find cached keys and values without knowing the tokens. Pure.

A chain has 16 bytes for each full block of 64 positions: the keyed BLAKE2b of the previous hash and the block's token ids, so that equal
hashes stand for equal prefixes. The key is the gateway's own and secret: a stage cannot test guesses of the text against a chain, and
no two gateways share a chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.header_fields import pack_tokens

BLOCK_POSITIONS = 64
HASH_BYTES = 16
MAX_BLOCKS = 512  # of a chain: 8 KiB of a header
START = b"fusion prefix 1"


@dataclass(frozen=True)
class PrefixHash:
    """`apart`: the domain of the hashes, different for each tenant (a cache salt), so that nobody can find out from response times what
    another tenant of the gateway has requested."""

    key: bytes  # at most 64 bytes
    apart: str

    def chain(self, tokens: Sequence[int]) -> bytes:
        """The chain of the full blocks, at most MAX_BLOCKS."""
        last = self._hash(START + self.apart.encode())
        hashes = []
        for block in range(min(len(tokens) // BLOCK_POSITIONS, MAX_BLOCKS)):
            at = block * BLOCK_POSITIONS
            last = self._hash(last + pack_tokens(tokens[at : at + BLOCK_POSITIONS]))
            hashes.append(last)
        return b"".join(hashes)

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self.key).digest()


def blocks_of(chain: bytes) -> int:
    return len(chain) // HASH_BYTES


def positions_of(chain: bytes) -> int:
    return blocks_of(chain) * BLOCK_POSITIONS


def beginning(chain: bytes, positions: int) -> bytes:
    """The blocks of a chain that end within so many positions."""
    return chain[: positions // BLOCK_POSITIONS * HASH_BYTES]


def checked_chain(header: Mapping[str, Any]) -> bytes:
    """The field `prefix` of a received message; empty where it is missing. JobError where it is not a chain."""
    chain = header.get("prefix", b"")
    if not isinstance(chain, bytes) or len(chain) % HASH_BYTES or blocks_of(chain) > MAX_BLOCKS:
        raise JobError(f"prefix: at most {MAX_BLOCKS} hashes of {HASH_BYTES} bytes")
    return chain


def shared_blocks(one: bytes, two: bytes) -> int:
    """The number of leading blocks that two chains have in common."""
    least, most = 0, min(blocks_of(one), blocks_of(two))
    while least < most:
        middle = (least + most + 1) // 2
        part = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        if one[part] == two[part]:
            least = middle
        else:
            most = middle - 1
    return least
