"""Counts checks of signatures and comparisons of peer ids."""

from __future__ import annotations

from fusion.swarm.identity import verify
from fusion.swarm.transport import PeerId


class CountedChecks:
    """`verify` is `fusion.swarm.identity`'s; `signers` lists the peers whose signatures were checked, in order."""

    def __init__(self) -> None:
        self.signers: list[str] = []

    def verify(self, peer_id: str, signature: bytes, data: bytes) -> bool:
        self.signers.append(peer_id)
        return verify(peer_id, signature, data)


class CountedId(str):
    """A peer id that counts comparisons: `compared` is the number of all of them."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedId.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def counted_ids(count: int) -> tuple[PeerId, ...]:
    """`count` ids of peers that do not exist. Resets the count of comparisons."""
    CountedId.compared = 0
    return tuple(PeerId(CountedId(f"peer {number}")) for number in range(count))
