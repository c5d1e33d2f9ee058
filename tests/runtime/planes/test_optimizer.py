from __future__ import annotations

import pytest
import torch

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.optimizer import Optimizer


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    parameter = torch.ones(3, requires_grad=True)
    optimizer = Optimizer(OptimizerConfig(), {"w": parameter})
    parameter.grad = torch.ones(3)
    optimizer.step(0.1)
    before = optimizer.state()
    assert before["w/step"] == 1
    for bad in ({"x/step": torch.ones(())}, {"w/nonsense": torch.ones(3)}, {"w/exp_avg": torch.ones(4)}):
        with pytest.raises(JobError, match="optimizer state"):
            optimizer.load_state(bad)
    after = optimizer.state()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_stage_without_parameters_has_nothing_to_update() -> None:
    optimizer = Optimizer(OptimizerConfig(), {})
    optimizer.step(0.1)
    optimizer.load_state({})
    assert optimizer.state() == {}


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(JobError, match=r"optimizer\.kind"):
        Optimizer(OptimizerConfig(kind="adam"), {"w": torch.ones(1, requires_grad=True)})  # type: ignore[arg-type]
