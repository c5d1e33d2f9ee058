"""Peer ids as text, bytes and hivemind's objects. Cached: base58 in pure Python takes most of a tenth of a millisecond, and the DHT's
answers name dozens of peers, mostly the same ones.
"""

from __future__ import annotations

from functools import lru_cache

from hivemind.p2p import PeerID

from fusion.swarm.transport import PeerId

_KEPT = 4096


@lru_cache(maxsize=_KEPT)
def from_bytes(data: bytes) -> PeerId:
    return PeerId(PeerID(data).to_base58())


@lru_cache(maxsize=_KEPT)
def to_bytes(peer: PeerId) -> bytes:
    """Raises ValueError for a text that is no peer id."""
    try:
        data = bytes(to_hivemind(peer).to_bytes())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{peer!r} is not a peer id") from error
    if not 34 <= len(data) <= 64:
        raise ValueError(f"{peer!r} is not a peer id")
    return data


@lru_cache(maxsize=_KEPT)
def to_hivemind(peer: PeerId) -> PeerID:
    return PeerID.from_base58(peer)
