"""Checks of signatures, counted."""

from __future__ import annotations

from fusion.swarm.identity import verify


class CountedChecks:
    """`verify` is as in `fusion.swarm.identity`; `signers` says whose signatures were checked, in order."""

    def __init__(self) -> None:
        self.signers: list[str] = []

    def verify(self, peer_id: str, signature: bytes, data: bytes) -> bool:
        self.signers.append(peer_id)
        return verify(peer_id, signature, data)
