from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.learning_rate import clip_factor, learning_rate


def test_constant_schedule_warms_up_and_stays() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3)
    assert [learning_rate(config, s, 10) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_fall_from_the_peak_to_the_final_ratio(schedule: str) -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=2, schedule=schedule, final_ratio=0.1)  # type: ignore[arg-type]
    rates = [learning_rate(config, s, 13) for s in range(13)]
    assert rates[2] == 2.0
    assert rates[12] == pytest.approx(0.2)
    assert rates[7] == pytest.approx(1.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 50),
    st.integers(1, 60),
    st.integers(0, 100),
)
def test_rates_are_positive_and_at_most_the_peak(schedule: str, warmup: int, steps: int, step: int) -> None:
    config = OptimizerConfig(learning_rate=0.3, warmup_steps=warmup, schedule=schedule)  # type: ignore[arg-type]
    assert 0 < learning_rate(config, step, steps) <= 0.3


def test_the_clip_factor_is_that_of_torch() -> None:
    parameter = torch.zeros(5, requires_grad=True)
    parameter.grad = torch.arange(5.0)
    total = float(parameter.grad.square().sum())
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    factor = clip_factor(OptimizerConfig(clip_norm=1.0), total)
    torch.testing.assert_close(torch.arange(5.0) * factor, parameter.grad)
    assert clip_factor(OptimizerConfig(clip_norm=None), total) == 1.0
    assert clip_factor(OptimizerConfig(clip_norm=math.sqrt(total) * 2), total) == 1.0
