"""Fault attribution: which owner failed at which step, and whether its stage moves, is retried, or fails the job. Pure.

A fault is a step with numbers that are not finite, arithmetic that raised (out of memory, say), or samples that are not the
plan's. It is blamed on the owner of one stage first, and the stage moves to another peer. The job fails only when two peers
in turn have failed at the same step of the same stage, or one peer PATIENCE times where no other can take the stage.

Where numbers are not finite, the step is run again with every tensor checked (`After.check`), and the culprit is the first
owner in data order that received only finite numbers and produced others. Where sender and receiver contradict each other,
the sender's stage moves first; if its successor is contradicted as well, the receiver's. So a false report moves the
reporter's own stage, or once that of a neighbour.

The lead replicates its faults to all owners, since it may be replaced itself. A new lead accepts those that a majority of the
other owners remember: a single report could otherwise end the job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from fusion.swarm.transport import PeerId

REMEMBERED = 16  # the newest
MAX_TEXT = 120
# Failures of one owner at one step before the job fails, where no other peer can take the stage.
PATIENCE = 3
HOLDS_JOB_UP = "it holds the job up"  # why an owner was replaced; no fault is counted

# Where a stage found numbers that are not finite, in data order.
RECEIVED, SENT, LOSS = "activations received", "activations sent", "loss"
GRADIENTS_RECEIVED, GRADIENTS_SENT, GRADIENTS = "gradients received", "gradients sent", "gradients"
FORWARD = (SENT, LOSS)
BACKWARD = (GRADIENTS_SENT, GRADIENTS)


@dataclass(frozen=True)
class Fault:
    """`peer` failed `times` times at `step` while it owned `stage`."""

    stage: int
    step: int
    peer: PeerId
    times: int = 1
    text: str = ""


Faults = tuple[Fault, ...]
Verdict = Literal["move", "again", "fail"]


class Report(Protocol):
    """A stage's report of a step that it has run."""

    @property
    def squared_norm(self) -> float: ...

    @property
    def loss(self) -> float | None: ...

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Some of the constants above; empty in a step whose tensors were not checked."""


def add(faults: Faults, stage: int, step: int, peer: PeerId, text: str) -> Faults:
    same = [fault for fault in faults if (fault.stage, fault.step, fault.peer) == (stage, step, peer)]
    times = 1 + sum(fault.times for fault in same)
    kept = [fault for fault in faults if fault not in same]
    return (*kept, Fault(stage, step, peer, times, text[:MAX_TEXT]))[-REMEMBERED:]


def overcome(faults: Faults, step: int) -> Faults:
    """A copy without the faults of steps up to `step`, which is committed."""
    return tuple(fault for fault in faults if fault.step > step)


def at(faults: Faults, stage: int, step: int) -> Faults:
    return tuple(fault for fault in faults if (fault.stage, fault.step) == (stage, step))


def judge(here: Faults, peer: PeerId, others: Collection[PeerId], patience: int = PATIENCE) -> Verdict:
    """What to do once `peer` has failed. `here`: all faults of the stage at the step, the peer's own among them; `others`: peers
    that could take the stage."""
    owners = {fault.peer for fault in here}
    if len(owners) > 1:
        return "fail"
    if set(others) - owners:
        return "move"
    times = sum(fault.times for fault in here if fault.peer == peer)
    return "fail" if times >= patience else "again"


def failure_line(here: Faults, step: int) -> str:
    """Why the job fails, in one line."""
    last = here[-1]
    if len(here) > 1:
        return f"step {step} at stage {last.stage}: {last.text} (two peers agree: {here[-2].peer} and {last.peer})"
    times = "once" if last.times == 1 else f"{last.times} times"
    return f"step {step} at stage {last.stage}: {last.text} ({times} at {last.peer}; no other peer can take the stage)"


def majority(reported: Mapping[PeerId, Faults]) -> Faults:
    """The faults that more than half of the peers report."""
    keys = Counter(key for faults in reported.values() for key in {(f.stage, f.step, f.peer) for f in faults})
    found = []
    for (stage, step, peer), votes in sorted(keys.items()):
        if 2 * votes > len(reported):
            same = [f for faults in reported.values() for f in at(faults, stage, step) if f.peer == peer]
            found.append(replace(min(same, key=lambda f: f.times), text=same[0].text[:MAX_TEXT]))
    return tuple(found)[-REMEMBERED:]


def merged(faults: Faults, others: Faults) -> Faults:
    """`faults`, and those of `others` that are not among them."""
    known = {(fault.stage, fault.step, fault.peer) for fault in faults}
    more = [fault for fault in others if (fault.stage, fault.step, fault.peer) not in known]
    return (*more, *faults)[-REMEMBERED:]


# --- numbers that are not finite


def is_finite(reports: Sequence[Report]) -> bool:
    """Whether a step may be committed. A squared norm below zero is refused like NaN: it has no root."""
    return all(
        0.0 <= report.squared_norm < math.inf and (report.loss is None or math.isfinite(report.loss))
        for report in reports
    )


def overflowed(reports: Sequence[Report]) -> bool:
    """Whether gradients in float16 overflowed that a smaller loss scale may keep finite (`fusion.runtime.training.compute.loss_scale`)."""
    norms = [report.squared_norm for report in reports]
    return any(map(math.isinf, norms)) and not any(map(math.isnan, norms))


def culprit(reports: Sequence[Report], contradicted: Collection[int] = ()) -> tuple[int, str]:
    """The stage that produced the first number that is not finite, and where. `reports` in stage order; `contradicted`: stages
    one of whose earlier owners was reported to have sent what it denies."""
    seen = [frozenset(report.not_finite) for report in reports]
    last = len(reports) - 1
    for stage, places in enumerate(seen):
        if places.intersection(FORWARD) and RECEIVED not in places:
            return stage, _first(places, FORWARD)
    for stage, places in enumerate(seen):
        if RECEIVED in places and not any(SENT in sender for sender in seen[:stage]):
            return _contradiction(max(0, stage - 1), stage, contradicted), RECEIVED
    for stage in range(last, -1, -1):
        places = seen[stage]
        if places.intersection(BACKWARD) and GRADIENTS_RECEIVED not in places:
            return stage, _first(places, BACKWARD)
    for stage in range(last, -1, -1):
        if GRADIENTS_RECEIVED in seen[stage] and not any(
            GRADIENTS_SENT in sender for sender in seen[stage + 1 :]
        ):
            return _contradiction(min(last, stage + 1), stage, contradicted), GRADIENTS_RECEIVED
    found = (stage for stage, report in enumerate(reports) if not is_finite([report]))
    return next(found, 0), GRADIENTS


def _first(places: frozenset[str], order: Sequence[str]) -> str:
    return next(place for place in order if place in places)


def _contradiction(sender: int, receiver: int, contradicted: Collection[int]) -> int:
    return receiver if sender in contradicted else sender
