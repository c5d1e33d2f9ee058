"""What the parts of one peer process share. Made by `fusion.runtime.peer.peer`, by tests over the in-memory transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING

from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.watch import Watch
from fusion.swarm.clock import Clock

if TYPE_CHECKING:  # a client has no worker, and should not load torch for its name
    from fusion.runtime.job.takeover import Takeover
    from fusion.runtime.job.worker import Worker
    from fusion.swarm.blobs.blobs import Blobs
    from fusion.swarm.claims.leases import Leases
    from fusion.swarm.directory.api import Directory
    from fusion.swarm.links.monitor import LinkMonitor
    from fusion.swarm.transport import PeerId, Transport


@dataclass(frozen=True, kw_only=True)
class Context:
    peer_id: PeerId
    transport: Transport
    directory: Directory
    blobs: Blobs
    leases: Leases
    worker: Worker | None  # None in a client: it computes nothing
    codec_worker: Worker | None = (
        None  # the thread that tensors are encoded and decoded in, beside the device's
    )
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(4 << 30))  # that the volunteer lends
    home: Path = Path(".")
    succession: Takeover | None = None  # None in a client: it holds nothing
    links: LinkMonitor | None = None  # None in a client: it measures nothing
    clock: Clock = Clock()  # noqa: RUF009 - frozen
    watch: Watch = Watch()  # noqa: RUF009 - does nothing
    random: Random = field(default_factory=SystemRandom)  # what must not be guessed is drawn from it, too

    @property
    def compute(self) -> Worker:
        """The device's worker thread; only peers have one."""
        assert self.worker is not None, "a client runs no stages"
        return self.worker
