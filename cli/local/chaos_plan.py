"""Which faults a chaos run injects, and when: a pure function of its seed, so that a run can be repeated."""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["kill", "stop", "partition"]

JITTER = 0.2  # of `kill_every_seconds`, either way: faults shall not keep step with heartbeats
STOP_SECONDS = (3.0, 10.0)
PARTITION_SECONDS = (5.0, 15.0)
SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|)")
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """`peers` in all, of which `standbys` have no stage of their own; the others hold one each."""

    peers: int = 6
    standbys: int | None = None  # None: a third of the peers
    kill_every_seconds: float = 15.0
    minutes: float = 2.0  # about how long the run with faults lasts
    stop: bool = False
    partition: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= 64:
            raise ValueError(f"--peers must be from 2 to 64, not {self.peers}")
        if not 0 <= self.standby_count < self.peers:
            raise ValueError(
                f"--standbys must leave a peer to train: from 0 to {self.peers - 1}, not {self.standbys}"
            )
        if self.kill_every_seconds < 1.0:
            raise ValueError(f"--kill-every must be at least 1s, not {self.kill_every_seconds:g}s")
        if not 0.05 <= self.minutes <= 24 * 60:
            raise ValueError(f"--minutes must be from 0.05 to 1440, not {self.minutes:g}")
        if self.seed < 0:
            raise ValueError(f"--seed must be at least 0, not {self.seed}")

    @property
    def standby_count(self) -> int:
        return max(1, self.peers // 3) if self.standbys is None else self.standbys

    @property
    def stages(self) -> int:
        return self.peers - self.standby_count

    @property
    def command(self) -> str:
        """The command line that repeats the run."""
        arguments = [f"--peers {self.peers}", f"--standbys {self.standby_count}",
                 f"--kill-every {self.kill_every_seconds:g}s", f"--minutes {self.minutes:g}"]  # fmt: skip
        arguments += [f"--{name}" for name in ("stop", "partition") if getattr(self, name)]
        return " ".join(["fusion-peer chaos", *arguments, f"--seed {self.seed}"])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`role`: "stage K", its owner at that time, or "standby K", the K-th of the peers that own no stage. A partition
    cuts off the `group` peers that follow it in the order of their start."""

    at_seconds: float  # since the first committed step
    kind: Kind
    role: str
    seconds: float = 0.0  # how long it lasts; a kill is for ever
    group: int = 0

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        others = f" and {self.group - 1} others" if self.group > 1 else ""
        return f"{self.at_seconds:.1f} s: {self.kind} {self.role}{others}{lasting}"


def fault_plan(config: ChaosConfig, until_seconds: float) -> tuple[Fault, ...]:
    """The faults of a run, in order of time. Every peer of the swarm is as likely to be hit as any other; a longer
    plan begins with the shorter one."""
    every = config.kill_every_seconds
    found = _stream(config, "kill", every, every, until_seconds)
    if config.stop:
        found += _stream(config, "stop", 1.5 * every, 2.0 * every, until_seconds)
    if config.partition:
        found += _stream(config, "partition", 2.5 * every, 4.0 * every, until_seconds)
    return tuple(sorted(found, key=lambda fault: fault.at_seconds))


def _stream(
    config: ChaosConfig, kind: Kind, first_seconds: float, every_seconds: float, until_seconds: float
) -> list[Fault]:
    """Faults of one kind. Each has its own source of chance, so that one option does not change the others' faults."""
    chance = random.Random(f"{config.seed}/{kind}")
    roles = [f"stage {i}" for i in range(config.stages)]
    roles += [f"standby {i}" for i in range(config.standby_count)]
    faults = []
    nominal = first_seconds
    while nominal <= until_seconds:
        at = nominal + chance.uniform(-JITTER, JITTER) * config.kill_every_seconds
        role = chance.choice(roles)
        seconds = 0.0
        if kind != "kill":
            seconds = round(chance.uniform(*(STOP_SECONDS if kind == "stop" else PARTITION_SECONDS)), 2)
        group = chance.randint(1, max(1, config.peers // 2)) if kind == "partition" else 0
        faults.append(Fault(at_seconds=round(at, 2), kind=kind, role=role, seconds=seconds, group=group))
        nominal += every_seconds
    return faults


def parse_seconds(text: str, option: str) -> float:
    """Seconds of "15s", "500ms", "1.5m", "20". ValueError for anything else."""
    match = SECONDS.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{option}: {text!r} is not a time such as 15s or 2m")
    return float(match[1]) * _UNITS[match[2]]
