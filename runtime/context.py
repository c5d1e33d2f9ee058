"""What the parts of one peer process share. Made by `fusion.runtime.peer`, by tests over the in-memory transport."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fusion.runtime.worker import Worker
from fusion.swarm.blobs import Blobs
from fusion.swarm.directory import Directory
from fusion.swarm.leases import Leases
from fusion.swarm.transport import PeerId, Transport


@dataclass(frozen=True, kw_only=True)
class Context:
    peer_id: PeerId
    transport: Transport
    directory: Directory
    blobs: Blobs
    leases: Leases
    worker: Worker | None  # None in a client: it computes nothing
    device: str = "cpu"
    memory_bytes: int = 4 << 30  # what the volunteer lends, in all
    home: Path = Path(".")

    @property
    def compute(self) -> Worker:
        """The device's worker thread; only peers have one."""
        assert self.worker is not None, "a client runs no stages"
        return self.worker
