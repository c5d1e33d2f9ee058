from __future__ import annotations

import pytest
import torch

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes import optimizer
from fusion.runtime.planes.optimizer import PIECE, Optimizer, squared_norm


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    parameter = torch.ones(3, requires_grad=True)
    updated = Optimizer(OptimizerConfig(), {"w": parameter})
    parameter.grad = torch.ones(3)
    updated.step(0.1)
    before = updated.state()
    assert before["w/step"] == 1
    for bad in ({"x/step": torch.ones(())}, {"w/nonsense": torch.ones(3)}, {"w/exp_avg": torch.ones(4)}):
        with pytest.raises(JobError, match="optimizer state"):
            updated.load_state(bad)
    after = updated.state()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_stage_without_parameters_has_nothing_to_update() -> None:
    updated = Optimizer(OptimizerConfig(), {})
    updated.step(0.1)
    updated.load_state({})
    assert updated.state() == {}


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(JobError, match=r"optimizer\.kind"):
        Optimizer(OptimizerConfig(kind="adam"), {"w": torch.ones(1, requires_grad=True)})  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_squared_norm_has_the_bits_of_the_librarys(threads: int) -> None:
    """However large the gradient is, which the library copies; it may add in another order on a processor that we do not know."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        draw = torch.Generator().manual_seed(threads)
        for elements in (1, 1001, PIECE, PIECE + 1, 3 * PIECE + 8, 40 * PIECE + 16):
            scales = 10.0 ** torch.randint(-3, 4, (elements,), generator=draw)
            gradient = torch.randn(elements, generator=draw) * scales
            wanted = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            assert torch.equal(squared_norm(gradient), wanted), elements
        assert optimizer._lanes() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
        for broken in (float("nan"), float("inf")):
            gradient[PIECE] = broken
            assert str(squared_norm(gradient)) == str(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        across = torch.randn(700, 300, generator=draw).T
        assert torch.equal(
            squared_norm(across), torch.linalg.vector_norm(across, dtype=torch.float64).square()
        )
    finally:
        torch.set_num_threads(before)
