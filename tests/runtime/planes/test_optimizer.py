from __future__ import annotations

import pytest
import torch

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes import optimizer
from fusion.runtime.planes.optimizer import CHUNK_ELEMENTS, MAX_COPIED_ELEMENTS, Optimizer, squared_norm


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    parameter = torch.ones(3, requires_grad=True)
    updated = Optimizer(OptimizerConfig(), {"w": parameter})
    parameter.grad = torch.ones(3)
    updated.step(0.1)
    before = updated.state()
    assert before["w/step"] == 1
    moments = {"w/exp_avg": torch.ones(3), "w/exp_avg_sq": torch.ones(3)}
    for bad in (
        {"x/step": torch.ones(())}, {"w/nonsense": torch.ones(3)}, {"w/exp_avg": torch.ones(4)}, moments,
        {"w/step": torch.ones(())}, {"w/momentum_buffer": torch.ones(3)}, {**moments, "w/step": torch.ones(3)},
        {**moments, "w/step": torch.tensor(1)}, {**before, "w/exp_avg": torch.ones(3, dtype=torch.int32)},
    ):  # fmt: skip
        with pytest.raises(JobError, match="optimizer state"):
            updated.load_state(bad)
    after = updated.state()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_stage_without_parameters_has_nothing_to_update() -> None:
    updated = Optimizer(OptimizerConfig(), {})
    updated.step(0.1)
    updated.load_state({})
    assert updated.state() == {}


SGD = OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("config", [OptimizerConfig(), SGD, OptimizerConfig(kind="sgd", momentum=0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_has_the_bits_of_the_librarys_classes(config: OptimizerConfig, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    values = [torch.randn(n, 7, generator=draw, dtype=dtype) for n in (1, 40, 300)]
    ours, theirs = ([value.clone().requires_grad_() for value in values] for _ in range(2))
    updated = Optimizer(config, {str(n): parameter for n, parameter in enumerate(ours)})
    common = {"weight_decay": config.weight_decay, "fused": True}
    library: torch.optim.Optimizer = (
        torch.optim.AdamW(theirs, betas=config.betas, eps=config.eps, **common)  # type: ignore[arg-type]
        if config.kind == "adamw"
        else torch.optim.SGD(theirs, momentum=config.momentum, **common)  # type: ignore[arg-type]
    )
    for step in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=draw, dtype=dtype)
            other.grad = one.grad.clone()
        rate = library.param_groups[0]["lr"] = 0.01 / (1 + step)
        updated.step(rate)
        library.step()
        if step == 2:  # from a snapshot
            updated.load_state(updated.state())
        assert all(map(torch.equal, ours, theirs))
    kept = {f"{n}/{slot}": v for n, p in enumerate(theirs) for slot, v in library.state[p].items()}
    assert updated.state().keys() == kept.keys()
    assert all(torch.equal(value, kept[key]) for key, value in updated.state().items())


@pytest.mark.parametrize("config", [OptimizerConfig(), SGD])
def test_a_parameter_may_get_its_first_gradient_later(config: OptimizerConfig) -> None:
    """As a matrix of experts that nobody chose until then: it begins then as others did."""
    one, late = (torch.ones(3, requires_grad=True) for _ in range(2))
    updated = Optimizer(config, {"one": one, "late": late})
    one.grad = torch.ones(3)
    updated.step(0.1)
    first = one.detach().clone()
    assert torch.equal(late, torch.ones(3))
    one.grad, late.grad = torch.ones(3), torch.ones(3)
    updated.step(0.1)
    assert torch.equal(late, first) and not torch.equal(one, first)


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
        for elements in (
            1,
            1001,
            CHUNK_ELEMENTS,
            MAX_COPIED_ELEMENTS,
            MAX_COPIED_ELEMENTS + 1,
            MAX_COPIED_ELEMENTS + CHUNK_ELEMENTS + 8,
            40 * CHUNK_ELEMENTS + 16,
        ):
            gradient = _drawn(draw, elements)
            assert torch.equal(squared_norm(gradient), _by_library(gradient)), elements
        assert optimizer._library_lanes() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
        for broken in (float("nan"), float("inf")):
            gradient[CHUNK_ELEMENTS] = broken
            assert str(squared_norm(gradient)) == str(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    finally:
        torch.set_num_threads(before)


def test_a_squared_norm_is_the_same_however_it_is_added_up_and_lies_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the library or by us, on any number of threads, of a tensor that is transposed, every other column of a wider one, or begins
    anywhere."""
    before, draw = torch.get_num_threads(), torch.Generator().manual_seed(7)
    try:
        for turn in range(300):
            rows, columns = (int(n) for n in torch.randint(1, 250, (2,), generator=draw))
            gradient = _drawn(draw, rows * columns).reshape(rows, columns)
            wider = torch.zeros(rows, 2 * columns)
            wider[:, ::2] = gradient
            shifted = torch.cat([torch.zeros(1), gradient.reshape(-1)])[1:].reshape(rows, columns)
            torch.set_num_threads(1)
            wanted = _by_library(gradient)
            torch.set_num_threads(1 + turn % 3)
            for whole in (1 << 20, 8):
                monkeypatch.setattr(optimizer, "MAX_COPIED_ELEMENTS", whole)
                for same in (gradient, gradient.T.contiguous().T, wider[:, ::2], shifted):
                    assert torch.equal(squared_norm(same), wanted), (turn, rows, columns)
    finally:
        torch.set_num_threads(before)


def _drawn(draw: torch.Generator, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=draw) * 10.0 ** torch.randint(-3, 4, (elements,), generator=draw)


def _by_library(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
