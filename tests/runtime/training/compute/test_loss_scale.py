"""Dynamic loss scaling around a stage: it rounds nothing, skips what overflowed, and is part of the state."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.learning_rate import SKIPPED
from fusion.runtime.training.compute import loss_scale
from fusion.runtime.training.compute.loss_scale import FIRST, LEAST, LOSS_SCALE, LossScaled


class Stage:
    """What a plane's stage would be told."""

    stage = None

    def __init__(self):
        self.calls, self.norm = [], 4.0

    def backward(self, microbatch, gradients, loss_scale):
        self.calls.append(("backward", loss_scale))
        return {}

    def squared_norm(self, skip=frozenset()):
        return self.norm

    def apply(self, rate, clip):
        self.calls.append(("apply", rate, clip))

    def discard(self):
        self.calls.append(("discard",))

    def state(self):
        return {"variable/w": torch.zeros(1)}

    def load_state(self, state):
        self.calls.append(("load", sorted(state)))


def now(scaled):
    return scaled.state()[LOSS_SCALE].tolist()


def test_what_goes_in_scaled_comes_out_unscaled():
    inner = Stage()
    scaled = LossScaled(inner)
    scaled.backward(0, {}, 0.25)
    inner.norm = (3 * FIRST) ** 2
    assert scaled.squared_norm() == 9.0
    scaled.apply(0.1, 0.5)
    assert inner.calls == [("backward", 0.25 * FIRST), ("apply", 0.1, 0.5 / FIRST)]


def test_an_overflow_halves_the_scale_and_changes_nothing_else_down_to_where_it_is_an_error():
    inner = Stage()
    scaled = LossScaled(inner)
    for norm in (math.inf, math.nan):
        inner.norm = norm
        assert scaled.squared_norm() == math.inf
    scaled.apply(0.1, SKIPPED)
    assert inner.calls == [("discard",)] and now(scaled) == [FIRST / 2, 0.0]
    while now(scaled)[0] > LEAST:
        scaled.apply(0.1, SKIPPED)
    assert math.isnan(scaled.squared_norm())


def test_the_scale_grows_after_a_while_and_goes_on_from_a_state(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    one, other = LossScaled(Stage()), LossScaled(Stage())
    for clip in (1.0, SKIPPED, 1.0, 1.0):
        one.apply(0.1, clip)
    other.load_state(one.state())
    assert now(other) == now(one) == [FIRST / 2, 2.0]
    for scaled in (one, other):
        scaled.apply(0.1, 1.0)
    assert now(other) == now(one) == [FIRST, 0.0]


@pytest.mark.parametrize(
    "numbers", [[3.0, 0.0], [0.5, 0.0], [2.0**30, 0.0], [math.nan, 0.0], [2.0, -1.0], [2.0, 0.5], [2.0, 1e9]]
)
def test_a_state_of_nonsense_is_refused_before_anything_changes(numbers):
    inner = Stage()
    scaled = LossScaled(inner)
    for state in ({}, {LOSS_SCALE: torch.tensor(numbers, dtype=torch.float64)}):
        with pytest.raises(JobError, match="loss scale"):
            scaled.load_state(state)
    assert inner.calls == [] and now(scaled) == [FIRST, 0.0]
