"""The parameters and faults of a world, drawn from its seed before it begins. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

FaultKind = Literal["kill", "vanish", "freeze", "cut", "partition", "leave", "join", "move"]
Victim = Literal["lead", "owner", "spare", "any"]

# A fault can strike when one of these frames is sent: those of steps, snapshots and takeovers.
TRIGGERS = (
    "hello", "welcome", "join", "begin", "activation", "gradient", "ready", "commit", "discard", "restore",
    "shard", "replicate", "held", "saved", "finish", "suspect", "holds", "owner", "take", "taking", "leaving",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: FaultKind
    victim: Victim
    stage: int  # the victim's, if the victim is an owner
    at: float  # seconds after the world began
    # If set, the fault waits from `at` on for the `count`-th frame of this kind between any peers, and strikes its sender or
    # receiver.
    trigger: str = ""
    count: int = 1
    side: Literal["sender", "receiver"] = "sender"
    seconds: float = 0.0  # duration; for a kill: until the peer starts again, 0 for never
    fresh: bool = False  # for a kill: a new peer with an empty disk replaces the victim


@dataclass(frozen=True, kw_only=True)
class Scenario:
    seed: int
    stages: int
    seats: tuple[int, ...]  # how many stages fit into the memory of each peer
    steps: int
    microbatches: int
    microbatch_size: int
    snapshot_every: int
    compute_seconds: float  # average duration of one action
    link_seconds: float  # the slowest link, one way
    directory_seconds: float  # the slowest look-up, and the slowest spread of a record
    directory_lost: float  # chance that a record never reaches a given reader
    directory_fails: float  # chance that a look-up fails
    faults: tuple[Fault, ...]
    liars: int = 0  # malicious peers besides those of `seats`

    @property
    def lives(self) -> bool:
        """Whether the job has to end: liars are fewer than a third of all peers."""
        return 3 * self.liars < len(self.seats) + self.liars

    @property
    def quiet(self) -> bool:
        """Whether every peer sees every record soon, so that nothing excuses two holders of one term."""
        excused = {"partition", "freeze", "vanish"}
        return self.directory_lost == 0 and not any(fault.kind in excused for fault in self.faults)


def with_liars(plan: Scenario, most: int) -> Scenario:
    """`plan` with one to `most` liars, and in half of the worlds more honest peers; eight peers at most.

    A generator of its own draws them, so the rest of the plan does not change.
    """
    rng = random.Random(plan.seed ^ 0x11A5)
    liars = min(rng.randint(1, most), 8 - len(plan.seats))
    # A job of three peers has no majority that could outvote a liar.
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
    """In one world of four, a lead that moves a stage to another peer: no fault, but it coincides with faults.

    A generator of its own draws the moves, so worlds without them do not change.
    """
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
    faults = []
    dead = False  # a shard is on two peers, so only one peer of a world may lose its disk
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
            kind = "kill"  # one partition at a time
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
        faults.append(
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
    return faults
