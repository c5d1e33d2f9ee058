"""Whether a stage of a running job should move to an idle peer. Pure, over the step model that compares placements.

A move stops the whole job while the stage's state crosses a link, so it must save twice that time over the remaining steps,
and a fifth of each step. A peer's announced speed was measured while idle: unless it is BELIEVED times as high, the peer
counts as no faster than the current owner, which was measured at work. So moving back never pays unless something else
changes: both directions are judged by the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusion.dag.placement.pipeline import Pipeline, StageLoad
from fusion.dag.placement.step_model import step_seconds

EXPLAINED = (
    0.5  # of the measured step time; if the model predicts less, its figures of the links are out of date
)
LEAST_GAIN = 0.2  # of a step
WORTH = 2.0  # times the cost
PAUSE_SECONDS = 3.0  # of a move, beside sending the state: to stop, to claim, to link, to begin
BELIEVED = 3.0  # times as fast an announced speed must be to count


@dataclass(frozen=True, kw_only=True)
class Move:
    stage: int
    peer: str
    before_seconds: float  # a step
    after_seconds: float
    cost_seconds: float

    @property
    def gain(self) -> float:
        """The share of a step's time that is saved, from 0 to 1."""
        return 1 - self.after_seconds / self.before_seconds


def best_move(
    pipe: Pipeline,
    idle: Sequence[str],
    *,
    state_bytes: Sequence[int],
    steps_left: int,
    seconds: float,
    known: Callable[[str, str], bool] = lambda a, b: True,
) -> Move | None:
    """The move that shortens a step most, among those that pay; None where none does.

    `idle`: peers of the network that run no stage, whose `memory_bytes` are free. `state_bytes`: by stage. `seconds`: measured
    step time. It replaces a longer prediction; if the prediction is far shorter, new figures of the links are still to come,
    and it is unknown for which stage: no move. `known`: whether the rate of an ordered pair of peers is measured and not
    guessed; no stage moves on a guess."""
    modelled = step_seconds(pipe).seconds
    if modelled < EXPLAINED * seconds:
        return None
    before = min(modelled, seconds)
    best: Move | None = None
    for stage, load in enumerate(pipe.stages):
        for peer in idle:
            fits = load.memory_bytes <= pipe.network.device(peer).memory_bytes
            if peer in pipe.owners or not fits or not _reaches(pipe, stage, peer, known):
                continue
            rate = pipe.network.rate(pipe.owners[stage], peer)
            move = Move(
                stage=stage,
                peer=peer,
                before_seconds=before,
                after_seconds=step_seconds(moved(pipe, stage, peer)).seconds,
                cost_seconds=state_bytes[stage] / rate + PAUSE_SECONDS,
            )
            if pays(move, steps_left) and (best is None or move.after_seconds < best.after_seconds):
                best = move
    return best


def pays(move: Move, steps_left: int) -> bool:
    saved = move.before_seconds - move.after_seconds
    return saved >= LEAST_GAIN * move.before_seconds and saved * steps_left > WORTH * move.cost_seconds


def moved(pipe: Pipeline, stage: int, peer: str) -> Pipeline:
    """The same job with the stage on that peer."""
    owners, stages = list(pipe.owners), list(pipe.stages)
    network = pipe.network
    ratio = network.device(owners[stage]).flops_per_second / network.device(peer).flops_per_second
    owners[stage] = peer
    stages[stage] = _slower(stages[stage], ratio if ratio * BELIEVED < 1 else max(1.0, ratio))
    return replace(pipe, owners=tuple(owners), stages=tuple(stages))


def _slower(load: StageLoad, times: float) -> StageLoad:
    return replace(
        load,
        forward_seconds=load.forward_seconds * times,
        backward_seconds=load.backward_seconds * times,
        update_seconds=load.update_seconds * times,
    )


def _reaches(pipe: Pipeline, stage: int, peer: str, known: Callable[[str, str], bool]) -> bool:
    """Whether every link that the stage would use there is known."""
    ends = {
        pipe.owners[flow.consumer if flow.producer == stage else flow.producer]
        for flow in pipe.flows
        if stage in (flow.producer, flow.consumer)
    }
    there = known(pipe.owners[stage], peer)
    return there and all(known(peer, end) and known(end, peer) for end in ends)
