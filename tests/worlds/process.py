"""A simulated peer's process, and the outcome of a world."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from worlds.disk import Disk
from worlds.network import WorldTransport
from worlds.virtual_time import EPOCH_SECONDS, Lane

from fusion.runtime.hosting.hosting import Hosting
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.training.service import TrainingService
from fusion.swarm.claims.leases import Leases
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.transport import PeerId

STAGE_BYTES = 100  # memory of a stage


@dataclass(frozen=True)
class Outcome:
    seed: int
    violations: tuple[str, ...]
    virtual_seconds: float
    cpu_seconds: float
    updates: int
    committed: int
    struck: tuple[str, ...]  # kinds of the faults that happened
    log: tuple[str, ...]
    frames: str  # SHA-256 of the frames that were sent, see `World.frames`
    captured: bool = False  # liars claimed half of the stages while these were vacant


@dataclass(eq=False)
class Process:
    """A peer's process, from its start to its end; its disk may outlive it."""

    peer_id: PeerId
    lane: Lane
    disk: Disk
    seats: int
    gone: frozenset[Process] = frozenset()  # processes that had ended when this one began
    let_go: frozenset[tuple[Process, int]] = (
        frozenset()
    )  # (process, a stage that it did not host at that time)
    leaving: bool = False
    hosting: Hosting | None = None
    leases: Leases | None = None
    memory: MemoryBudget | None = None
    transport: WorldTransport | None = None
    service: TrainingService | None = None
    work: asyncio.Task[None] | None = None
    tasks: list[Any] = field(default_factory=list)

    def announcement(self) -> PeerRecord:
        assert self.memory is not None
        return PeerRecord(
            peer=self.peer_id, name=self.peer_id, addresses=(), role="peer", device="cpu",
            flops_per_second=1e9, memory_bytes=self.seats * STAGE_BYTES,
            free_memory_bytes=self.memory.free_bytes, software="", opset=1,
            started_at=EPOCH_SECONDS,
        )  # fmt: skip
