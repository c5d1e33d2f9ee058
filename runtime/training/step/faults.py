"""What failed at which owner, and what follows: pure.

A step whose numbers are not finite, arithmetic that raised (no memory, say), samples that are not the plan's: it is the
owner of one stage that has to do with it, and the stage goes to another peer before anybody takes it for the job's own
fault. A job fails when two peers, one after the other, have failed at one step of one stage; or one, several times, where
there is nobody else.

Which owner it was is found from what all report of a step that is run again with a look at every tensor (`After.check`):
the first in the order of the data that received only finite numbers and made others. Where two contradict each other,
the one that sent goes first; if its successor is contradicted as well, the one that received. So who reports falsely
moves its own stage, or once that of a neighbour.

The lead tells its faults to everybody, as it may be the next one to go; the next lead believes those which a majority of
the other owners remember, for a word of one of them could end the job.
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
# Failures of one owner at one step before its word is taken where nobody else can take the stage.
PATIENCE = 3
STANDS_STILL = "the step stands still with it"  # why an owner had to go: it counts for no fault

# What a stage saw in a step, in the order of the data.
RECEIVED, SENT, LOSS = "activations received", "activations sent", "loss"
GRADIENTS_RECEIVED, GRADIENTS_SENT, GRADIENTS = "gradients received", "gradients sent", "gradients"
FORWARD = (SENT, LOSS)
BACKWARD = (GRADIENTS_SENT, GRADIENTS)


@dataclass(frozen=True)
class Fault:
    """A stage failed at a step, so many times while that peer held it."""

    stage: int
    step: int
    peer: PeerId
    times: int = 1
    text: str = ""


Faults = tuple[Fault, ...]
Verdict = Literal["move", "again", "fail"]


class Report(Protocol):
    """What a stage says of a step that it has run."""

    @property
    def squared_norm(self) -> float: ...

    @property
    def loss(self) -> float | None: ...

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Of the words above; empty in a step that was run without a look."""


def add(faults: Faults, stage: int, step: int, peer: PeerId, text: str) -> Faults:
    same = [fault for fault in faults if (fault.stage, fault.step, fault.peer) == (stage, step, peer)]
    times = 1 + sum(fault.times for fault in same)
    kept = [fault for fault in faults if fault not in same]
    return (*kept, Fault(stage, step, peer, times, text[:MAX_TEXT]))[-REMEMBERED:]


def overcome(faults: Faults, step: int) -> Faults:
    """Without those of the steps up to that one, which is committed."""
    return tuple(fault for fault in faults if fault.step > step)


def at(faults: Faults, stage: int, step: int) -> Faults:
    return tuple(fault for fault in faults if (fault.stage, fault.step) == (stage, step))


def judge(here: Faults, peer: PeerId, others: Collection[PeerId], patience: int = PATIENCE) -> Verdict:
    """What follows once `peer` has failed. `here`: all faults of the stage at the step, its own among them; `others`
    could take the stage."""
    owners = {fault.peer for fault in here}
    if len(owners) > 1:
        return "fail"
    if set(others) - owners:
        return "move"
    times = sum(fault.times for fault in here if fault.peer == peer)
    return "fail" if times >= patience else "again"


def in_words(here: Faults, step: int) -> str:
    """Why the job fails, in one line."""
    last = here[-1]
    if len(here) > 1:
        return f"step {step} at stage {last.stage}: {last.text} (two peers agree: {here[-2].peer} and {last.peer})"
    times = "once" if last.times == 1 else f"{last.times} times"
    return f"step {step} at stage {last.stage}: {last.text} ({times} at {last.peer}; no other peer can take the stage)"


def believed(told: Mapping[PeerId, Faults]) -> Faults:
    """What more than half of the peers tell alike."""
    keys = Counter(key for faults in told.values() for key in {(f.stage, f.step, f.peer) for f in faults})
    found = []
    for (stage, step, peer), voices in sorted(keys.items()):
        if 2 * voices > len(told):
            same = [f for faults in told.values() for f in at(faults, stage, step) if f.peer == peer]
            found.append(replace(min(same, key=lambda f: f.times), text=same[0].text[:MAX_TEXT]))
    return tuple(found)[-REMEMBERED:]


def merged(faults: Faults, others: Faults) -> Faults:
    """With those of `others` that are not among them."""
    known = {(fault.stage, fault.step, fault.peer) for fault in faults}
    more = [fault for fault in others if (fault.stage, fault.step, fault.peer) not in known]
    return (*more, *faults)[-REMEMBERED:]


# --- numbers that are not finite


def is_finite(reports: Sequence[Report]) -> bool:
    """Whether a step may be committed. A squared norm below zero is no more a number than NaN is: it has no root."""
    return all(
        0.0 <= report.squared_norm < math.inf and (report.loss is None or math.isfinite(report.loss))
        for report in reports
    )


def overflowed(reports: Sequence[Report]) -> bool:
    """Whether gradients in float16 overflowed that a smaller loss scale may keep finite (`fusion.runtime.training.compute.loss_scale`)."""
    norms = [report.squared_norm for report in reports]
    return any(map(math.isinf, norms)) and not any(map(math.isnan, norms))


def culprit(reports: Sequence[Report], contradicted: Collection[int] = ()) -> tuple[int, str]:
    """The stage that made the first number that is not finite, and what it was. `reports` in stage order; `contradicted`:
    stages of which another owner was said to have sent what it denies."""
    words = [frozenset(report.not_finite) for report in reports]
    last = len(reports) - 1
    for stage, said in enumerate(words):
        if said.intersection(FORWARD) and RECEIVED not in said:
            return stage, _first(said, FORWARD)
    for stage, said in enumerate(words):
        if RECEIVED in said and not any(SENT in sender for sender in words[:stage]):
            return _contradiction(max(0, stage - 1), stage, contradicted), RECEIVED
    for stage in range(last, -1, -1):
        said = words[stage]
        if said.intersection(BACKWARD) and GRADIENTS_RECEIVED not in said:
            return stage, _first(said, BACKWARD)
    for stage in range(last, -1, -1):
        if GRADIENTS_RECEIVED in words[stage] and not any(GRADIENTS_SENT in s for s in words[stage + 1 :]):
            return _contradiction(min(last, stage + 1), stage, contradicted), GRADIENTS_RECEIVED
    found = (stage for stage, report in enumerate(reports) if not is_finite([report]))
    return next(found, 0), GRADIENTS


def _first(said: frozenset[str], order: Sequence[str]) -> str:
    return next(word for word in order if word in said)


def _contradiction(sender: int, receiver: int, contradicted: Collection[int]) -> int:
    return receiver if sender in contradicted else sender
