"""Checks of signatures and comparisons of peers, counted."""

from __future__ import annotations

from fusion.swarm.identity import verify
from fusion.swarm.transport import PeerId


class CountedChecks:
    """`verify` is as in `fusion.swarm.identity`; `signers` says whose signatures were checked, in order."""

    def __init__(self) -> None:
        self.signers: list[str] = []

    def verify(self, peer_id: str, signature: bytes, data: bytes) -> bool:
        self.signers.append(peer_id)
        return verify(peer_id, signature, data)


class CountedId(str):
    """The id of a peer, as each of these counts how often it was compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedId.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def counted_ids(count: int) -> tuple[PeerId, ...]:
    """So many peers that there are not."""
    CountedId.compared = 0
    return tuple(PeerId(CountedId(f"peer {number}")) for number in range(count))
