"""The kills of a training sweep, in order: a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

ROLES = ("lead", "middle", "last", "standby", "launcher", "bootstrap", "first")
PHASES = ("fp", "bp", "ready", "commit", "snapshot", "recovery")
LONGEST_DELAY_SECONDS = {"snapshot": 0.02, "recovery": 1.5}  # others die on the spot


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL of `role` at the `count`-th `phase` of the stage `trapped`, whose owner has the trap. `other`: during a recovery,
    the stage whose owner was killed first."""

    id: int
    role: str
    phase: str
    stage: int | None  # of the role; None where it holds none
    trapped: int
    count: int
    side: str  # of the phase: before or after
    delay_seconds: float
    other: int | None = None

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = f" (stage {self.stage})" if self.stage is not None else ""
        return f"{self.role}{where} {self.side} {self.phase} {self.count}"


def kills(
    number: int, seed: int, stages: int, microbatches: int, roles: Sequence[str] = ROLES,
    phases: Sequence[str] = PHASES,
) -> tuple[Kill, ...]:  # fmt: skip
    """`number` kills in random order: every role in every phase before any twice ("first" is the lead by another name,
    and comes last)."""
    chance = random.Random(seed)
    combinations = [(role, phase) for role in ROLES for phase in PHASES if role in roles and phase in phases]
    chosen = [combinations[i % len(combinations)] for i in range(number)]
    chance.shuffle(chosen)
    return tuple(
        _kill(i, role, phase, chance, stages, microbatches) for i, (role, phase) in enumerate(chosen)
    )


def _kill(number: int, role: str, phase: str, chance: random.Random, stages: int, microbatches: int) -> Kill:
    middle = chance.randrange(1, stages - 1) if stages > 2 else stages - 1
    stage = {"first": 0, "lead": 0, "middle": middle, "last": stages - 1}.get(role)
    trapped = chance.randrange(stages) if stage is None else stage
    count = 1
    if phase in ("fp", "bp"):
        count = chance.randint(1, microbatches)
    elif phase in ("ready", "commit") and trapped == 0:
        count = chance.randint(1, stages - 1)  # between the words from, or to, one stage and the next
    delay = chance.uniform(0.0, LONGEST_DELAY_SECONDS.get(phase, 0.0))
    other = chance.choice([s for s in range(stages) if s != trapped] or [0]) if phase == "recovery" else None
    return Kill(
        id=number, role=role, phase=phase, stage=stage, trapped=trapped, count=count,
        side=chance.choice(("before", "after")), delay_seconds=round(delay, 4), other=other,
    )  # fmt: skip


def trap_phase(kill: Kill) -> str:
    """The phase in `armed.py`: the lead reaches a commit when it sends it."""
    return "commit-sent" if kill.phase == "commit" and kill.trapped == 0 else kill.phase
