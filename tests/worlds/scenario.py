"""What happens in a world, as data: drawn from its seed before it begins. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

FaultKind = Literal["kill", "vanish", "freeze", "cut", "partition", "leave", "join", "move"]
Victim = Literal["lead", "owner", "spare", "any"]

# Frames on whose way a fault can strike: everything that the protocol of a step, of a snapshot or of a takeover says.
TRIGGERS = (
    "hello", "welcome", "join", "begin", "activation", "gradient", "ready", "commit", "discard", "restore",
    "shard", "replicate", "held", "saved", "finish", "suspect", "holds", "owner", "take", "taking", "leaving",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: FaultKind
    victim: Victim
    stage: int  # of which stage, where the victim is an owner
    at: float  # seconds after the world began
    # Where set, the fault waits from `at` on for the n-th frame of that kind to or from anybody, and strikes its sender
    # or its receiver then.
    trigger: str = ""
    count: int = 1
    side: Literal["sender", "receiver"] = "sender"
    seconds: float = 0.0  # how long it lasts; of a kill: until the peer starts again, 0 for never
    fresh: bool = False  # of a kill: another peer comes instead, with an empty disk


@dataclass(frozen=True, kw_only=True)
class Scenario:
    seed: int
    stages: int
    seats: tuple[int, ...]  # of each peer: how many stages its memory takes
    steps: int
    microbatches: int
    microbatch_size: int
    snapshot_every: int
    compute_seconds: float  # of one action, on average
    link_seconds: float  # the slowest link, one way
    directory_seconds: float  # the slowest look-up, and the slowest spread of a record
    directory_lost: float  # chance of a record never to reach one reader
    directory_fails: float  # chance of a look-up to fail
    faults: tuple[Fault, ...]
    liars: int = 0  # peers that mean harm, besides those of `seats`

    @property
    def lives(self) -> bool:
        """Whether the job has to come to its end: liars are fewer than a third of all peers."""
        return 3 * self.liars < len(self.seats) + self.liars

    @property
    def quiet(self) -> bool:
        """Whether every peer sees every record soon: two holders of one term cannot be excused by the directory."""
        excused = {"partition", "freeze", "vanish"}
        return self.directory_lost == 0 and not any(fault.kind in excused for fault in self.faults)


def with_liars(plan: Scenario, most: int) -> Scenario:
    """One to `most` of them, drawn apart, so that the world is otherwise what it was; eight peers at most."""
    rng = random.Random(plan.seed ^ 0x11A5)
    liars = min(rng.randint(1, most), 8 - len(plan.seats))
    # More who are honest, in half of the worlds: a job of three peers has nobody to outvote a liar.
    more = rng.randint(0, 8 - len(plan.seats) - liars) if rng.random() < 0.5 else 0
    return replace(plan, liars=liars, seats=(*plan.seats, *(rng.choice((1, 1, 2)) for _ in range(more))))


def scenario(seed: int, *, faults: bool = True) -> Scenario:
    rng = random.Random(seed)
    stages = rng.choice((2, 2, 3))
    count = stages + rng.choice((1, 1, 2)) if faults else stages
    seats = [rng.choice((1, 1, 2, 3)) for _ in range(count)]
    return Scenario(
        seed=seed,
        stages=stages,
        seats=tuple(seats),
        steps=rng.randint(4, 8),
        microbatches=rng.choice((1, 2, 2)),
        microbatch_size=rng.choice((1, 2)),
        snapshot_every=rng.choice((1, 2, 3, 4)),
        compute_seconds=rng.choice((0.01, 0.05, 0.2)),
        link_seconds=rng.choice((0.005, 0.05)),
        directory_seconds=rng.choice((0.05, 0.2)),
        directory_lost=rng.choice((0.0, 0.0, 0.05)),
        directory_fails=rng.choice((0.0, 0.0, 0.02)),
        faults=tuple(sorted(_all_faults(rng, seed, stages, count), key=lambda fault: fault.at))
        if faults
        else (),
    )


def _all_faults(rng: random.Random, seed: int, stages: int, count: int) -> list[Fault]:
    return [*_faults(rng, stages, count), *_moves(random.Random(seed ^ 0x303E), stages)]


def _moves(rng: random.Random, stages: int) -> list[Fault]:
    """A lead that has a stage run elsewhere, in one world of four: no fault, but it meets with them. Drawn apart, so that
    the other worlds are what they were."""
    if rng.random() < 0.75:
        return []
    return [
        Fault(
            kind="move",
            victim="owner",
            stage=rng.randrange(stages),
            at=rng.uniform(0.5, 6.0),
            trigger=rng.choice(("", *TRIGGERS)),
            count=rng.randint(1, 4),
            side=rng.choice(("sender", "receiver")),
        )
        for _ in range(rng.choice((1, 2)))
    ]


def _faults(rng: random.Random, stages: int, count: int) -> list[Fault]:
    made = []
    dead = False  # a shard lies on two peers: no more than one of them may lose its disk
    cut = False
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choice(
            (
                "kill",
                "kill",
                "kill",
                "kill",
                "freeze",
                "freeze",
                "vanish",
                "cut",
                "partition",
                "leave",
                "join",
            )
        )
        if kind == "partition" and cut:
            kind = "kill"  # one at a time
        seconds, fresh = 0.0, False
        if kind in ("kill", "vanish", "leave"):
            seconds = rng.uniform(0.5, 8.0)
            if not dead and rng.random() < 0.3:
                dead = True
                if rng.random() < 0.5 and count > stages:
                    seconds = 0.0
                else:
                    fresh = True
        elif kind == "freeze":
            seconds = rng.choice((rng.uniform(0.5, 4.0), rng.uniform(6.0, 12.0)))  # a takeover needs 6 to 8
        elif kind == "partition":
            cut = True
            seconds = rng.uniform(1.0, 20.0)
        triggered = kind not in ("join", "partition") and rng.random() < 0.6
        made.append(
            Fault(
                kind=kind,  # type: ignore[arg-type]
                victim=rng.choice(("lead", "owner", "owner", "spare", "any")),
                stage=rng.randrange(stages),
                at=rng.uniform(0.0, 2.0 if triggered else 8.0),
                trigger=rng.choice(TRIGGERS) if triggered else "",
                count=rng.randint(1, 4),
                side=rng.choice(("sender", "receiver")),
                seconds=seconds,
                fresh=fresh,
            )
        )
    return made
