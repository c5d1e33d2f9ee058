"""The clock, random numbers and other inputs of a test's peer: by default those of the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random, SystemRandom

from fusion.runtime.job.context import Context
from fusion.runtime.job.worker import Worker
from fusion.runtime.peer.plane_choice import TORCH, choose
from fusion.runtime.planes.plane import Plane
from fusion.swarm.clock import Clock
from fusion.swarm.identity import Identity


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    clock: Clock = Clock()  # noqa: RUF009 - frozen
    random: Random = field(default_factory=SystemRandom)
    identity: Callable[[], Identity] = Identity.generate
    worker: Callable[[], Worker] = Worker
    stall_seconds: float = Context.stall_seconds
    plane: Plane = field(default_factory=lambda: choose(TORCH, "cpu", 1))


PRODUCT = Surroundings()
