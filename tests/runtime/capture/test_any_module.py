"""Unlike modules, captured, cut at random and run stage by stage: loss, gradients and statistics are those of the module."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from support.any_modules import MAKERS, AnyModule, experts, total, unet

from fusion.dag.cutting.cuts import legal_cuts, split, tie_groups
from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.plane import RngKey
from fusion.runtime.planes.torch_plane import TorchTrainingStage

CUTS = 20  # for each module in the broad sweep
MICROBATCHES = 2
MOST_STAGES = 6


def captured(case: AnyModule) -> Graph:
    graph = trained_graph(
        capture_module(
            case.module,
            case.arrays,
            lambda *given: total(case.loss(*given)),
            module_inputs=case.module_inputs,
            loss_inputs=case.loss_inputs,
        )
    )
    return serialise.decode(serialise.encode(graph))  # as a peer gets it


def batches(case: AnyModule) -> list[dict[str, torch.Tensor]]:
    """The same samples in other orders: statistics depend on which microbatch came first."""
    rows = len(next(iter(case.arrays.values())))
    return [{n: a[: rows - i].flip(0) for n, a in case.arrays.items()} for i in range(MICROBATCHES)]


def own(case: AnyModule) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, gradients and buffers by plain autograd."""
    twin = AnyModule(copy.deepcopy(case.module).train(), case.arrays, case.loss, case.of_loss)
    losses = []
    for batch in batches(case):
        loss = twin.own_loss(batch)
        (loss / MICROBATCHES).backward()
        losses.append(float(loss.detach()))
    gradients = {n: p.grad for n, p in twin.module.named_parameters() if p.grad is not None}
    return losses, gradients, dict(twin.module.named_buffers())


def staged(
    case: AnyModule, graph: Graph, cuts: Sequence[int]
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same, stage after stage, as peers do it."""
    stages = split(graph, cuts)
    planes = [TorchTrainingStage(s, variables_from_module(case.module), OptimizerConfig()) for s in stages]
    losses = []
    for m, batch in enumerate(batches(case)):
        values = dict(batch)
        for plane in planes:
            values.update(plane.forward(m, values, RngKey(0, 0, m)))
        losses.append(float(values["result/0"]))
        arrived: dict[str, torch.Tensor] = {}
        for plane in reversed(planes):
            mine = {e.name: arrived[e.name] for e in plane.stage.sends if e.needs_gradient}
            for name, gradient in plane.backward(m, mine, 1 / MICROBATCHES).items():
                arrived[name] = arrived[name] + gradient if name in arrived else gradient
    gradients = {n: g for plane in planes for n, g in plane.gradients().items()}
    for group in tie_groups(stages):
        parts = [planes[s].gradients([group.variable])[group.variable] for s in group.stages]
        gradients[group.variable] = torch.stack(parts).sum(0)
    for plane in planes:
        plane.apply(0.0, 1.0)  # a commit: what has been written counts from now on
    buffers = {
        name.removeprefix("variable/"): value
        for plane in planes
        for name, value in plane.state().items()
        if name.startswith("variable/")
    }
    return losses, gradients, buffers


def check(make: Callable[[], AnyModule], count: int) -> None:
    torch.manual_seed(1)
    case = make()
    graph = captured(case)
    losses, gradients, buffers = own(case)
    scale = max(float(g.norm()) for g in gradients.values())
    legal, draw = legal_cuts(graph), random.Random(make.__name__)
    for number in range(count):
        stages = min(draw.randint(2, MOST_STAGES), len(legal) + 1)
        cuts = sorted(draw.sample(legal, stages - 1))
        where = f"{make.__name__}, cut {number}: {cuts}"
        found = staged(case, graph, cuts)
        assert found[0] == pytest.approx(losses, rel=1e-6), where
        for name, gradient in gradients.items():
            error = float((found[1][name] - gradient).norm())
            assert error <= 1e-5 * float(gradient.norm()) + 1e-7 * scale, f"{where}: {name}"
        for name, value in buffers.items():
            if name in found[2] and not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(
                    found[2][name], value, rtol=1e-6, atol=1e-7, msg=f"{where}: {name}"
                )


@pytest.mark.heavy
@pytest.mark.parametrize("make", [unet, experts], ids=lambda make: make.__name__)
def test_a_module_cut_anywhere_computes_what_it_computes(make: Callable[[], AnyModule]) -> None:
    check(make, 3)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_unlike_modules_cut_at_random_compute_what_they_compute(make: Callable[[], AnyModule]) -> None:
    check(make, CUTS)


def test_the_modules_are_many() -> None:
    assert len(MAKERS) >= 20 and len({make.__name__ for make in MAKERS}) == len(MAKERS)
